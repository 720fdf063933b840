"""Which random numbers round which weight: a function of its part's name, its global row and its global column."""

from typing import NamedTuple

import torch
from torch import Tensor

from trainyard.core.counter_rng import key32, row_seeds
from trainyard.models.blueprint import Blueprint
from trainyard.parallel.flat_buffer import FlatBuffer
from trainyard.parallel.process_group import Group


class RoundingRange(NamedTuple):
    """A stretch of a parameter with global row and column numbers: what stochastic rounding draws by."""

    weight: Tensor
    """[rows, columns] view."""
    site: Tensor
    row_ids: Tensor
    column_ids: Tensor

    def row_bits(self, key: Tensor) -> tuple[Tensor, Tensor]:
        """The random words of each row; `key` is the step's."""
        first, second = row_seeds(key, self.row_ids, torch.zeros_like(self.row_ids))
        return first[:, None], second[:, None]


def rounding_ranges(
    weights: Tensor, name: str, blueprint: Blueprint, tp: Group, flat: FlatBuffer, shard: int
) -> list[RoundingRange]:
    """This rank's rows of a parameter in the flat shard `weights`, cut where parts begin."""
    span, mine = flat.spans[name], flat.shard_row_range(name, shard)
    matrix = len(span.shape) > 1  # a vector is one row of the table
    out, start = [], 0
    slices = blueprint.tp_slices(name, tp.size, tp.rank)
    for held in slices:
        # The last one's include rows of padding, zeros that stay zeros: all ranks then have the same shapes.
        rows = held.sizes[0] if held is not slices[-1] else span.shape[0] - start
        first, end = max(start, mine.start), min(start + rows, mine.stop)
        skipped = first - start
        start += rows
        if first >= end:
            continue
        at = span.shard_start + (first - mine.start) * span.row_size
        shape = (end - first, span.row_size) if matrix else (1, end - first)
        view = weights[at : at + (end - first) * span.row_size].view(shape)
        row, column = (torch.arange(n, dtype=torch.int32, device=weights.device) for n in shape)
        if matrix:
            row = row + (skipped + held.offsets[0])
            column = column + held.offsets[1]
        else:
            column = column + (held.offsets[0] + skipped)
        site = torch.tensor(key32("rounding", held.name)[0], dtype=torch.int32, device=weights.device)
        out.append(RoundingRange(view, site, row, column))
    return out
