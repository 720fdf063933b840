"""Triton kernels that quantize a bf16 matrix to fp8: one pass computes the amax, another casts.

Hopper contracts fp8 only along the rows of both operands, and forward and backward contract a linear layer's matrix
along different dims. So the cast reads a tile once and writes it both as is and transposed.

Magnitudes are int32: the bits of non-negative floats sort as the floats do, with inf and then nan on top, so their
maximum is exact, independent of order, and preserves nan. Shapes: M rows, D columns, P amax blocks.
"""

import torch
from torch import Tensor

from trainyard.kernels.triton.language import tl, triton

AMAX_BLOCK = 8192
"""Elements that a program of the tensor-wise amax reads at a time."""
ROW_AMAX_TILE = 64, 128
"""Rows of a program of the row-wise amax, and columns that it reads at a time."""
CAST_TILE, CAST_NUM_WARPS = (128, 128), 16
"""Rows and columns of a tile of the cast: 32 elements per thread, loads and stores of 16 bytes."""
MAX_CAST_PROGRAMS = 1 << 30
"""With more tiles than this, each program of the cast handles several tiles and computes the scale once for all."""


def amax(x: Tensor, amax_P: Tensor) -> None:
    """Write the amax bits of each of P blocks of a contiguous bf16 tensor. All P programs run at once."""
    _amax_kernel[(len(amax_P),)](x.view(torch.int16), amax_P, x.numel(), BLOCK=AMAX_BLOCK, num_warps=8)


def amax_rows(x_MD: Tensor, amax_M: Tensor, amax_D: Tensor) -> None:
    """Write the amax bits of each row and, unless `amax_D` is empty, of each column."""
    M, D = x_MD.shape
    rows, columns = ROW_AMAX_TILE
    row_blocks = triton.cdiv(M, rows)
    block_amax_PD = amax_M.new_empty(row_blocks, len(amax_D))
    x = x_MD.view(torch.int16)
    _amax_rows_kernel[(row_blocks,)](
        x, amax_M, block_amax_PD, M, D, COLUMNS=len(amax_D) > 0, ROWS=rows, BLOCK=columns, num_warps=4
    )
    if len(amax_D):
        _amax_columns_kernel[(triton.cdiv(D, 32),)](
            block_amax_PD, amax_D, row_blocks, D, ROWS=64, BLOCK=32, num_warps=4
        )


