"""x + dropout(y + bias), one pass over memory forward and one backward; the kernels compute the dropout bits."""

import torch
from torch import Tensor

from trainyard.compat import has_memory
from trainyard.kernels.custom_op import PARTIAL_SUM_OPS, kernel_op, row_block
from trainyard.kernels.triton.column_sums import split_rows
from trainyard.kernels.triton.language import tl, triton
from trainyard.kernels.triton.rng import row_keep_mask


@triton.jit
def _add_dropout_forward(  # type: ignore[no-untyped-def]
    x, y, bias, seed0, seed1, site, threshold, keep_scale, out, columns,
    HAS_X: tl.constexpr, HAS_BIAS: tl.constexpr, DROPOUT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < columns
    v = tl.load(y + row * columns + column, mask, 0.0).to(tl.float32)
    if HAS_BIAS:
        v += tl.load(bias + column, mask, 0.0).to(tl.float32)
    if DROPOUT:
        v = tl.where(row_keep_mask(seed0, seed1, site, row, column, threshold), v * keep_scale, 0.0)
    if HAS_X:
        v += tl.load(x + row * columns + column, mask, 0.0).to(tl.float32)
    tl.store(out + row * columns + column, v.to(out.dtype.element_ty), mask)


@triton.jit
def _add_dropout_backward(  # type: ignore[no-untyped-def]
    d_out, seed0, seed1, site, threshold, keep_scale, dy, partial_sums, rows, rows_per_program, columns,
    HAS_BIAS: tl.constexpr, DROPOUT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    mask = column < columns
    db = tl.zeros((BLOCK,), tl.float32)
    first_row = program.to(tl.int64) * rows_per_program
    for row in range(first_row, tl.minimum(first_row + rows_per_program, rows)):
        d = tl.load(d_out + row * columns + column, mask, 0.0).to(tl.float32)
        if DROPOUT:
            d = tl.where(row_keep_mask(seed0, seed1, site, row, column, threshold), d * keep_scale, 0.0)
            tl.store(dy + row * columns + column, d.to(dy.dtype.element_ty), mask)
        if HAS_BIAS:
            db += tl.where(mask, d, 0.0)
    if HAS_BIAS:
        tl.store(partial_sums + program.to(tl.int64) * columns + column, db, mask)


@kernel_op
def add_dropout(
    x: Tensor | None, y: Tensor, bias: Tensor | None,
    seed0: Tensor | None, seed1: Tensor | None, site: Tensor | None, p: float,
) -> Tensor:  # fmt: skip
    y = y.contiguous()
    columns = y.shape[-1]
    out = y.new_empty(y.shape)
    if has_memory(out):
        _add_dropout_forward[(y.numel() // columns,)](
            None if x is None else x.contiguous(), y, bias, seed0, seed1, site, round(p * 2**31), 1 / (1 - p), out,
            columns, HAS_X=x is not None, HAS_BIAS=bias is not None, DROPOUT=seed0 is not None,
            **row_block(columns, 512),
        )  # fmt: skip
    return out


@kernel_op
def add_dropout_backward(
    d_out: Tensor, seed0: Tensor | None, seed1: Tensor | None, site: Tensor | None, p: float, has_bias: bool
) -> tuple[Tensor, Tensor]:
    """Return the gradient of y (empty if it equals d_out) and the partial sums of the bias gradient, fp32
    [programs, 1, columns]."""
    d_out = d_out.contiguous()
    columns = d_out.shape[-1]
    rows = d_out.numel() // columns
    rows_per_program, programs = split_rows(rows)
    dy = d_out.new_empty(d_out.shape) if seed0 is not None else d_out.new_empty(0)
    partial_sums = d_out.new_empty(programs if has_bias else 0, 1, columns, dtype=torch.float32)
    if has_memory(dy):
        _add_dropout_backward[(programs,)](
            d_out, seed0, seed1, site, round(p * 2**31), 1 / (1 - p), dy, partial_sums, rows, rows_per_program, columns,
            HAS_BIAS=has_bias, DROPOUT=seed0 is not None, **row_block(columns, 512),
        )  # fmt: skip
    return dy, partial_sums


PARTIAL_SUM_OPS.add(torch.ops.trainyard.add_dropout_backward.default)
