"""LayerNorm of x + dropout(y + bias), one pass over memory forward and one backward.

The kernels compute the dropout bits themselves: reading a mask would cost more memory traffic.
"""

import torch
from torch import Tensor

from trainyard.compat import has_memory
from trainyard.kernels.custom_op import PARTIAL_SUM_OPS, kernel_op, row_block
from trainyard.kernels.triton.column_sums import split_rows
from trainyard.kernels.triton.language import tl, triton
from trainyard.kernels.triton.rng import row_keep_mask


@triton.jit
def _layer_norm_forward(  # type: ignore[no-untyped-def]
    x, y, y_bias, weight, bias, seed0, seed1, site, threshold, keep_scale, total, out, mean, rstd, eps, columns,
    HAS_Y: tl.constexpr, HAS_BIAS: tl.constexpr, DROPOUT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < columns
    v = tl.load(x + row * columns + column, mask, 0.0).to(tl.float32)
    if HAS_Y:
        u = tl.load(y + row * columns + column, mask, 0.0).to(tl.float32)
        if HAS_BIAS:
            u += tl.load(y_bias + column, mask, 0.0).to(tl.float32)
        if DROPOUT:
            u = tl.where(row_keep_mask(seed0, seed1, site, row, column, threshold), u * keep_scale, 0.0)
        rounded = (v + u).to(total.dtype.element_ty)
        tl.store(total + row * columns + column, rounded, mask)
        v = rounded.to(tl.float32)
    m = tl.sum(v, 0) / columns
    v = tl.where(mask, v - m, 0.0)
    r = 1 / tl.sqrt(tl.sum(v * v, 0) / columns + eps)
    tl.store(mean + row, m)
    tl.store(rstd + row, r)
    w = tl.load(weight + column, mask, 0.0).to(tl.float32)
    b = tl.load(bias + column, mask, 0.0).to(tl.float32)
    tl.store(out + row * columns + column, (v * r * w + b).to(out.dtype.element_ty), mask)


@triton.jit
def _layer_norm_backward(  # type: ignore[no-untyped-def]
    d_out, d_total, total, weight, seed0, seed1, site, threshold, keep_scale, mean, rstd, dx, dy, partial_sums, rows,
    rows_per_program, columns, HAS_TOTAL: tl.constexpr, POST_NORM: tl.constexpr, HAS_BIAS: tl.constexpr,
    DROPOUT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    mask = column < columns
    w = tl.load(weight + column, mask, 0.0).to(tl.float32)
    dw = tl.zeros((BLOCK,), tl.float32)
    db = tl.zeros((BLOCK,), tl.float32)
    dyb = tl.zeros((BLOCK,), tl.float32)
    first_row = program.to(tl.int64) * rows_per_program
    for row in range(first_row, tl.minimum(first_row + rows_per_program, rows)):
        offset = row * columns + column
        g = tl.load(d_out + offset, mask, 0.0).to(tl.float32)
        if HAS_TOTAL and POST_NORM:
            g += tl.load(d_total + offset, mask, 0.0).to(tl.float32)
        r = tl.load(rstd + row)
        n = (tl.load(total + offset, mask, 0.0).to(tl.float32) - tl.load(mean + row)) * r
        n = tl.where(mask, n, 0.0)
        dw += g * n
        db += g
        g = g * w
        d = (g - tl.sum(g, 0) / columns - n * (tl.sum(g * n, 0) / columns)) * r
        if HAS_TOTAL and not POST_NORM:
            d += tl.load(d_total + offset, mask, 0.0).to(tl.float32)
        tl.store(dx + offset, d.to(dx.dtype.element_ty), mask)
        if DROPOUT:
            d = tl.where(row_keep_mask(seed0, seed1, site, row, column, threshold), d * keep_scale, 0.0)
            tl.store(dy + offset, d.to(dy.dtype.element_ty), mask)
        if HAS_BIAS:
            dyb += tl.where(mask, d, 0.0)
    partial_sums += program.to(tl.int64) * (3 if HAS_BIAS else 2) * columns
    tl.store(partial_sums + column, dw, mask)
    tl.store(partial_sums + columns + column, db, mask)
    if HAS_BIAS:
        tl.store(partial_sums + 2 * columns + column, dyb, mask)


@kernel_op
def add_layer_norm(
    x: Tensor, y: Tensor | None, y_bias: Tensor | None, weight: Tensor, bias: Tensor,
    seed0: Tensor | None, seed1: Tensor | None, site: Tensor | None, p: float, eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return x + dropout(y + y_bias) (empty if y is None), its LayerNorm, and mean and 1 / std of each row."""
    x = x.contiguous()
    columns = x.shape[-1]
    rows = x.numel() // columns
    total = x.new_empty(0) if y is None else x.new_empty(x.shape)
    out, mean, rstd = x.new_empty(x.shape), *(x.new_empty(rows, dtype=torch.float32) for _ in range(2))
    if has_memory(out):
        _layer_norm_forward[(rows,)](
            x, None if y is None else y.contiguous(), y_bias, weight, bias, seed0, seed1, site, round(p * 2**31),
            1 / (1 - p), total, out, mean, rstd, eps, columns, HAS_Y=y is not None, HAS_BIAS=y_bias is not None,
            DROPOUT=seed0 is not None, **row_block(columns, 1024),
        )  # fmt: skip
    return total, out, mean, rstd


@kernel_op
def layer_norm_backward(
    d_out: Tensor, d_total: Tensor | None, total: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor,
    seed0: Tensor | None, seed1: Tensor | None, site: Tensor | None, p: float, has_bias: bool, post_norm: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of x and of y (empty if it equals that of x), and the partial sums of the gradients of
    weight, bias and y_bias, fp32 [programs, 3, columns]. `d_total` is the gradient of the sum or, with `post_norm`, a
    second gradient of the output."""
    d_out, total = d_out.contiguous(), total.contiguous()
    columns = total.shape[-1]
    rows = total.numel() // columns
    rows_per_program, programs = split_rows(rows)
    dx = total.new_empty(total.shape)
    dy = total.new_empty(total.shape) if seed0 is not None else total.new_empty(0)
    partial_sums = total.new_empty(programs, 3 if has_bias else 2, columns, dtype=torch.float32)
    if has_memory(dx):
        _layer_norm_backward[(programs,)](
            d_out, None if d_total is None else d_total.contiguous(), total, weight, seed0, seed1, site,
            round(p * 2**31), 1 / (1 - p), mean, rstd, dx, dy, partial_sums, rows, rows_per_program, columns,
            HAS_TOTAL=d_total is not None, POST_NORM=post_norm, HAS_BIAS=has_bias, DROPOUT=seed0 is not None,
            **row_block(columns, 1024),
        )  # fmt: skip
    return dx, dy, partial_sums


PARTIAL_SUM_OPS.add(torch.ops.trainyard.layer_norm_backward.default)
