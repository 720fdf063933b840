"""The update rules, element by element: pure tensor code that compiles to one pass over memory."""

import torch
from torch import Tensor

from trainyard.core.counter_rng import element_bits


def adam_moments(
    gradient: Tensor,
    first: Tensor,
    second: Tensor,
    scale: Tensor,
    correct: Tensor,
    beta1: float,
    beta2: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """New first and second moment, and Adam's direction."""
    g = gradient.float() * scale
    new_first = first + (g - first) * (1 - beta1)
    new_second = second + (g * g - second) * (1 - beta2)
    return new_first, new_second, (new_first / correct[0]) / ((new_second / correct[1]).sqrt() + eps)


def adamw_(
    weight: Tensor,
    master: Tensor,
    gradient: Tensor,
    first: Tensor,
    second: Tensor,
    lr: Tensor,
    scale: Tensor,
    correct: Tensor,
    ok: Tensor,
    decay: float,
    beta1: float,
    beta2: float,
    eps: float,
) -> None:
    """In place; nothing changes where `ok` is false. `weight` is the copy of `master` in the compute dtype."""
    new_first, new_second, update = adam_moments(gradient, first, second, scale, correct, beta1, beta2, eps)
    new = torch.where(ok, master - lr * (update + decay * master), master)
    first.copy_(torch.where(ok, new_first, first))
    second.copy_(torch.where(ok, new_second, second))
    master.copy_(new)
    if weight.dtype != master.dtype:
        weight.copy_(new)


def adamw_stochastic_rounding_(
    weight: Tensor,
    rows: tuple[Tensor, Tensor],
    site: Tensor,
    column: Tensor,
    gradient: Tensor,
    first: Tensor,
    second: Tensor,
    lr: Tensor,
    scale: Tensor,
    correct: Tensor,
    ok: Tensor,
    decay: float,
    beta1: float,
    beta2: float,
    eps: float,
) -> None:
    """AdamW on bf16 weights without a master copy: the new value is rounded up or down at random, right on average."""
    new_first, new_second, update = adam_moments(gradient, first, second, scale, correct, beta1, beta2, eps)
    old = weight.float()
    new = stochastic_round_to_bf16(old - lr * (update + decay * old), rows, site, column)
    first.copy_(torch.where(ok, new_first, first))
    second.copy_(torch.where(ok, new_second, second))
    weight.copy_(torch.where(ok, new, weight))


def stochastic_round_to_bf16(x: Tensor, rows: tuple[Tensor, Tensor], site: Tensor, column: Tensor) -> Tensor:
    """Stochastic rounding of an fp32 matrix, by the random numbers of its global rows and columns."""
    noise = element_bits(rows, site, column) & 0xFFFF
    return ((x.view(torch.int32) + noise) & -0x10000).view(torch.float32).bfloat16()
