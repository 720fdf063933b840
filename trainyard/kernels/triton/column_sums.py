"""Gradients of vectors that all rows share: programs leave sums over their rows, and these are added up here, in the
same order every time."""

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

MAX_PROGRAMS = 2112
"""That share the rows of a backward pass: 16 for each multiprocessor of an H200."""
BLOCK_ROWS, BLOCK_COLUMNS, NUM_WARPS = 256, 32, 16


def split_rows(rows: int, programs: int = MAX_PROGRAMS) -> tuple[int, int]:
    """Rows of each program, and how many programs that makes."""
    per = -(-rows // programs) if rows else 1
    return per, -(-rows // per)


@triton.jit
def _add_column_sum(parts, total, columns, programs, step, at, COLUMNS: tl.constexpr, ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    mask = at < columns
    acc = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, programs, ROWS):
        row = start + tl.arange(0, ROWS)
        place = row[:, None].to(tl.int64) * step + at[None, :]
        acc += tl.load(parts + place, (row < programs)[:, None] & mask[None, :], 0.0)
    old = tl.load(total + at, mask, 0.0).to(tl.float32)
    tl.store(total + at, (old + tl.sum(acc, 0)).to(total.dtype.element_ty), mask)


@triton.jit
def _add_column_sums(parts, first, second, third, columns, programs, step, COLUMNS: tl.constexpr, ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    which = tl.program_id(1)
    parts += which * columns
    if which == 0:
        _add_column_sum(parts, first, columns, programs, step, at, COLUMNS, ROWS)
    elif which == 1:
        _add_column_sum(parts, second, columns, programs, step, at, COLUMNS, ROWS)
    else:
        _add_column_sum(parts, third, columns, programs, step, at, COLUMNS, ROWS)


def add_column_sums_(partial_sums: Tensor, totals: Sequence[Tensor]) -> None:
    """Add fp32 parts [programs, k, columns] to k totals (three at most) in one kernel."""
    programs, kinds, columns = partial_sums.shape
    three = [*totals, *[totals[0]] * (3 - len(totals))]
    _add_column_sums[(triton.cdiv(columns, BLOCK_COLUMNS), kinds)](
        partial_sums,
        *three,
        columns,
        programs,
        kinds * columns,
        COLUMNS=BLOCK_COLUMNS,
        ROWS=BLOCK_ROWS,
        num_warps=NUM_WARPS,
    )
