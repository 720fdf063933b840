"""Triton kernels that bring a bf16 matrix to fp8: a pass that finds the largest magnitudes, and one that casts.

Hopper multiplies fp8 only along the rows of both operands, and a matrix of a linear is summed over both ways in turn.
So a cast reads a tile once and writes it as it lies and transposed.

Magnitudes are int32: the bits of non-negative floats are ordered as the floats are, with inf and then nan on top, so
that their maximum is exact, the same in any order, and keeps a nan. Shapes: M rows, D columns, P parts.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

AMAX_BLOCK = 8192
"""Elements that a program of the tensor-wise maximum reads at a time."""
ROW_AMAX_TILE = 64, 128
"""Rows that a program of the row-wise maximum owns, and columns that it reads at a time."""
CAST_TILE, CAST_NUM_WARPS = (128, 128), 16
"""Rows and columns that a program of the cast has at a time: 32 elements a thread, loads and stores of 16 bytes."""
MAX_CAST_PROGRAMS = 1 << 30
"""Of the cast: with more tiles than that each does several, so that they share what comes before the first."""


def amax(x: Tensor, most_P: Tensor) -> None:
    """Bits of the largest magnitude of each of P parts of a contiguous bf16 tensor. All P programs run at once."""
    _amax_kernel[(len(most_P),)](x.view(torch.int16), most_P, x.numel(), BLOCK=AMAX_BLOCK, num_warps=8)


def amax_rows(x_MD: Tensor, most_M: Tensor, most_D: Tensor) -> None:
    """Bits of the largest magnitude of each row and, unless `most_D` has no elements, of each column."""
    M, D = x_MD.shape
    rows, columns = ROW_AMAX_TILE
    strips = triton.cdiv(M, rows)
    parts_PD = most_M.new_empty(strips, len(most_D))
    x = x_MD.view(torch.int16)
    _amax_rows_kernel[(strips,)](
        x, most_M, parts_PD, M, D, COLUMNS=len(most_D) > 0, ROWS=rows, BLOCK=columns, num_warps=4
    )
    if len(most_D):
        _amax_columns_kernel[(triton.cdiv(D, 32),)](parts_PD, most_D, strips, D, ROWS=64, BLOCK=32, num_warps=4)


def cast_to_fp8(
    x_MD: Tensor,
    most: Tensor,
    most_D: Tensor,
    out_MD: Tensor,
    out_DM: Tensor,
    inverse: Tensor,
    inverse_D: Tensor,
    top: int,
    by_row: bool,
) -> None:
    """Fill `out_MD` and `out_DM`, where they have elements, and the inverse scales. M of the outputs may be more than x
    has; the rest is zeros. `most` is what `amax` gives, or by row what `amax_rows` gives; `top` is the exponent of the
    format's largest number."""
    M, D = x_MD.shape
    padded = len(out_MD) if out_MD.numel() else out_DM.shape[1]
    rows, columns = CAST_TILE
    down, across = triton.cdiv(padded, rows), triton.cdiv(D, columns)
    steps = max(1, min(16, down * across // MAX_CAST_PROGRAMS))
    _cast_kernel[(triton.cdiv(down, steps) * across,)](
        x_MD,
        most,
        most_D,
        out_MD,
        out_DM,
        inverse,
        inverse_D,
        M,
        padded,
        D,
        len(most),
        steps,
        TOP=top,
        BY_ROW=by_row,
        AS_IS=out_MD.numel() > 0,
        TURNED=out_DM.numel() > 0,
        ROWS=rows,
        COLUMNS=columns,
        CHUNK=512,
        num_warps=CAST_NUM_WARPS,
    )


@triton.jit
def _amax_kernel(x, parts, count, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    most = tl.zeros([BLOCK], tl.int32)
    first, step = tl.program_id(0).to(tl.int64) * BLOCK, tl.num_programs(0).to(tl.int64) * BLOCK
    for start in range(first, count, step):
        at = start + tl.arange(0, BLOCK)
        most = tl.maximum(most, tl.load(x + at, at < count, 0).to(tl.int32) & 0x7FFF)
    tl.store(parts + tl.program_id(0), tl.max(most, 0) << 16)


@triton.jit
def _amax_rows_kernel(  # type: ignore[no-untyped-def]
    x, rows, parts, M, D, COLUMNS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    strip = tl.program_id(0).to(tl.int64)
    m = tl.arange(0, ROWS)
    inside = strip * ROWS + m < M
    most = tl.zeros([ROWS], tl.int32)
    for start in range(0, D, BLOCK):
        d = start + tl.arange(0, BLOCK)
        mask = inside[:, None] & (d < D)[None, :]
        bits = tl.load(x + strip * ROWS * D + (m[:, None] * D + d[None, :]), mask, 0).to(tl.int32) & 0x7FFF
        most = tl.maximum(most, tl.max(bits, 1))
        if COLUMNS:
            tl.store(parts + strip * D + d, tl.max(bits, 0) << 16, d < D)
    tl.store(rows + strip * ROWS + m, most << 16, inside)


@triton.jit
def _amax_columns_kernel(parts, columns, strips, D, ROWS: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    d = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    most = tl.zeros([ROWS, BLOCK], tl.int32)
    for start in range(0, strips, ROWS):
        m = start + tl.arange(0, ROWS)
        mask = (m < strips)[:, None] & (d < D)[None, :]
        most = tl.maximum(most, tl.load(parts + m[:, None].to(tl.int64) * D + d[None, :], mask, 0))
    tl.store(columns + d, tl.max(most, 0), d < D)


@triton.jit
def _power_of_two_scale(bits, TOP: tl.constexpr):  # type: ignore[no-untyped-def]
    """As `scales` in fp8.py."""
    exponent = TOP + 254 - (bits >> 23) - ((bits & 0x7FFFFF) > 0x600000).to(tl.int32)
    exponent = tl.where(bits == 0, 127, tl.minimum(exponent, 253))
    scale = tl.where(bits >= 0x7F800000, 0x7FC00000, exponent << 23)
    inverse = tl.where(bits >= 0x7F800000, 0x7FC00000, (254 - exponent) << 23)
    return scale.to(tl.float32, bitcast=True), inverse.to(tl.float32, bitcast=True)


@triton.jit
def _cast_kernel(  # type: ignore[no-untyped-def]
    x,
    rows,
    columns,
    out,
    turned,
    inverse,
    inverse_columns,
    M,
    padded,
    D,
    parts,
    steps,
    TOP: tl.constexpr,
    BY_ROW: tl.constexpr,
    AS_IS: tl.constexpr,
    TURNED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    # From the end: what the maximum has read last is still in the cache.
    strip = tl.num_programs(0) - 1 - tl.program_id(0)
    across = tl.cdiv(D, COLUMNS)
    first_m, first_d = strip // across * (ROWS * steps), strip % across * COLUMNS
    local_m, local_d = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    d = first_d + local_d
    x += first_m.to(tl.int64) * D + first_d
    out += first_m.to(tl.int64) * D + first_d
    turned += first_d.to(tl.int64) * padded + first_m
    if not BY_ROW:
        most = tl.zeros([CHUNK], tl.int32)
        for start in range(0, parts, CHUNK):
            at = start + tl.arange(0, CHUNK)
            most = tl.maximum(most, tl.load(rows + at, at < parts, 0))
        scale, back = _power_of_two_scale(tl.max(most, 0), TOP)
        if strip == 0:
            tl.store(inverse, back)
    elif TURNED:
        scale_d, back = _power_of_two_scale(tl.load(columns + d, d < D, 0), TOP)
        if first_m == 0:
            tl.store(inverse_columns + d, back, d < D)
    for _ in range(steps):
        m = first_m + local_m
        tile = tl.load(x + local_m[:, None] * D + local_d[None, :], (m < M)[:, None] & (d < D)[None, :], 0.0)
        if AS_IS:
            if BY_ROW:
                scale_m, back_m = _power_of_two_scale(tl.load(rows + m, m < M, 0), TOP)
                if first_d == 0:
                    tl.store(inverse + m, back_m, m < padded)
                values = tile.to(tl.float32) * scale_m[:, None]
            else:
                values = tile.to(tl.float32) * scale
            mask = (m < padded)[:, None] & (d < D)[None, :]
            tl.store(out + local_m[:, None] * D + local_d[None, :], values.to(out.dtype.element_ty), mask)
        if TURNED:
            # Transposed while it is bf16: for 16 bits, not for 8, there are instructions to do it between threads.
            values = tl.trans(tile).to(tl.float32)
            values = values * scale_d[:, None] if BY_ROW else values * scale
            mask = (d < D)[:, None] & (m < padded)[None, :]
            tl.store(turned + local_d[:, None] * padded + local_m[None, :], values.to(turned.dtype.element_ty), mask)
        first_m += ROWS
        x += ROWS * D
        out += ROWS * D
        turned += ROWS
