"""Residual addition and RMSNorm, one pass over memory forward and one backward."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from trainyard.kernels.triton.column_sums import split_rows


@triton.jit
def _rms_norm_forward(x, y, weight, total, out, rstd, eps, columns, HAS_Y: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < columns
    v = tl.load(x + row * columns + column, mask, 0.0).to(tl.float32)
    if HAS_Y:
        v += tl.load(y + row * columns + column, mask, 0.0).to(tl.float32)
        rounded = v.to(total.dtype.element_ty)
        tl.store(total + row * columns + column, rounded, mask)
        v = rounded.to(tl.float32)
    r = 1 / tl.sqrt(tl.sum(v * v, 0) / columns + eps)
    tl.store(rstd + row, r)
    w = tl.load(weight + column, mask, 0.0).to(tl.float32)
    tl.store(out + row * columns + column, (v * r * w).to(out.dtype.element_ty), mask)


@triton.jit
def _rms_norm_backward(  # type: ignore[no-untyped-def]
    d_out,
    d_total,
    x,
    weight,
    rstd,
    dx,
    partial_sums,
    rows,
    rows_per_program,
    columns,
    HAS_TOTAL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    program = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    mask = column < columns
    w = tl.load(weight + column, mask, 0.0).to(tl.float32)
    dw = tl.zeros((BLOCK,), tl.float32)
    first_row = program.to(tl.int64) * rows_per_program
    for row in range(first_row, tl.minimum(first_row + rows_per_program, rows)):
        offset = row * columns + column
        g = tl.load(d_out + offset, mask, 0.0).to(tl.float32)
        r = tl.load(rstd + row)
        n = tl.load(x + offset, mask, 0.0).to(tl.float32) * r
        dw += g * n
        g = g * w
        d = (g - n * (tl.sum(g * n, 0) / columns)) * r
        if HAS_TOTAL:
            d += tl.load(d_total + offset, mask, 0.0).to(tl.float32)
        tl.store(dx + offset, d.to(dx.dtype.element_ty), mask)
    tl.store(partial_sums + program.to(tl.int64) * columns + column, dw, mask)


def _num_warps(block: int) -> int:
    return min(max(block // 512, 1), 16)


@torch.library.custom_op("trainyard::add_rms_norm", mutates_args=())
def add_rms_norm(x: Tensor, y: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return x + y (empty if y is None), its RMS norm, and 1 / RMS of each row."""
    x = x.contiguous()
    columns = x.shape[-1]
    rows, block = x.numel() // columns, triton.next_power_of_2(columns)
    out, rstd = torch.empty_like(x), x.new_empty(rows, dtype=torch.float32)
    total = x.new_empty(0) if y is None else torch.empty_like(x)
    _rms_norm_forward[(rows,)](
        x,
        x if y is None else y.contiguous(),
        weight,
        total,
        out,
        rstd,
        eps,
        columns,
        HAS_Y=y is not None,
        BLOCK=block,
        num_warps=_num_warps(block),
    )
    return total, out, rstd


@add_rms_norm.register_fake
def _(x: Tensor, y: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    like = torch.empty_like(x, memory_format=torch.contiguous_format)
    rows = x.numel() // x.shape[-1]
    total = x.new_empty(0) if y is None else torch.empty_like(like)
    return total, like, x.new_empty(rows, dtype=torch.float32)


@torch.library.custom_op("trainyard::rms_norm_backward", mutates_args=())
def rms_norm_backward(
    d_out: Tensor, d_total: Tensor | None, x: Tensor, weight: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the gradient of x (including d_total) and the partial sums of the weight gradient, fp32
    [programs, 1, columns]."""
    d_out, x = d_out.contiguous(), x.contiguous()
    columns = x.shape[-1]
    rows, block = x.numel() // columns, triton.next_power_of_2(columns)
    rows_per_program, programs = split_rows(rows)
    dx, partial_sums = torch.empty_like(x), x.new_empty(programs, 1, columns, dtype=torch.float32)
    _rms_norm_backward[(programs,)](
        d_out,
        d_out if d_total is None else d_total.contiguous(),
        x,
        weight,
        rstd,
        dx,
        partial_sums,
        rows,
        rows_per_program,
        columns,
        HAS_TOTAL=d_total is not None,
        BLOCK=block,
        num_warps=_num_warps(block),
    )
    return dx, partial_sums


@rms_norm_backward.register_fake
def _(d_out: Tensor, d_total: Tensor | None, x: Tensor, weight: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    _, programs = split_rows(x.numel() // x.shape[-1])
    partial_sums = x.new_empty(programs, 1, x.shape[-1], dtype=torch.float32)
    return torch.empty_like(x, memory_format=torch.contiguous_format), partial_sums
