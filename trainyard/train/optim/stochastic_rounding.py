"""Stochastic rounding of bf16 weights. The random bits of a weight are a function of the step, the unfused name of its
tensor and its global row and column, so every layout rounds the same way."""

from typing import NamedTuple

import torch
from torch import Tensor

from trainyard.checkpoint.partition import rank_slices
from trainyard.core.counter_rng import element_bits, key32, row_seeds
from trainyard.core.splits import ModelShard
from trainyard.families.blueprint import Blueprint
from trainyard.train.optim.flat_state import FlatState


class RoundingRange(NamedTuple):
    """Rows of one unfused tensor in this rank's shard, with their global row and column numbers."""

    weight: Tensor
    """[rows, columns] view of the flat weights; a vector is one row."""
    site: Tensor
    """Random stream of the unfused tensor."""
    row_ids: Tensor
    column_ids: Tensor

    def row_bits(self, key: Tensor) -> tuple[Tensor, Tensor]:
        """Two random words for each row, from the random key of the step."""
        first, second = row_seeds(key, self.row_ids, torch.zeros_like(self.row_ids))
        return first[:, None], second[:, None]


def rounding_ranges(state: FlatState, blueprint: Blueprint, shard: ModelShard, name: str) -> list[RoundingRange]:
    """This rank's rows of a bf16 parameter, divided at the boundaries of fused tensors. Empty without stochastic
    rounding."""
    if not state.stochastic_rounding:
        return []
    weights, span, rows = state.master_weights, state.flat.spans[name], state.shard_row_range(name)
    pieces = list(rank_slices(blueprint, name, shard, rows, skip_replicas=False))
    ranges = []
    # The last range includes the rows of vocabulary padding, whose zeros stay zeros: the shapes are then the same on
    # all ranks.
    bounds = [*(piece.local_row for piece in pieces), len(rows)]
    for piece, end in zip(pieces, bounds[1:], strict=True):
        count, start = end - piece.local_row, span.shard_start + piece.local_row * span.row_size
        shape, offsets = (
            ((1, count), (0, *piece.offsets)) if len(span.shape) == 1 else ((count, span.row_size), piece.offsets)
        )
        row_ids, column_ids = (
            torch.arange(offset, offset + n, dtype=torch.int32, device=weights.device)
            for n, offset in zip(shape, offsets, strict=True)
        )
        site = torch.tensor(key32("rounding", piece.name)[0], dtype=torch.int32, device=weights.device)
        view = weights[start : start + count * span.row_size].view(shape)
        ranges.append(RoundingRange(view, site, row_ids, column_ids))
    return ranges


def stochastic_round_to_bf16(x: Tensor, row_bits: tuple[Tensor, Tensor], site: Tensor, column_ids: Tensor) -> Tensor:
    """Round an fp32 matrix to bf16, up or down at random such that the expected value is exact."""
    noise = element_bits(row_bits, site, column_ids) & 0xFFFF
    return ((x.view(torch.int32) + noise) & -0x10000).view(torch.float32).bfloat16()
