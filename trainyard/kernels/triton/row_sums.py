"""Sums of rows without atomic operations, so that results do not depend on scheduling: of each token's experts, and of
an embedding's gradient."""

import torch
from torch import Tensor

from trainyard.compat import has_memory
from trainyard.kernels.custom_op import kernel_op
from trainyard.kernels.triton.language import tl, triton

BLOCK_COLUMNS = 2048
TILE_ROWS, TILE_COLUMNS = 32, 128


@triton.jit
def _sum_rows(x, index, weight, out, columns, K: tl.constexpr, HAS_WEIGHT: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    n = tl.program_id(0).to(tl.int64)
    for start in range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        mask = column < columns
        acc = tl.zeros((BLOCK,), tl.float32)
        for k in tl.static_range(K):
            row = tl.load(index + n * K + k).to(tl.int64)
            value = tl.load(x + row * columns + column, mask, 0.0).to(tl.float32)
            acc += value * tl.load(weight + n * K + k) if HAS_WEIGHT else value
        tl.store(out + n * columns + column, acc.to(out.dtype.element_ty), mask)


@triton.jit
def _sum_rows_backward(dy, x, index, weight, dx, d_weight, columns, K: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    n = tl.program_id(0).to(tl.int64)
    for k in tl.static_range(K):
        row = tl.load(index + n * K + k).to(tl.int64)
        w = tl.load(weight + n * K + k)
        dot = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, columns, BLOCK):
            column = start + tl.arange(0, BLOCK)
            mask = column < columns
            g = tl.load(dy + n * columns + column, mask, 0.0).to(tl.float32)
            dot += g * tl.load(x + row * columns + column, mask, 0.0).to(tl.float32)
            tl.store(dx + row * columns + column, (g * w).to(dx.dtype.element_ty), mask)
        tl.store(d_weight + n * K + k, tl.sum(dot, 0))


def _block(columns: int) -> dict[str, int]:
    block = min(triton.next_power_of_2(columns), BLOCK_COLUMNS)
    return {"BLOCK": block, "num_warps": max(block // 512, 1)}


@kernel_op
def sum_rows(x: Tensor, index: Tensor, weight: Tensor | None) -> Tensor:
    """Row n of the result is the sum over k of weight[n, k] (fp32) times x[index[n, k]]."""
    out = x.new_empty(index.shape[0], x.shape[1])
    if has_memory(out):
        x, index = x.contiguous(), index.contiguous()
        _sum_rows[(len(out),)](
            x, index, index if weight is None else weight.contiguous(), out, x.shape[1],
            K=index.shape[1], HAS_WEIGHT=weight is not None, **_block(x.shape[1]),
        )  # fmt: skip
    return out


@kernel_op
def sum_rows_backward(dy: Tensor, x: Tensor, index: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of x and of the weights. Every row of x belongs to exactly one entry of the index."""
    dx, d_weight = x.new_empty(x.shape), weight.new_empty(weight.shape, dtype=torch.float32)
    if has_memory(dx):
        _sum_rows_backward[(index.shape[0],)](
            dy.contiguous(), x.contiguous(), index.contiguous(), weight.contiguous(), dx, d_weight, x.shape[1],
            K=index.shape[1], **_block(x.shape[1]),
        )  # fmt: skip
    return dx, d_weight


@triton.jit
def _add_rows_by_index(  # type: ignore[no-untyped-def]
    rows, index, order, ends, total, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """The program at the first of equal indices adds all their rows; the others have none."""
    first = tl.program_id(0).to(tl.int64)
    target = tl.load(index + first)
    is_same = tl.load(index + tl.maximum(first - 1, 0)) == target
    end = tl.where(is_same & (first > 0), first, tl.load(ends + first))
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    mask = column < tl.where(first < end, columns, 0)
    acc = tl.zeros((COLUMNS,), tl.float32)
    for start in range(first, end, ROWS):
        place = start + tl.arange(0, ROWS)
        row = tl.load(order + place, place < end, 0)
        tile_mask = (place < end)[:, None] & mask[None, :]
        acc += tl.sum(tl.load(rows + row[:, None] * columns + column[None, :], tile_mask, 0.0).to(tl.float32), 0)
    at = total + target * columns + column
    tl.store(at, (tl.load(at, mask, 0.0).to(tl.float32) + acc).to(total.dtype.element_ty), mask)


def add_rows_by_index_(total: Tensor, index: Tensor, rows: Tensor) -> None:
    """total[index[n]] += rows[n] for all n, in the order of n."""
    if not has_memory(total) or not len(index):
        return
    index, order = index.long().sort(stable=True)
    ends = torch.searchsorted(index, index, right=True)
    columns = total.shape[1]
    _add_rows_by_index[(len(index), triton.cdiv(columns, TILE_COLUMNS))](
        rows.contiguous(), index, order, ends, total, columns, ROWS=TILE_ROWS, COLUMNS=TILE_COLUMNS, num_warps=4
    )
