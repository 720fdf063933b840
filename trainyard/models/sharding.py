"""Between whole tensors and what a tensor-parallel rank holds of them, as the blueprint says."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from trainyard.models.blueprint import Blueprint
from trainyard.models.init import Values


def take(blueprint: Blueprint, name: str, whole: Tensor, tp: int, rank: int) -> Tensor:
    """This rank's share of a whole tensor, padded where the blueprint pads."""
    pieces, start = [], 0
    fused = bool(blueprint.row(name).parts)
    for held in blueprint.slices(name, tp, rank):
        pieces.append(whole.narrow(held.dim, start + held.start, held.stop - held.start))
        start += held.shape[0] if fused else 0
    held_here = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
    missing = blueprint.local_shape(name, tp)[0] - held_here.shape[0] if blueprint.row(name).padded else 0
    return F.pad(held_here, (0, 0) * (whole.dim() - 1) + (0, missing)) if missing else held_here


def join(blueprint: Blueprint, name: str, shares: Sequence[Tensor]) -> Tensor:
    """The whole tensor from every tensor-parallel rank's share."""
    row, tp = blueprint.row(name), len(shares)
    if row.split is None:
        return shares[0]
    whole = shares[0].new_empty(row.shape)
    for rank, local in enumerate(shares):
        start = taken = 0
        for held in blueprint.slices(name, tp, rank):
            size = held.stop - held.start
            whole.narrow(held.dim, start + held.start, size).copy_(local.narrow(held.dim, taken, size))
            start += held.shape[0] if row.parts else 0
            taken += size
    return whole


def local(blueprint: Blueprint, whole: Values, tp: int, rank: int) -> Values:
    """Values of a rank's shares, from values of whole tensors."""
    return lambda name: take(blueprint, name, whole(name), tp, rank)
