"""Which random numbers round which weight: a function of its part's name, its global row and its global column."""

from typing import NamedTuple

import torch
from torch import Tensor

from trainyard.core.counter_rng import key32, row32
from trainyard.models.blueprint import Blueprint
from trainyard.parallel.flat_buffer import Flat
from trainyard.parallel.process_group import Group


class Piece(NamedTuple):
    """A stretch of a parameter with global row and column numbers: what stochastic rounding draws by."""

    weight: Tensor
    """[rows, columns] view."""
    site: Tensor
    row: Tensor
    column: Tensor

    def rows(self, key: Tensor) -> tuple[Tensor, Tensor]:
        """The random words of each row; `key` is the step's."""
        first, second = row32(key, self.row, torch.zeros_like(self.row))
        return first[:, None], second[:, None]


def pieces(weights: Tensor, name: str, blueprint: Blueprint, tp: Group, flat: Flat, shard: int) -> list[Piece]:
    """This rank's rows of a parameter in the flat shard `weights`, cut where parts begin."""
    span, mine = flat.spans[name], flat.rows(name, shard)
    matrix = len(span.shape) > 1  # a vector is one row of the table
    out, start = [], 0
    slices = blueprint.slices(name, tp.size, tp.rank)
    for held in slices:
        # The last one's include rows of padding, zeros that stay zeros: all ranks then have the same shapes.
        rows = held.stop - held.start if held.dim == 0 and held is not slices[-1] else span.shape[0] - start
        first, end = max(start, mine.start), min(start + rows, mine.stop)
        skipped = first - start
        start += rows
        if first >= end:
            continue
        at = span.at + (first - mine.start) * span.width
        shape = (end - first, span.width) if matrix else (1, end - first)
        view = weights[at : at + (end - first) * span.width].view(shape)
        row, column = (torch.arange(n, dtype=torch.int32, device=weights.device) for n in shape)
        if matrix:
            row = row + (skipped + (held.start if held.dim == 0 else 0))
            column = column + (held.start if held.dim == 1 else 0)
        else:
            column = column + (held.start + skipped)
        site = torch.tensor(key32("rounding", held.name)[0], dtype=torch.int32, device=weights.device)
        out.append(Piece(view, site, row, column))
    return out
