"""LayerNorm of x + dropout(y + bias), one pass over memory each way. Dropout's bits are made where they are used."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from trainyard.kernels.triton.column_sums import split_rows
from trainyard.kernels.triton.rng import row_keep_mask


@triton.jit
def _layer_norm_forward(  # type: ignore[no-untyped-def]
    x, y, y_bias, weight, bias, first, second, site, threshold, kept, total, out, mean, inverse, eps, columns,
    HAS_Y: tl.constexpr, HAS_BIAS: tl.constexpr, DROPOUT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    mask = at < columns
    v = tl.load(x + row * columns + at, mask, 0.0).to(tl.float32)
    if HAS_Y:
        u = tl.load(y + row * columns + at, mask, 0.0).to(tl.float32)
        if HAS_BIAS:
            u += tl.load(y_bias + at, mask, 0.0).to(tl.float32)
        if DROPOUT:
            u = tl.where(row_keep_mask(first, second, site, row, at, threshold), u * kept, 0.0)
        rounded = (v + u).to(total.dtype.element_ty)
        tl.store(total + row * columns + at, rounded, mask)
        v = rounded.to(tl.float32)
    m = tl.sum(v, 0) / columns
    v = tl.where(mask, v - m, 0.0)
    r = 1 / tl.sqrt(tl.sum(v * v, 0) / columns + eps)
    tl.store(mean + row, m)
    tl.store(inverse + row, r)
    w = tl.load(weight + at, mask, 0.0).to(tl.float32)
    b = tl.load(bias + at, mask, 0.0).to(tl.float32)
    tl.store(out + row * columns + at, (v * r * w + b).to(out.dtype.element_ty), mask)


@triton.jit
def _layer_norm_backward(  # type: ignore[no-untyped-def]
    d_out, d_total, total, weight, first, second, site, threshold, kept, mean, inverse, dx, dy, parts, rows, per,
    columns, HAS_TOTAL: tl.constexpr, AFTER: tl.constexpr, HAS_BIAS: tl.constexpr, DROPOUT: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    mask = at < columns
    w = tl.load(weight + at, mask, 0.0).to(tl.float32)
    dw = tl.zeros((BLOCK,), tl.float32)
    db = tl.zeros((BLOCK,), tl.float32)
    dyb = tl.zeros((BLOCK,), tl.float32)
    begin = program.to(tl.int64) * per
    for row in range(begin, tl.minimum(begin + per, rows)):
        place = row * columns + at
        g = tl.load(d_out + place, mask, 0.0).to(tl.float32)
        if HAS_TOTAL and AFTER:
            g += tl.load(d_total + place, mask, 0.0).to(tl.float32)
        r = tl.load(inverse + row)
        n = (tl.load(total + place, mask, 0.0).to(tl.float32) - tl.load(mean + row)) * r
        n = tl.where(mask, n, 0.0)
        dw += g * n
        db += g
        g = g * w
        d = (g - tl.sum(g, 0) / columns - n * (tl.sum(g * n, 0) / columns)) * r
        if HAS_TOTAL and not AFTER:
            d += tl.load(d_total + place, mask, 0.0).to(tl.float32)
        tl.store(dx + place, d.to(dx.dtype.element_ty), mask)
        if DROPOUT:
            d = tl.where(row_keep_mask(first, second, site, row, at, threshold), d * kept, 0.0)
            tl.store(dy + place, d.to(dy.dtype.element_ty), mask)
        if HAS_BIAS:
            dyb += tl.where(mask, d, 0.0)
    parts += program.to(tl.int64) * (3 if HAS_BIAS else 2) * columns
    tl.store(parts + at, dw, mask)
    tl.store(parts + columns + at, db, mask)
    if HAS_BIAS:
        tl.store(parts + 2 * columns + at, dyb, mask)


def _num_warps(block: int) -> int:
    return min(max(block // 1024, 1), 16)


@torch.library.custom_op("trainyard::add_layer_norm", mutates_args=())
def add_layer_norm(
    x: Tensor,
    y: Tensor | None,
    y_bias: Tensor | None,
    weight: Tensor,
    bias: Tensor,
    first: Tensor | None,
    second: Tensor | None,
    site: Tensor | None,
    p: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x + dropout(y + y_bias) (nothing where y is None), its norm, and mean and one over deviation of each row."""
    x = x.contiguous()
    columns = x.shape[-1]
    rows, block = x.numel() // columns, triton.next_power_of_2(columns)
    out, mean, inverse = torch.empty_like(x), *(x.new_empty(rows, dtype=torch.float32) for _ in range(2))
    total = x.new_empty(0) if y is None else torch.empty_like(x)
    _layer_norm_forward[(rows,)](
        x, None if y is None else y.contiguous(), y_bias, weight, bias, first, second, site, round(p * 2**31),
        1 / (1 - p), total, out, mean, inverse, eps, columns, HAS_Y=y is not None, HAS_BIAS=y_bias is not None,
        DROPOUT=first is not None, BLOCK=block, num_warps=_num_warps(block),
    )  # fmt: skip
    return total, out, mean, inverse


@add_layer_norm.register_fake
def _(x: Tensor, y: Tensor | None, *_: object) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    like = torch.empty_like(x, memory_format=torch.contiguous_format)
    rows = x.numel() // x.shape[-1]
    total = x.new_empty(0) if y is None else torch.empty_like(like)
    return total, like, x.new_empty(rows, dtype=torch.float32), x.new_empty(rows, dtype=torch.float32)


@torch.library.custom_op("trainyard::layer_norm_backward", mutates_args=())
def layer_norm_backward(
    d_out: Tensor,
    d_total: Tensor | None,
    total: Tensor,
    mean: Tensor,
    inverse: Tensor,
    weight: Tensor,
    first: Tensor | None,
    second: Tensor | None,
    site: Tensor | None,
    p: float,
    biased: bool,
    after: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x, of y (empty where it is that of x), and parts of those of weight, bias and y's bias, fp32
    [programs, 3, columns]. `d_total` is that of the sum or, `after` the norm, a second one of what comes out."""
    d_out, total = d_out.contiguous(), total.contiguous()
    columns = total.shape[-1]
    rows, block = total.numel() // columns, triton.next_power_of_2(columns)
    per, programs = split_rows(rows)
    dx = torch.empty_like(total)
    dy = torch.empty_like(total) if first is not None else total.new_empty(0)
    parts = total.new_empty(programs, 3 if biased else 2, columns, dtype=torch.float32)
    _layer_norm_backward[(programs,)](
        d_out, None if d_total is None else d_total.contiguous(), total, weight, first, second, site,
        round(p * 2**31), 1 / (1 - p), mean, inverse, dx, dy, parts, rows, per, columns,
        HAS_TOTAL=d_total is not None, AFTER=after, HAS_BIAS=biased, DROPOUT=first is not None, BLOCK=block,
        num_warps=_num_warps(block),
    )  # fmt: skip
    return dx, dy, parts


@layer_norm_backward.register_fake
def _(
    d_out: Tensor,
    d_total: Tensor | None,
    total: Tensor,
    mean: Tensor,
    inverse: Tensor,
    weight: Tensor,
    first: Tensor | None,
    second: Tensor | None,
    site: Tensor | None,
    p: float,
    biased: bool,
    after: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    dx = torch.empty_like(total, memory_format=torch.contiguous_format)
    dy = torch.empty_like(dx) if first is not None else total.new_empty(0)
    _, programs = split_rows(total.numel() // total.shape[-1])
    return dx, dy, total.new_empty(programs, 3 if biased else 2, total.shape[-1], dtype=torch.float32)
