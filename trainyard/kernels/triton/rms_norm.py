"""Residual addition and RMSNorm, one pass over memory forward and one backward."""

import torch
from torch import Tensor

from trainyard.compat import has_memory
from trainyard.kernels.custom_op import PARTIAL_SUM_OPS, kernel_op, row_block
from trainyard.kernels.triton.column_sums import split_rows
from trainyard.kernels.triton.language import tl, triton


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
    d_out, d_total, x, weight, rstd, dx, partial_sums, rows, rows_per_program, columns,
    HAS_TOTAL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
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


@kernel_op
def add_rms_norm(x: Tensor, y: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return x + y (empty if y is None), its RMS norm, and 1 / RMS of each row."""
    x = x.contiguous()
    columns = x.shape[-1]
    rows = x.numel() // columns
    total = x.new_empty(0) if y is None else x.new_empty(x.shape)
    out, rstd = x.new_empty(x.shape), x.new_empty(rows, dtype=torch.float32)
    if has_memory(out):
        _rms_norm_forward[(rows,)](
            x, x if y is None else y.contiguous(), weight, total, out, rstd, eps, columns,
            HAS_Y=y is not None, **row_block(columns, 512),
        )  # fmt: skip
    return total, out, rstd


@kernel_op
def rms_norm_backward(
    d_out: Tensor, d_total: Tensor | None, x: Tensor, weight: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the gradient of x (including d_total) and the partial sums of the weight gradient, fp32
    [programs, 1, columns]."""
    d_out, x = d_out.contiguous(), x.contiguous()
    columns = x.shape[-1]
    rows = x.numel() // columns
    rows_per_program, programs = split_rows(rows)
    dx, partial_sums = x.new_empty(x.shape), x.new_empty(programs, 1, columns, dtype=torch.float32)
    if has_memory(dx):
        _rms_norm_backward[(programs,)](
            d_out, d_out if d_total is None else d_total.contiguous(), x, weight, rstd, dx, partial_sums, rows,
            rows_per_program, columns, HAS_TOTAL=d_total is not None, **row_block(columns, 512),
        )  # fmt: skip
    return dx, partial_sums


PARTIAL_SUM_OPS.add(torch.ops.trainyard.rms_norm_backward.default)