def cast_to_fp8(
    x_MD: Tensor, amax_bits: Tensor, amax_D: Tensor,
    out_MD: Tensor, out_DM: Tensor, inverse_scale: Tensor, inverse_scale_D: Tensor,
    padded_M: int, max_exponent: int, per_row: bool,
) -> None:  # fmt: skip
    """Fill `out_MD` and `out_DM`, unless empty, and the inverse scales.

    The outputs have `padded_M` rows M; those after the last of x become zeros. `amax_bits` comes from `amax` or, per
    row, from `amax_rows`; `max_exponent` is the exponent of the format's largest number.
    """
    M, D = x_MD.shape
    rows, columns = CAST_TILE
    tiles_down, tiles_across = triton.cdiv(padded_M, rows), triton.cdiv(D, columns)
    tiles_per_program = max(1, min(16, tiles_down * tiles_across // MAX_CAST_PROGRAMS))
    _cast_kernel[(triton.cdiv(tiles_down, tiles_per_program) * tiles_across,)](
        x_MD, amax_bits, amax_D, out_MD, out_DM, inverse_scale, inverse_scale_D, M, padded_M, D, len(amax_bits),
        tiles_per_program, MAX_EXPONENT=max_exponent, PER_ROW=per_row, DIRECT=out_MD.numel() > 0,
        TRANSPOSED=out_DM.numel() > 0, ROWS=rows, COLUMNS=columns, CHUNK=512, num_warps=CAST_NUM_WARPS,
    )  # fmt: skip


def transpose(x_MD: Tensor) -> Tensor:
    """A contiguous fp8 matrix, transposed."""
    M, D = x_MD.shape
    rows, columns = CAST_TILE
    out_DM = x_MD.new_empty(D, M)
    _transpose_kernel[(triton.cdiv(M, rows) * triton.cdiv(D, columns),)](
        x_MD.view(torch.uint8), out_DM.view(torch.uint8), M, D, ROWS=rows, COLUMNS=columns, num_warps=CAST_NUM_WARPS
    )
    return out_DM


@triton.jit
def _amax_kernel(x, blocks, elements, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    running_max = tl.zeros([BLOCK], tl.int32)
    first_index, stride = tl.program_id(0).to(tl.int64) * BLOCK, tl.num_programs(0).to(tl.int64) * BLOCK
    for start in range(first_index, elements, stride):
        index = start + tl.arange(0, BLOCK)
        running_max = tl.maximum(running_max, tl.load(x + index, index < elements, 0).to(tl.int32) & 0x7FFF)
    tl.store(blocks + tl.program_id(0), tl.max(running_max, 0) << 16)


@triton.jit
def _amax_rows_kernel(  # type: ignore[no-untyped-def]
    x, rows, blocks, M, D, COLUMNS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    block = tl.program_id(0).to(tl.int64)
    m = tl.arange(0, ROWS)
    row_mask = block * ROWS + m < M
    running_max = tl.zeros([ROWS], tl.int32)
    for start in range(0, D, BLOCK):
        d = start + tl.arange(0, BLOCK)
        mask = row_mask[:, None] & (d < D)[None, :]
        bits = tl.load(x + block * ROWS * D + (m[:, None] * D + d[None, :]), mask, 0).to(tl.int32) & 0x7FFF
        running_max = tl.maximum(running_max, tl.max(bits, 1))
        if COLUMNS:
            tl.store(blocks + block * D + d, tl.max(bits, 0) << 16, d < D)
    tl.store(rows + block * ROWS + m, running_max << 16, row_mask)


@triton.jit
def _amax_columns_kernel(blocks, columns, row_blocks, D, ROWS: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    d = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    running_max = tl.zeros([ROWS, BLOCK], tl.int32)
    for start in range(0, row_blocks, ROWS):
        m = start + tl.arange(0, ROWS)
        mask = (m < row_blocks)[:, None] & (d < D)[None, :]
        running_max = tl.maximum(running_max, tl.load(blocks + m[:, None].to(tl.int64) * D + d[None, :], mask, 0))
    tl.store(columns + d, tl.max(running_max, 0), d < D)


@triton.jit
def _power_of_two_scale(bits, MAX_EXPONENT: tl.constexpr):  # type: ignore[no-untyped-def]
    """The same as `power_of_two_scales` in fp8_linear.py."""
    exponent = MAX_EXPONENT + 254 - (bits >> 23) - ((bits & 0x7FFFFF) > 0x600000).to(tl.int32)
    exponent = tl.where(bits == 0, 127, tl.minimum(exponent, 253))
    scale = tl.where(bits >= 0x7F800000, 0x7FC00000, exponent << 23)
    inverse_scale = tl.where(bits >= 0x7F800000, 0x7FC00000, (254 - exponent) << 23)
    return scale.to(tl.float32, bitcast=True), inverse_scale.to(tl.float32, bitcast=True)


@triton.jit
def _cast_kernel(  # type: ignore[no-untyped-def]
    x, rows, columns, out, out_transposed, inverse_scale, inverse_scale_columns, M, padded_M, D, blocks,
    tiles_per_program, MAX_EXPONENT: tl.constexpr, PER_ROW: tl.constexpr, DIRECT: tl.constexpr,
    TRANSPOSED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    # Start at the end: what the amax pass read last is still in the cache.
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    tiles_across = tl.cdiv(D, COLUMNS)
    first_m, first_d = block // tiles_across * (ROWS * tiles_per_program), block % tiles_across * COLUMNS
    local_m, local_d = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    d = first_d + local_d
    x += first_m.to(tl.int64) * D + first_d
    out += first_m.to(tl.int64) * D + first_d
    out_transposed += first_d.to(tl.int64) * padded_M + first_m
    if not PER_ROW:
        running_max = tl.zeros([CHUNK], tl.int32)
        for start in range(0, blocks, CHUNK):
            index = start + tl.arange(0, CHUNK)
            running_max = tl.maximum(running_max, tl.load(rows + index, index < blocks, 0))
        scale, inverse = _power_of_two_scale(tl.max(running_max, 0), MAX_EXPONENT)
        if block == 0:
            tl.store(inverse_scale, inverse)
    elif TRANSPOSED:
        scale_d, inverse = _power_of_two_scale(tl.load(columns + d, d < D, 0), MAX_EXPONENT)
        if first_m == 0:
            tl.store(inverse_scale_columns + d, inverse, d < D)
    for _ in range(tiles_per_program):
        m = first_m + local_m
        tile = tl.load(x + local_m[:, None] * D + local_d[None, :], (m < M)[:, None] & (d < D)[None, :], 0.0)
        if DIRECT:
            if PER_ROW:
                scale_m, inverse_m = _power_of_two_scale(tl.load(rows + m, m < M, 0), MAX_EXPONENT)
                if first_d == 0:
                    tl.store(inverse_scale + m, inverse_m, m < padded_M)
                values = tile.to(tl.float32) * scale_m[:, None]
            else:
                values = tile.to(tl.float32) * scale
            mask = (m < padded_M)[:, None] & (d < D)[None, :]
            tl.store(out + local_m[:, None] * D + local_d[None, :], values.to(out.dtype.element_ty), mask)
        if TRANSPOSED:
            # Transpose in bf16: there are instructions to exchange 16 bits between threads, but not 8.
            values = tl.trans(tile).to(tl.float32)
            values = values * scale_d[:, None] if PER_ROW else values * scale
            mask = (d < D)[:, None] & (m < padded_M)[None, :]
            tl.store(
                out_transposed + local_d[:, None] * padded_M + local_m[None, :],
                values.to(out_transposed.dtype.element_ty),
                mask,
            )
        first_m += ROWS
        x += ROWS * D
        out += ROWS * D
        out_transposed += ROWS


@triton.jit
def _transpose_kernel(x, out, M, D, ROWS: tl.constexpr, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]
    tiles_across = tl.cdiv(D, COLUMNS)
    m = tl.program_id(0) // tiles_across * ROWS + tl.arange(0, ROWS)
    d = tl.program_id(0) % tiles_across * COLUMNS + tl.arange(0, COLUMNS)
    tile = tl.load(x + m[:, None].to(tl.int64) * D + d[None, :], (m < M)[:, None] & (d < D)[None, :], 0)
    # Transpose in 16 bits, as in `_cast_kernel`.
    tile = tl.trans(tile.to(tl.int16)).to(tl.uint8)
    tl.store(out + d[:, None].to(tl.int64) * M + m[None, :], tile, (d < D)[:, None] & (m < M)[None, :])
