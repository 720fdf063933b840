"""Between whole tensors and what a tensor-parallel rank holds of them, as the blueprint says."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from trainyard.models.blueprint import Blueprint
from trainyard.models.init import ParameterValues


def shard_tensor(blueprint: Blueprint, name: str, full: Tensor, tp: int, rank: int) -> Tensor:
    """This rank's share of a whole tensor, padded where the blueprint pads."""
    pieces, start = [], 0
    fused = bool(blueprint.spec(name).fused_parts)
    for held in blueprint.tp_slices(name, tp, rank):
        pieces.append(full.narrow(held.dim, start + held.start, held.stop - held.start))
        start += held.shape[0] if fused else 0
    held_here = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
    missing = blueprint.local_shape(name, tp)[0] - held_here.shape[0] if blueprint.spec(name).padded else 0
    return F.pad(held_here, (0, 0) * (full.dim() - 1) + (0, missing)) if missing else held_here


def unshard_tensor(blueprint: Blueprint, name: str, shares: Sequence[Tensor]) -> Tensor:
    """The whole tensor from every tensor-parallel rank's share."""
    row, tp = blueprint.spec(name), len(shares)
    if row.tp_dim is None:
        return shares[0]
    whole = shares[0].new_empty(row.shape)
    for rank, local in enumerate(shares):
        start = taken = 0
        for held in blueprint.tp_slices(name, tp, rank):
            size = held.stop - held.start
            whole.narrow(held.dim, start + held.start, size).copy_(local.narrow(held.dim, taken, size))
            start += held.shape[0] if row.fused_parts else 0
            taken += size
    return whole


def shard_values(blueprint: Blueprint, full: ParameterValues, tp: int, rank: int) -> ParameterValues:
    """Values of a rank's shares, from values of whole tensors."""
    return lambda name: shard_tensor(blueprint, name, full(name), tp, rank)
