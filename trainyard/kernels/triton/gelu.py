"""GELU of a product and its bias, exact (by the error function) or by tanh.

The error function is a polynomial times one exponential, within 1.5e-7 everywhere (Abramowitz and Stegun 7.1.26): the
libraries' own has branches and takes longer than the memory.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from trainyard.kernels.triton.column_sums import MAX_PROGRAMS, split_rows


class GeluTile(NamedTuple):
    elements: int
    max_columns: int
    """At most."""
    num_warps: int

    def shape_for(self, columns: int) -> tuple[int, int]:
        """Rows and columns of one where there are so many columns."""
        width = min(triton.next_power_of_2(columns), self.max_columns)
        return self.elements // width, width


FORWARD_TILE, BACKWARD_TILE = GeluTile(8192, 1024, 8), GeluTile(1024, 512, 8)


@triton.jit
def _normal_cdf(x):  # type: ignore[no-untyped-def]
    """The normal distribution up to x, and exp(-x^2 / 2)."""
    t = 1 / (1 + 0.2316418882 * tl.abs(x))
    e = tl.exp2(x * x * -0.7213475204444817)
    tail = t * (0.127414796 + t * (-0.142248368 + t * (0.7107068705 + t * (-0.7265760135 + t * 0.5307027145)))) * e
    return tl.where(x < 0, tail, 1 - tail), e


@triton.jit
def _tanh_gate(x):  # type: ignore[no-untyped-def]
    """The share of x that GELU's approximation lets through, and the derivative of what it takes a sigmoid of."""
    share = tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    return share, 1.5957691216057308 * (1 + 0.134145 * x * x)


@triton.jit
def _tile_mask(rows, columns, at, ROWS: tl.constexpr, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]
    return (tl.arange(0, ROWS) < rows)[:, None] & (at < columns)[None, :]


@triton.jit
def _gelu_forward(x, bias, out, rows, columns, TANH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    begin = tl.program_id(0).to(tl.int64) * ROWS
    mask = _tile_mask(rows - begin, columns, at, ROWS, COLUMNS)
    place = tl.arange(0, ROWS)[:, None] * columns + at[None, :]  # within 32 bits, unlike the tile's own place
    v = tl.load(x + begin * columns + place, mask, 0.0).to(tl.float32)
    v += tl.load(bias + at, at < columns, 0.0).to(tl.float32)[None, :]
    if TANH:
        share, _ = _tanh_gate(v)
    else:
        share, _ = _normal_cdf(v)
    tl.store(out + begin * columns + place, (v * share).to(out.dtype.element_ty), mask)


@triton.jit
def _gelu_backward(  # type: ignore[no-untyped-def]
    d_out, x, bias, dx, parts, rows, per, columns, TANH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    program = tl.program_id(0)
    at = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = at < columns
    b = tl.load(bias + at, inside, 0.0).to(tl.float32)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    place = tl.arange(0, ROWS)[:, None] * columns + at[None, :]
    begin = program.to(tl.int64) * per
    end = tl.minimum(begin + per, rows)
    for start in range(begin, end, ROWS):
        mask = _tile_mask(end - start, columns, at, ROWS, COLUMNS)
        d = tl.load(d_out + start * columns + place, mask, 0.0).to(tl.float32)
        v = tl.load(x + start * columns + place, mask, 0.0).to(tl.float32) + b[None, :]
        if TANH:
            share, slope = _tanh_gate(v)
            g = share + v * share * (1 - share) * slope
        else:
            share, e = _normal_cdf(v)
            g = share + 0.3989422804014327 * v * e
        d = d * g
        tl.store(dx + start * columns + place, d.to(dx.dtype.element_ty), mask)
        total += d
    tl.store(parts + program.to(tl.int64) * columns + at, tl.sum(total, 0), inside)


@torch.library.custom_op("trainyard::gelu", mutates_args=())
def gelu(x: Tensor, bias: Tensor, tanh: bool) -> Tensor:
    x = x.contiguous()
    out, columns = torch.empty_like(x), x.shape[-1]
    rows, (tall, wide) = x.numel() // columns, FORWARD_TILE.shape_for(columns)
    grid = triton.cdiv(rows, tall), triton.cdiv(columns, wide)
    _gelu_forward[grid](
        x, bias, out, rows, columns, TANH=tanh, ROWS=tall, COLUMNS=wide, num_warps=FORWARD_TILE.num_warps
    )
    return out


@gelu.register_fake
def _(x: Tensor, bias: Tensor, tanh: bool) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _backward_split(rows: int, columns: int) -> tuple[int, int]:
    """Of the backward pass: rows of each, and how many share them. A strip of columns has its own."""
    strips = -(-columns // BACKWARD_TILE.shape_for(columns)[1])
    return split_rows(rows, max(MAX_PROGRAMS // strips, 1))


@torch.library.custom_op("trainyard::gelu_backward", mutates_args=())
def gelu_backward(d_out: Tensor, x: Tensor, bias: Tensor, tanh: bool) -> tuple[Tensor, Tensor]:
    """Gradient of x, and parts of the bias's, fp32 [programs, 1, columns]."""
    d_out, x = d_out.contiguous(), x.contiguous()
    columns = x.shape[-1]
    rows, (tall, wide) = x.numel() // columns, BACKWARD_TILE.shape_for(columns)
    per, programs = _backward_split(rows, columns)
    dx, parts = torch.empty_like(x), x.new_empty(programs, 1, columns, dtype=torch.float32)
    _gelu_backward[(programs, triton.cdiv(columns, wide))](
        d_out,
        x,
        bias,
        dx,
        parts,
        rows,
        per,
        columns,
        TANH=tanh,
        ROWS=tall,
        COLUMNS=wide,
        num_warps=BACKWARD_TILE.num_warps,
    )
    return dx, parts


@gelu_backward.register_fake
def _(d_out: Tensor, x: Tensor, bias: Tensor, tanh: bool) -> tuple[Tensor, Tensor]:
    dx = torch.empty_like(x, memory_format=torch.contiguous_format)
    _, programs = _backward_split(x.numel() // x.shape[-1], x.shape[-1])
    return dx, x.new_empty(programs, 1, x.shape[-1], dtype=torch.float32)
