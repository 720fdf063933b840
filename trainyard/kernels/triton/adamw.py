"""AdamW in one pass over flat memory: gradient scaling, both moments, master weight and its bf16 copy."""

from torch import Tensor

from trainyard.compat import has_memory
from trainyard.kernels.triton.language import tl, triton
from trainyard.kernels.triton.rng import mix32

BLOCK_ELEMENTS = 2048


@triton.jit
def _adamw_direction(gradient, exp_avg, exp_avg_sq, index, mask, scalars, weight_decay, beta1, beta2, eps, old):  # type: ignore[no-untyped-def]
    """Store the new moments and return the step to subtract from `old`."""
    lr, scale = tl.load(scalars), tl.load(scalars + 1)
    correct1, correct2 = tl.load(scalars + 2), tl.load(scalars + 3)
    g = tl.load(gradient + index, mask, 0.0).to(tl.float32) * scale
    m = tl.load(exp_avg + index, mask, 0.0)
    v = tl.load(exp_avg_sq + index, mask, 0.0)
    m += (g - m) * beta1
    v += (g * g - v) * beta2
    tl.store(exp_avg + index, m, mask)
    tl.store(exp_avg_sq + index, v, mask)
    return lr * (m / correct1 / (tl.sqrt(v / correct2) + eps) + weight_decay * old)


@triton.jit
def _adamw_update(  # type: ignore[no-untyped-def]
    weight, master, gradient, exp_avg, exp_avg_sq, scalars, weight_decay, beta1, beta2, eps, elements,
    COPY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = index < elements * tl.load(scalars + 4).to(tl.int64)  # 0 masks everything: the step is skipped
    old = tl.load(master + index, mask, 0.0)
    new = old - _adamw_direction(
        gradient, exp_avg, exp_avg_sq, index, mask, scalars, weight_decay, beta1, beta2, eps, old
    )
    tl.store(master + index, new, mask)
    if COPY:
        tl.store(weight + index, new.to(weight.dtype.element_ty), mask)


@triton.jit
def _adamw_update_stochastic(  # type: ignore[no-untyped-def]
    weight, key, row, site, column, gradient, exp_avg, exp_avg_sq, scalars, weight_decay, beta1, beta2, eps,
    columns, elements, BLOCK: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = index < elements * tl.load(scalars + 4).to(tl.int64)  # 0 masks everything: the step is skipped
    old = tl.load(weight + index, mask, 0.0).to(tl.float32)
    new = old - _adamw_direction(
        gradient, exp_avg, exp_avg_sq, index, mask, scalars, weight_decay, beta1, beta2, eps, old
    )
    # `counter_rng.row_seeds` of the row id and 0, then `counter_rng.element_bits`.
    row_id = tl.load(row + index // columns, mask, 0).to(tl.uint32)
    a = mix32(mix32(row_id ^ tl.load(key).to(tl.uint32)))
    b = mix32(mix32(row_id + tl.load(key + 1).to(tl.uint32)))
    c = tl.load(column + index % columns, mask, 0).to(tl.uint32)
    s = tl.load(site).to(tl.uint32)
    noise = mix32((a + c * 0x9E3779B9) ^ (b + s * 0x7F4A7C15)) & 0xFFFF
    bits = (new.to(tl.uint32, bitcast=True) + noise) & 0xFFFF0000
    tl.store(weight + index, bits.to(tl.float32, bitcast=True).to(weight.dtype.element_ty), mask)


def adamw_(
    weight: Tensor, master: Tensor, gradient: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, scalars: Tensor,
    weight_decay: float, beta1: float, beta2: float, eps: float,
) -> None:  # fmt: skip
    """Update flat fp32 memory. `scalars` is fp32 [5]: lr, gradient scale, both bias corrections, and 1 to apply the
    step or 0 to skip it."""
    if has_memory(master):
        _adamw_update[(triton.cdiv(len(master), BLOCK_ELEMENTS),)](
            weight, master, gradient, exp_avg, exp_avg_sq, scalars, weight_decay, 1 - beta1, 1 - beta2, eps,
            len(master), COPY=weight.dtype != master.dtype, BLOCK=BLOCK_ELEMENTS, num_warps=8,
        )  # fmt: skip


def adamw_stochastic_rounding_(
    weight: Tensor, key: Tensor, row: Tensor, site: Tensor, column: Tensor,
    gradient: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, scalars: Tensor,
    weight_decay: float, beta1: float, beta2: float, eps: float,
) -> None:  # fmt: skip
    """Update bf16 weights [rows, columns] without a master copy, with stochastic rounding that depends only on the
    step's `key` and the global ids of rows and columns."""
    if has_memory(weight):
        _adamw_update_stochastic[(triton.cdiv(weight.numel(), BLOCK_ELEMENTS),)](
            weight, key, row, site, column, gradient, exp_avg, exp_avg_sq, scalars, weight_decay, 1 - beta1, 1 - beta2,
            eps, weight.shape[1], weight.numel(), BLOCK=BLOCK_ELEMENTS, num_warps=8,
        )  # fmt: skip
