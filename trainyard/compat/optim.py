"""Fused optimizer kernels behind private names."""

import torch
from torch import Tensor


def foreach_norm(tensors: list[Tensor]) -> Tensor:
    """The fp32 2-norm of each tensor, in one pass over memory (torch 2.11 to 2.14; clip_grad_norm_ uses it too)."""
    return torch.stack(torch._foreach_norm(tensors, 2, dtype=torch.float32))


def fused_adamw_(
    weight: Tensor, gradient: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, step_count: Tensor,
    lr: Tensor, scale: Tensor, apply_update: Tensor, weight_decay: float, betas: tuple[float, float], eps: float,
) -> None:  # fmt: skip
    """torch's one-pass AdamW on fp32 tensors (torch 2.11 to 2.14; what torch.optim.AdamW(fused=True) calls).

    Multiplies the gradient by `scale` in place. Changes nothing if `apply_update` is false. `step_count` includes this
    step.
    """
    torch._fused_adamw_(
        [weight], [gradient], [exp_avg], [exp_avg_sq], [], [step_count],
        lr=lr, beta1=betas[0], beta2=betas[1], weight_decay=weight_decay, eps=eps, amsgrad=False, maximize=False,
        grad_scale=1 / scale, found_inf=1 - apply_update.float(),
    )  # fmt: skip


def has_fused_adamw(weight: Tensor) -> bool:
    """True if `fused_adamw_` supports the device of this tensor: CPU, GPU or meta. Other devices have no such kernel,
    and their compiler fuses the plain update into one pass."""
    return weight.is_cpu or weight.is_cuda or weight.is_meta
