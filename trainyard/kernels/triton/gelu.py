"""GELU(x + bias), exact (error function) or with the tanh approximation.

The error function is a polynomial times one exponential, within 1.5e-7 everywhere (Abramowitz and Stegun 7.1.26). The
library version has branches and takes longer than the memory traffic.
"""

import torch
from torch import Tensor

from trainyard.compat import has_memory
from trainyard.core.constants import MAX_REDUCTION_PROGRAMS
from trainyard.kernels.custom_op import PARTIAL_SUM_OPS, kernel_op
from trainyard.kernels.triton.column_sums import split_rows
from trainyard.kernels.triton.language import tl, triton

FORWARD_TILE, BACKWARD_TILE = (8192, 1024), (1024, 512)
"""Elements that a program handles at a time, and the largest width of the tile."""
NUM_WARPS = 8


def _tile_shape(tile: tuple[int, int], columns: int) -> tuple[int, int]:
    """Rows and columns of a tile for a matrix with this many columns."""
    elements, max_columns = tile
    width = min(1 << (columns - 1).bit_length(), max_columns)
    return elements // width, width


@triton.jit
def normal_cdf(x):  # type: ignore[no-untyped-def]
    """The normal CDF at x, and exp(-x^2 / 2)."""
    t = 1 / (1 + 0.2316418882 * tl.abs(x))
    e = tl.exp2(x * x * -0.7213475204444817)
    tail = t * (0.127414796 + t * (-0.142248368 + t * (0.7107068705 + t * (-0.7265760135 + t * 0.5307027145)))) * e
    return tl.where(x < 0, tail, 1 - tail), e


@triton.jit
def tanh_gate(x):  # type: ignore[no-untyped-def]
    """The gate of the tanh approximation, sigmoid(z(x)) (GELU(x) = x * gate), and dz/dx."""
    gate = tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    return gate, 1.5957691216057308 * (1 + 0.134145 * x * x)


@triton.jit
def _tile_mask(rows, columns, column, ROWS: tl.constexpr, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]
    return (tl.arange(0, ROWS) < rows)[:, None] & (column < columns)[None, :]


@triton.jit
def _gelu_forward(x, bias, out, rows, columns, TANH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    first_row = tl.program_id(0).to(tl.int64) * ROWS
    mask = _tile_mask(rows - first_row, columns, column, ROWS, COLUMNS)
    offset = tl.arange(0, ROWS)[:, None] * columns + column[None, :]  # fits 32 bits, unlike the offset of the tile
    v = tl.load(x + first_row * columns + offset, mask, 0.0).to(tl.float32)
    v += tl.load(bias + column, column < columns, 0.0).to(tl.float32)[None, :]
    if TANH:
        gate, _ = tanh_gate(v)
    else:
        gate, _ = normal_cdf(v)
    tl.store(out + first_row * columns + offset, (v * gate).to(out.dtype.element_ty), mask)


@triton.jit
def _gelu_backward(  # type: ignore[no-untyped-def]
    d_out, x, bias, dx, partial_sums, rows, rows_per_program, columns,
    TANH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    column_mask = column < columns
    b = tl.load(bias + column, column_mask, 0.0).to(tl.float32)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    offset = tl.arange(0, ROWS)[:, None] * columns + column[None, :]
    first_row = program.to(tl.int64) * rows_per_program
    end = tl.minimum(first_row + rows_per_program, rows)
    for start in range(first_row, end, ROWS):
        mask = _tile_mask(end - start, columns, column, ROWS, COLUMNS)
        d = tl.load(d_out + start * columns + offset, mask, 0.0).to(tl.float32)
        v = tl.load(x + start * columns + offset, mask, 0.0).to(tl.float32) + b[None, :]
        if TANH:
            gate, slope = tanh_gate(v)
            g = gate + v * gate * (1 - gate) * slope
        else:
            gate, e = normal_cdf(v)
            g = gate + 0.3989422804014327 * v * e
        d = d * g
        tl.store(dx + start * columns + offset, d.to(dx.dtype.element_ty), mask)
        total += d
    tl.store(partial_sums + program.to(tl.int64) * columns + column, tl.sum(total, 0), column_mask)


@kernel_op
def gelu(x: Tensor, bias: Tensor, tanh: bool) -> Tensor:
    x = x.contiguous()
    out = x.new_empty(x.shape)
    if has_memory(out):
        columns = x.shape[-1]
        rows, (tile_rows, tile_columns) = x.numel() // columns, _tile_shape(FORWARD_TILE, columns)
        _gelu_forward[triton.cdiv(rows, tile_rows), triton.cdiv(columns, tile_columns)](
            x, bias, out, rows, columns,
            TANH=tanh, ROWS=tile_rows, COLUMNS=tile_columns, num_warps=NUM_WARPS,
        )  # fmt: skip
    return out


@kernel_op
def gelu_backward(d_out: Tensor, x: Tensor, bias: Tensor, tanh: bool) -> tuple[Tensor, Tensor]:
    """Return the gradient of x and the partial sums of the bias gradient, fp32 [programs, 1, columns]."""
    d_out, x = d_out.contiguous(), x.contiguous()
    columns = x.shape[-1]
    rows, (tile_rows, tile_columns) = x.numel() // columns, _tile_shape(BACKWARD_TILE, columns)
    tiles_across = -(-columns // tile_columns)
    rows_per_program, programs = split_rows(rows, max(MAX_REDUCTION_PROGRAMS // tiles_across, 1))
    dx, partial_sums = x.new_empty(x.shape), x.new_empty(programs, 1, columns, dtype=torch.float32)
    if has_memory(dx):
        _gelu_backward[programs, tiles_across](
            d_out, x, bias, dx, partial_sums, rows, rows_per_program, columns,
            TANH=tanh, ROWS=tile_rows, COLUMNS=tile_columns, num_warps=NUM_WARPS,
        )  # fmt: skip
    return dx, partial_sums


PARTIAL_SUM_OPS.add(torch.ops.trainyard.gelu_backward.default)
