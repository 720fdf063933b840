"""Matrix multiplication whose result for a row does not depend on how many other rows there are.

Every element sums its products along K in order, in one program, with the matrix instructions of one kind: those of 64
rows. Tiles of other sizes made of these give the same bits, so a step of few rows may use small ones.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from trainyard.kernels.triton.attention.tiles import dot
from trainyard.kernels.triton.language import tl, triton


class LinearTile(NamedTuple):
    """Rows, columns and depth of a tile, and launch options."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


FEW_ROWS = 64
FEW_ROWS_TILE = LinearTile(64, 16, 128, 4, 5)
MANY_ROWS_TILE = LinearTile(128, 128, 64, 8, 4)
FP32_TILE = LinearTile(32, 64, 32, 4, 3)
"""Without matrix instructions: one tile for all."""
GROUP = 8
"""Row tiles that share the columns in the cache."""


@triton.jit(do_not_specialize=["M"])
def _linear_kernel(  # type: ignore[no-untyped-def]
    x, weight, bias, y, M, N, K, weight_stride, HAS_BIAS: tl.constexpr, GROUP_M: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    columns = tl.cdiv(N, BLOCK_N)
    group = tl.program_id(0) // (GROUP_M * columns)
    group_rows = tl.minimum(tl.cdiv(M, BLOCK_M) - group * GROUP_M, GROUP_M)
    inside = tl.program_id(0) % (GROUP_M * columns)
    m = ((group * GROUP_M + inside % group_rows) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    n = (inside // group_rows * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    k = tl.arange(0, BLOCK_K)
    in_m, in_n = (m < M)[:, None], (n < N)[None, :]
    rows = x + m[:, None] * K + k[None, :]
    columns_at = weight + n[None, :] * weight_stride + k[:, None]
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, K, BLOCK_K):
        a = tl.load(rows + start, in_m & (start + k < K)[None, :], 0.0)
        b = tl.load(columns_at + start, in_n & (start + k < K)[:, None], 0.0)
        acc = dot(a, b, acc)
    if HAS_BIAS:
        acc += tl.load(bias + n, n < N, 0.0).to(tl.float32)[None, :]
    tl.store(y + m[:, None] * N + n[None, :], acc.to(y.dtype.element_ty), in_m & in_n)


def linear(x_MK: Tensor, weight: Tensor, bias: Tensor | None, tile: LinearTile | None = None) -> Tensor:
    """x W^T + bias, summed in fp32."""
    x_MK, (N, K) = x_MK.contiguous(), weight.shape
    assert weight.stride(1) == 1
    M = len(x_MK)
    if tile is None:
        is_fp32, few = x_MK.dtype == torch.float32, M <= FEW_ROWS
        tile = FP32_TILE if is_fp32 else FEW_ROWS_TILE if few else MANY_ROWS_TILE
    y = x_MK.new_empty(M, N)
    _linear_kernel[(triton.cdiv(M, tile.block_m) * triton.cdiv(N, tile.block_n),)](
        x_MK, weight, x_MK if bias is None else bias, y, M, N, K, weight.stride(0), HAS_BIAS=bias is not None,
        GROUP_M=GROUP, BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, BLOCK_K=tile.block_k,
        num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip
    return y
