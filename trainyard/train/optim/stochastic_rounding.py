"""Stochastic rounding of bf16 weights. The random bits of a weight are a function of the step, the unfused name of its
tensor and its global row and column, so every layout rounds the same way."""

from typing import NamedTuple

import torch
from torch import Tensor

from trainyard.core.counter_rng import element_bits, key32, row_seeds
from trainyard.models.blueprint import Blueprint
from trainyard.parallel.flat_buffer import FlatBuffer
from trainyard.parallel.process_group import Group


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


def rounding_ranges(
    weights: Tensor, name: str, blueprint: Blueprint, tp: Group, flat: FlatBuffer, shard: int
) -> list[RoundingRange]:
    """This rank's rows of a parameter in the flat shard `weights`, divided at the boundaries of fused tensors."""
    span, shard_rows = flat.spans[name], flat.shard_row_range(name, shard)
    is_matrix = len(span.shape) > 1
    ranges, part_start = [], 0
    slices = blueprint.tp_slices(name, tp.size, tp.rank)
    for piece in slices:
        # The last range includes the rows of vocabulary padding, whose zeros stay zeros: the shapes are then the same
        # on all ranks.
        rows = piece.sizes[0] if piece is not slices[-1] else span.shape[0] - part_start
        first, end = max(part_start, shard_rows.start), min(part_start + rows, shard_rows.stop)
        row_offset = first - part_start
        part_start += rows
        if first >= end:
            continue
        start = span.shard_start + (first - shard_rows.start) * span.row_size
        shape = (end - first, span.row_size) if is_matrix else (1, end - first)
        view = weights[start : start + (end - first) * span.row_size].view(shape)
        row_ids, column_ids = (torch.arange(n, dtype=torch.int32, device=weights.device) for n in shape)
        if is_matrix:
            row_ids = row_ids + (row_offset + piece.offsets[0])
            column_ids = column_ids + piece.offsets[1]
        else:
            column_ids = column_ids + (piece.offsets[0] + row_offset)
        site = torch.tensor(key32("rounding", piece.name)[0], dtype=torch.int32, device=weights.device)
        ranges.append(RoundingRange(view, site, row_ids, column_ids))
    return ranges


def stochastic_round_to_bf16(x: Tensor, row_bits: tuple[Tensor, Tensor], site: Tensor, column_ids: Tensor) -> Tensor:
    """Round an fp32 matrix to bf16, up or down at random such that the expected value is exact."""
    noise = element_bits(row_bits, site, column_ids) & 0xFFFF
    return ((x.view(torch.int32) + noise) & -0x10000).view(torch.float32).bfloat16()
