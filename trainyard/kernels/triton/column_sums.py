"""Gradients of vectors that all rows share, such as biases and norm weights.

Each program of a backward kernel leaves the sum over its rows. A second kernel adds these partial sums in a fixed
order, so that results do not depend on scheduling.
"""

from collections.abc import Sequence

from torch import Tensor

from trainyard.compat import has_memory
from trainyard.core.constants import MAX_REDUCTION_PROGRAMS
from trainyard.kernels.triton.language import tl, triton

BLOCK_ROWS, BLOCK_COLUMNS, NUM_WARPS = 256, 32, 16


def split_rows(rows: int, programs: int = MAX_REDUCTION_PROGRAMS) -> tuple[int, int]:
    """Return the rows of each program and the number of programs."""
    rows_per_program = -(-rows // programs) if rows else 1
    return rows_per_program, -(-rows // rows_per_program)


@triton.jit
def _add_column_sum(partial_sums, total, columns, programs, stride, column, COLUMNS: tl.constexpr, ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    mask = column < columns
    acc = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, programs, ROWS):
        row = start + tl.arange(0, ROWS)
        offset = row[:, None].to(tl.int64) * stride + column[None, :]
        acc += tl.load(partial_sums + offset, (row < programs)[:, None] & mask[None, :], 0.0)
    old = tl.load(total + column, mask, 0.0).to(tl.float32)
    tl.store(total + column, (old + tl.sum(acc, 0)).to(total.dtype.element_ty), mask)


@triton.jit
def _add_column_sums(  # type: ignore[no-untyped-def]
    partial_sums, total0, total1, total2, columns, programs, stride, COLUMNS: tl.constexpr, ROWS: tl.constexpr
):
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    vector = tl.program_id(1)
    partial_sums += vector * columns
    if vector == 0:
        _add_column_sum(partial_sums, total0, columns, programs, stride, column, COLUMNS, ROWS)
    elif vector == 1:
        _add_column_sum(partial_sums, total1, columns, programs, stride, column, COLUMNS, ROWS)
    else:
        _add_column_sum(partial_sums, total2, columns, programs, stride, column, COLUMNS, ROWS)


def add_column_sums_(partial_sums: Tensor, totals: Sequence[Tensor]) -> None:
    """Add fp32 partial sums [programs, k, columns] to k <= 3 totals in one kernel."""
    if not has_memory(partial_sums):
        return
    programs, vectors, columns = partial_sums.shape
    targets = [*totals, *[totals[0]] * (3 - len(totals))]
    _add_column_sums[(triton.cdiv(columns, BLOCK_COLUMNS), vectors)](
        partial_sums, *targets, columns, programs, vectors * columns,
        COLUMNS=BLOCK_COLUMNS, ROWS=BLOCK_ROWS, num_warps=NUM_WARPS,
    )  # fmt: skip
