"""x W^T for few rows of x, with the cheap operations around it: RMSNorm before; bias, activation and residual after."""

# Reading W bounds the time; everything else hides behind it. One row: every program multiplies some rows of W in
# registers. Several rows: tensor cores, and programs may split K; the last program of a tile sums the parts in a fixed
# order. W may be in fp8, with a scale per row. RMSNorm needs no pass of its own: the kernel multiplies by
# x * norm_weight and scales the result by 1 / RMS. One row: it sums the squares on the way. Several rows: the matmul
# before the norm has stored both (`ScaledRows`).
#
# Shapes: M rows of x, N columns of the output, K columns of x. BLOCK_N and TILE_N count rows of W: with SwiGLU, an
# output column takes a row of each half of W, and a tile has them in turns.

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from trainyard.kernels.fp8_weight import Fp8Weight
from trainyard.kernels.reference import Activation
from trainyard.kernels.triton import rms_norm
from trainyard.kernels.triton.attention.tiles import IN_INTERPRETER, dot
from trainyard.kernels.triton.decode.dependent_launch import (
    arrival_counters,
    index_after_wait,
    is_last_program,
    launch_options,
    start,
    wait,
)
from trainyard.kernels.triton.gelu import normal_cdf, tanh_gate


class LinearConfig(NamedTuple):
    """Tile shape and launch options."""

    block_n: int
    block_k: int
    num_warps: int
    num_stages: int = 1
    split_k: int = 1

    def fit(self, K: int, dtype: torch.dtype) -> "LinearConfig":
        """The same for few columns, and for elements wider than bf16."""
        block_k = max(min(self.block_k * 2 // dtype.itemsize, triton.next_power_of_2(K)), 16)
        return self._replace(block_k=block_k)


def linear_config(M: int, rows: int, K: int, dtype: torch.dtype, fp8: bool = False) -> LinearConfig:
    """The fastest configuration for W [rows, K] by measurements on an H200: of captured steps of a 1.3B model with M 8,
    16 and 32, and of its matmuls with M 1. Tiles of 48 and 84 rows give each of its 132 multiprocessors one program;
    more rows of x leave less shared memory. W in fp8 needs more elements under way for the same number of bytes."""
    if M == 1 and fp8:
        if rows < 4096:
            return LinearConfig(2, 2048, 4) if K <= 2048 else LinearConfig(4, 2048, 2)
        return LinearConfig(8, 512, 2) if rows < 8192 else LinearConfig(8, 2048, 4)
    if M == 1:
        if rows < 4096:
            return LinearConfig(2, 2048, 1) if K <= 2048 else LinearConfig(4, 2048, 4)
        return LinearConfig(4, 1024, 1) if rows < 16384 else LinearConfig(4, 2048, 8)
    if dtype.itemsize > 2:  # without tensor cores, larger tiles take minutes to compile: for tests, not for speed
        return LinearConfig(32, 32, 4, 2)
    many = M > 32
    if rows < 4096:
        if K <= 2048 and (fp8 or not many):
            return LinearConfig(64, 512, 4, 2, 4)
        return LinearConfig(64, 256, 4, 4 if fp8 else 3, 4)
    if rows < 8192:
        return LinearConfig(48, 256, 4, (4 if many else 6) if fp8 else 3 if many else 4)
    if fp8:
        return LinearConfig(84, 256, 4, 3 if many else 4)
    return LinearConfig(84, 128, 4, 4) if rows < 16384 else LinearConfig(64, 64, 4, 4)


MAX_ROWS = 64
"""More rows of x than this are faster in F.linear."""


@triton.jit
def _weight_rows(tile, N, SWIGLU: tl.constexpr, TILE_N: tl.constexpr, BLOCK_N: tl.constexpr):  # type: ignore[no-untyped-def]
    """Rows of W in a tile of TILE_N rows, int64; rows after the last are the last."""
    i = tl.arange(0, BLOCK_N)
    if SWIGLU:
        row = tl.minimum(tile * (TILE_N // 2) + i // 2, N - 1) + i % 2 * N
    else:
        row = tl.minimum(tile * TILE_N + i, N - 1)
    return row.to(tl.int64)


@triton.jit
def _weight_to(w, dtype: tl.constexpr):  # type: ignore[no-untyped-def]
    """Elements of W in the dtype of x, in which fp8 is exact."""
    if IN_INTERPRETER and w.dtype == tl.float8e4nv:  # which has no such conversion
        bits = w.to(tl.uint8, bitcast=True).to(tl.uint32)
        magnitude = ((bits & 0x7F) << 20).to(tl.float32, bitcast=True) * 2.0**120
        return tl.where(bits > 0x7F, -magnitude, magnitude).to(dtype)
    return w.to(dtype)


@triton.jit
def _store_output(  # type: ignore[no-untyped-def]
    y, bias, residual, out, offset, column, mask, ACTIVATION: tl.constexpr, HAS_BIAS: tl.constexpr
):  # fmt: skip
    if HAS_BIAS:
        y += tl.load(bias + column, mask, 0.0).to(tl.float32)
    if ACTIVATION == "gelu":
        cdf, _ = normal_cdf(y)
        y = y * cdf
    if ACTIVATION == "gelu_tanh":
        gate, _ = tanh_gate(y)
        y = y * gate
    y = (y + residual).to(out.dtype.element_ty)
    tl.store(out + offset, y, mask)
    return y.to(tl.float32)


@triton.jit
def _one_row_kernel(  # type: ignore[no-untyped-def]
    x, norm_weight, weight, row_scale, bias, residual, out, N, eps, K: tl.constexpr, ACTIVATION: tl.constexpr,
    HAS_NORM: tl.constexpr, HAS_SCALE: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    start(PDL)
    tile = tl.program_id(0)
    swiglu: tl.constexpr = ACTIVATION == "swiglu"
    blocks: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    k = tl.arange(0, BLOCK_K)
    row = _weight_rows(tile, N, swiglu, BLOCK_N, BLOCK_N)
    rows = weight + row[:, None] * K
    next_w = tl.load(rows + k[None, :], (k < K)[None, :], 0.0)
    wait(PDL)
    block_out: tl.constexpr = BLOCK_N // 2 if swiglu else BLOCK_N
    column = tile * block_out + tl.arange(0, block_out)
    added = tl.zeros((block_out,), tl.float32)
    if HAS_RESIDUAL:
        added += tl.load(residual + column, column < N, 0.0).to(tl.float32)
    acc = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    squares = tl.zeros((BLOCK_K,), tl.float32)
    for block in tl.static_range(blocks):
        w = next_w
        v = tl.load(x + k, k < K, 0.0).to(tl.float32)
        if HAS_NORM:
            squares += v * v
            v *= tl.load(norm_weight + k, k < K, 0.0).to(tl.float32)
        k += BLOCK_K
        if block + 1 < blocks:
            next_w = tl.load(rows + k[None, :], (k < K)[None, :], 0.0)
        acc += _weight_to(w, tl.float32) * v[None, :]
    y = tl.sum(acc, 1)
    if HAS_SCALE:
        y *= tl.load(row_scale + row)
    if HAS_NORM:
        y *= 1 / tl.sqrt(tl.sum(squares, 0) / K + eps)
    if swiglu:
        gate, up = tl.split(tl.reshape(y, (BLOCK_N // 2, 2)))
        y = gate * tl.sigmoid(gate) * up
    _store_output(y, bias, added, out, column, column, column < N, ACTIVATION, HAS_BIAS)


@triton.jit
def _several_rows_kernel(  # type: ignore[no-untyped-def]
    x, squares, weight, row_scale, bias, residual, out, next_norm_weight, scaled, next_squares, partial, counters,
    M, N, eps, K: tl.constexpr, ACTIVATION: tl.constexpr, SQUARES: tl.constexpr, HAS_SCALE: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, HAS_NEXT_NORM: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, TILE_N: tl.constexpr, SPLIT_K: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    start(PDL)
    tile, part = tl.program_id(0), tl.program_id(1)
    swiglu: tl.constexpr = ACTIVATION == "swiglu"
    block_out: tl.constexpr = BLOCK_N // 2 if swiglu else BLOCK_N
    tile_out: tl.constexpr = TILE_N // 2 if swiglu else TILE_N
    part_k: tl.constexpr = (K + BLOCK_K * SPLIT_K - 1) // (BLOCK_K * SPLIT_K) * BLOCK_K
    first_k = part * part_k
    end_k = tl.minimum(first_k + part_k, K)
    m = tl.arange(0, BLOCK_M)
    k = tl.arange(0, BLOCK_K)
    in_tile = (tl.arange(0, BLOCK_N) < TILE_N)[:, None]
    row = _weight_rows(tile, N, swiglu, TILE_N, BLOCK_N)
    rows = weight + row[:, None] * K
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for start_k in range(first_k, end_k, BLOCK_K):
        in_range = (start_k + k < K)[None, :]
        w = tl.load(rows + start_k + k[None, :], in_tile & in_range, 0.0)  # the first block does not wait for x
        cell_x = m[:, None] * K + index_after_wait(start_k, PDL) + k[None, :]
        if K % 16 == 0:
            cell_x = tl.max_contiguous(tl.multiple_of(cell_x, (16, 16)), (1, 16))
        v = tl.load(x + cell_x, (m < M)[:, None] & in_range, 0.0)
        acc = dot(_weight_to(w, v.dtype), v.T, acc)
    wait(PDL)
    column = tile * tile_out + tl.arange(0, block_out)[None, :]
    mask = (m < M)[:, None] & (column < tl.minimum(tile * tile_out + tile_out, N))
    offset = m[:, None] * N + column
    # These loads are needed last, and are under way while programs that share a tile meet.
    if HAS_RESIDUAL:
        added = tl.load(residual + offset, mask, 0.0)
    if SQUARES > 0:
        square_parts = _load_squares(squares, m, M, SQUARES)
    is_last = True
    if SPLIT_K > 1:
        cell = tl.arange(0, BLOCK_N)[:, None] * BLOCK_M + m[None, :]
        partial += tile.to(tl.int64) * SPLIT_K * BLOCK_M * BLOCK_N
        tl.store(partial + part * BLOCK_M * BLOCK_N + cell, acc)
        is_last = is_last_program(counters + tile, SPLIT_K)
        if is_last:
            acc = tl.zeros_like(acc)
            for other in tl.static_range(SPLIT_K):
                acc += tl.load(partial + other * BLOCK_M * BLOCK_N + cell, cache_modifier=".cg")
    if is_last:
        if HAS_SCALE:
            acc *= tl.load(row_scale + row)[:, None]
        y = tl.trans(acc)
        if SQUARES > 0:
            y *= (1 / tl.sqrt(tl.sum(square_parts, 1) / K + eps))[:, None]
        if swiglu:
            gate, up = tl.split(tl.reshape(y, (BLOCK_M, block_out, 2)))
            y = gate * tl.sigmoid(gate) * up
        added_fp32 = added.to(tl.float32) if HAS_RESIDUAL else 0.0
        y = _store_output(y, bias, added_fp32, out, offset, column, mask, ACTIVATION, HAS_BIAS)
        if HAS_NEXT_NORM:
            scale = tl.load(next_norm_weight + column, column < N, 0.0).to(tl.float32)
            tl.store(scaled + offset, (y * scale).to(out.dtype.element_ty), mask)
            tl.store(next_squares + tile * M + m, tl.sum(tl.where(mask, y * y, 0.0), 1), m < M)


@triton.jit
def _load_squares(squares, m, M, TILES: tl.constexpr):  # type: ignore[no-untyped-def]
    """The sums of squares of the tiles of each row, from [tiles, M] to [rows, tiles]."""
    padded: tl.constexpr = triton.next_power_of_2(TILES)
    tile = tl.arange(0, padded)[None, :]
    return tl.load(squares + tile * M + m[:, None], (tile < TILES) & (m < M)[:, None], 0.0)


class ScaledRows(NamedTuple):
    """Input of an RMSNorm, in the form that a matmul can finish: x * norm_weight, and sums of the squares of x."""

    x: Tensor
    squares: Tensor
    """[parts, M]: the sum over parts, divided by the columns, is the mean square of a row."""
    eps: float


def skinny_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, residual: Tensor | None = None,
    norm_weight: Tensor | None = None, eps: float = 0.0, activation: Activation = "none",
    config: LinearConfig | None = None,
) -> Tensor:  # fmt: skip
    """activation(rms_norm(x) W^T + bias) + residual, as `reference.skinny_linear`, for at most MAX_ROWS rows of x."""
    if x.numel() > x.shape[-1]:
        if norm_weight is not None:
            x = rms_norm.add_rms_norm(x, None, norm_weight, eps)[1]
        return scaled_linear(x, weight, bias, residual, activation=activation, config=config)[0]
    K, swiglu = x.shape[-1], activation == "swiglu"
    row_scale = weight.row_scale if isinstance(weight, Fp8Weight) else None
    assert weight.is_contiguous()
    assert not (swiglu and bias is not None)
    N = weight.shape[0] // (2 if swiglu else 1)
    out = x.new_empty(*x.shape[:-1], N)
    c = (config or linear_config(1, weight.shape[0], K, x.dtype, row_scale is not None)).fit(K, x.dtype)
    _one_row_kernel[(triton.cdiv(weight.shape[0], c.block_n),)](
        x.contiguous(), norm_weight, weight, row_scale, bias, None if residual is None else residual.contiguous(), out,
        N, eps, K=K, ACTIVATION=activation, HAS_NORM=norm_weight is not None, HAS_SCALE=row_scale is not None,
        HAS_BIAS=bias is not None, HAS_RESIDUAL=residual is not None,
        BLOCK_N=c.block_n, BLOCK_K=c.block_k, num_warps=c.num_warps, **launch_options(),
    )  # fmt: skip
    return out


def scaled_linear(
    x: Tensor | ScaledRows, weight: Tensor, bias: Tensor | None = None, residual: Tensor | None = None,
    next_norm: tuple[Tensor, float] | None = None, activation: Activation = "none", config: LinearConfig | None = None,
) -> tuple[Tensor, ScaledRows | None]:  # fmt: skip
    """activation(x W^T + bias) + residual, where x may be the input of an RMSNorm. With `next_norm`, the weight and
    epsilon of an RMSNorm of the result, return that norm's input too."""
    x, squares, eps = x if isinstance(x, ScaledRows) else (x, None, 0.0)
    K, swiglu = x.shape[-1], activation == "swiglu"
    row_scale = weight.row_scale if isinstance(weight, Fp8Weight) else None
    assert weight.is_contiguous()
    assert not (swiglu and bias is not None)
    N = weight.shape[0] // (2 if swiglu else 1)
    x_MK = x.contiguous().view(-1, K)
    M = len(x_MK)
    assert M <= MAX_ROWS
    c = (config or linear_config(M, weight.shape[0], K, x.dtype, row_scale is not None)).fit(K, x.dtype)
    tiles = triton.cdiv(weight.shape[0], c.block_n)
    block_m, block_n = max(16, triton.next_power_of_2(M)), max(16, triton.next_power_of_2(c.block_n))
    out = x.new_empty(*x.shape[:-1], N)
    partial = x.new_empty(tiles * c.split_k * block_m * block_n if c.split_k > 1 else 0, dtype=torch.float32)
    next_input = None
    if next_norm:
        next_squares = x.new_empty(tiles, M, dtype=torch.float32)
        next_input = ScaledRows(torch.empty_like(out), next_squares, next_norm[1])
    _several_rows_kernel[(tiles, c.split_k)](
        x_MK, squares, weight, row_scale, bias, None if residual is None else residual.contiguous(), out,
        next_norm and next_norm[0], next_input and next_input.x, next_input and next_input.squares,
        partial, arrival_counters(x.device), M, N, eps, K=K, ACTIVATION=activation,
        SQUARES=0 if squares is None else len(squares), HAS_SCALE=row_scale is not None,
        HAS_BIAS=bias is not None, HAS_RESIDUAL=residual is not None, HAS_NEXT_NORM=next_norm is not None,
        BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=c.block_k, TILE_N=c.block_n,
        SPLIT_K=c.split_k,
        num_warps=c.num_warps, num_stages=c.num_stages, **launch_options(),
    )  # fmt: skip
    return out, next_input
