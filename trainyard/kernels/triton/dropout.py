"""x + dropout(y + bias), one pass over memory each way. Dropout's bits are made where they are used."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from trainyard.kernels.triton.column_sums import split_rows
from trainyard.kernels.triton.rng import row_keep_mask


@triton.jit
def _add_dropout_forward(  # type: ignore[no-untyped-def]
    x, y, bias, first, second, site, threshold, kept, out, columns,
    HAS_X: tl.constexpr, HAS_BIAS: tl.constexpr, DROPOUT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    mask = at < columns
    v = tl.load(y + row * columns + at, mask, 0.0).to(tl.float32)
    if HAS_BIAS:
        v += tl.load(bias + at, mask, 0.0).to(tl.float32)
    if DROPOUT:
        v = tl.where(row_keep_mask(first, second, site, row, at, threshold), v * kept, 0.0)
    if HAS_X:
        v += tl.load(x + row * columns + at, mask, 0.0).to(tl.float32)
    tl.store(out + row * columns + at, v.to(out.dtype.element_ty), mask)


@triton.jit
def _add_dropout_backward(  # type: ignore[no-untyped-def]
    d_out, first, second, site, threshold, kept, dy, parts, rows, per, columns,
    HAS_BIAS: tl.constexpr, DROPOUT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    mask = at < columns
    db = tl.zeros((BLOCK,), tl.float32)
    begin = program.to(tl.int64) * per
    for row in range(begin, tl.minimum(begin + per, rows)):
        d = tl.load(d_out + row * columns + at, mask, 0.0).to(tl.float32)
        if DROPOUT:
            d = tl.where(row_keep_mask(first, second, site, row, at, threshold), d * kept, 0.0)
            tl.store(dy + row * columns + at, d.to(dy.dtype.element_ty), mask)
        if HAS_BIAS:
            db += tl.where(mask, d, 0.0)
    if HAS_BIAS:
        tl.store(parts + program.to(tl.int64) * columns + at, db, mask)


def _num_warps(block: int) -> int:
    return min(max(block // 512, 1), 16)


@torch.library.custom_op("trainyard::add_dropped", mutates_args=())
def add_dropout(
    x: Tensor | None,
    y: Tensor,
    bias: Tensor | None,
    first: Tensor | None,
    second: Tensor | None,
    site: Tensor | None,
    p: float,
) -> Tensor:
    y = y.contiguous()
    columns = y.shape[-1]
    block, out = triton.next_power_of_2(columns), torch.empty_like(y)
    _add_dropout_forward[(y.numel() // columns,)](
        None if x is None else x.contiguous(), y, bias, first, second, site, round(p * 2**31), 1 / (1 - p), out,
        columns, HAS_X=x is not None, HAS_BIAS=bias is not None, DROPOUT=first is not None, BLOCK=block,
        num_warps=_num_warps(block),
    )  # fmt: skip
    return out


@add_dropout.register_fake
def _(x: Tensor | None, y: Tensor, *_: object) -> Tensor:
    return torch.empty_like(y, memory_format=torch.contiguous_format)


@torch.library.custom_op("trainyard::add_dropped_backward", mutates_args=())
def add_dropout_backward(
    d_out: Tensor, first: Tensor | None, second: Tensor | None, site: Tensor | None, p: float, biased: bool
) -> tuple[Tensor, Tensor]:
    """Gradient of y (empty where it is the one given), and parts of the bias's, fp32 [programs, 1, columns]."""
    d_out = d_out.contiguous()
    columns = d_out.shape[-1]
    rows, block = d_out.numel() // columns, triton.next_power_of_2(columns)
    per, programs = split_rows(rows)
    dy = torch.empty_like(d_out) if first is not None else d_out.new_empty(0)
    parts = d_out.new_empty(programs if biased else 0, 1, columns, dtype=torch.float32)
    _add_dropout_backward[(programs,)](
        d_out, first, second, site, round(p * 2**31), 1 / (1 - p), dy, parts, rows, per, columns, HAS_BIAS=biased,
        DROPOUT=first is not None, BLOCK=block, num_warps=_num_warps(block),
    )  # fmt: skip
    return dy, parts


@add_dropout_backward.register_fake
def _(
    d_out: Tensor, first: Tensor | None, second: Tensor | None, site: Tensor | None, p: float, biased: bool
) -> tuple[Tensor, Tensor]:
    dy = torch.empty_like(d_out, memory_format=torch.contiguous_format) if first is not None else d_out.new_empty(0)
    _, programs = split_rows(d_out.numel() // d_out.shape[-1])
    return dy, d_out.new_empty(programs if biased else 0, 1, d_out.shape[-1], dtype=torch.float32)
