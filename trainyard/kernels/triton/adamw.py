"""AdamW in one pass over flat memory: scale the gradient, both moments, master weight, its copy in bf16."""

import triton
import triton.language as tl
from torch import Tensor

from trainyard.kernels.triton.rng import mix32

BLOCK_ELEMENTS = 2048


@triton.jit
def _adamw_direction(gradient, first, second, at, mask, scalars, decay, beta1, beta2, eps, old):  # type: ignore[no-untyped-def]
    """Where all is well, store new moments; the step to take from `old`."""
    lr, scale = tl.load(scalars), tl.load(scalars + 1)
    correct1, correct2 = tl.load(scalars + 2), tl.load(scalars + 3)
    g = tl.load(gradient + at, mask, 0.0).to(tl.float32) * scale
    m = tl.load(first + at, mask, 0.0)
    v = tl.load(second + at, mask, 0.0)
    m += (g - m) * beta1
    v += (g * g - v) * beta2
    tl.store(first + at, m, mask)
    tl.store(second + at, v, mask)
    return lr * (m / correct1 / (tl.sqrt(v / correct2) + eps) + decay * old)


@triton.jit
def _adamw_update(  # type: ignore[no-untyped-def]
    weight, master, gradient, first, second, scalars, decay, beta1, beta2, eps, count,
    COPY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < count * tl.load(scalars + 4).to(tl.int64)  # nothing where it is 0
    old = tl.load(master + at, mask, 0.0)
    new = old - _adamw_direction(gradient, first, second, at, mask, scalars, decay, beta1, beta2, eps, old)
    tl.store(master + at, new, mask)
    if COPY:
        tl.store(weight + at, new.to(weight.dtype.element_ty), mask)


@triton.jit
def _adamw_update_stochastic(  # type: ignore[no-untyped-def]
    weight, key, row, site, column, gradient, first, second, scalars, decay, beta1, beta2, eps,
    columns, count, BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < count * tl.load(scalars + 4).to(tl.int64)  # nothing where it is 0
    old = tl.load(weight + at, mask, 0.0).to(tl.float32)
    new = old - _adamw_direction(gradient, first, second, at, mask, scalars, decay, beta1, beta2, eps, old)
    # `random.row32` of the row's number and 0, then `random.cell32`.
    number = tl.load(row + at // columns, mask, 0).to(tl.uint32)
    a = mix32(mix32(number ^ tl.load(key).to(tl.uint32)))
    b = mix32(mix32(number + tl.load(key + 1).to(tl.uint32)))
    c = tl.load(column + at % columns, mask, 0).to(tl.uint32)
    s = tl.load(site).to(tl.uint32)
    noise = mix32((a + c * 0x9E3779B9) ^ (b + s * 0x7F4A7C15)) & 0xFFFF
    bits = (new.to(tl.uint32, bitcast=True) + noise) & 0xFFFF0000
    tl.store(weight + at, bits.to(tl.float32, bitcast=True).to(weight.dtype.element_ty), mask)


def adamw_(
    weight: Tensor,
    master: Tensor,
    gradient: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    scalars: Tensor,
    weight_decay: float,
    beta1: float,
    beta2: float,
    eps: float,
) -> None:
    """`scalars`: lr, scale, both bias corrections, and whether to change anything; fp32 [5]."""
    _adamw_update[(triton.cdiv(len(master), BLOCK_ELEMENTS),)](
        weight,
        master,
        gradient,
        exp_avg,
        exp_avg_sq,
        scalars,
        weight_decay,
        1 - beta1,
        1 - beta2,
        eps,
        len(master),
        COPY=weight.dtype != master.dtype,
        BLOCK=BLOCK_ELEMENTS,
        num_warps=8,
    )


def adamw_stochastic_rounding_(
    weight: Tensor,
    key: Tensor,
    row: Tensor,
    site: Tensor,
    column: Tensor,
    gradient: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    scalars: Tensor,
    weight_decay: float,
    beta1: float,
    beta2: float,
    eps: float,
) -> None:
    """bf16 weights [rows, columns] without a master copy, rounded up or down at random by the step's `key` and the
    global numbers of rows and columns."""
    _adamw_update_stochastic[(triton.cdiv(weight.numel(), BLOCK_ELEMENTS),)](
        weight,
        key,
        row,
        site,
        column,
        gradient,
        exp_avg,
        exp_avg_sq,
        scalars,
        weight_decay,
        1 - beta1,
        1 - beta2,
        eps,
        weight.shape[1],
        weight.numel(),
        BLOCK=BLOCK_ELEMENTS,
        num_warps=8,
    )
