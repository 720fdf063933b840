"""Conversion between full tensors and the shards that ranks hold, as the blueprint describes."""

from collections.abc import Callable, Sequence
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor

from trainyard.core.splits import ModelShard
from trainyard.core.tensor_slice import TensorIndex, TensorSlice
from trainyard.families.blueprint import Blueprint
from trainyard.models.init import ParameterValues


def shard_tensor(blueprint: Blueprint, name: str, full: Tensor, shard: ModelShard) -> Tensor:
    """The shard of a full (fused) tensor that a rank holds."""
    starts = fused_starts(blueprint, name)
    return local_tensor(blueprint, name, shard, lambda piece: full[fused_index(piece, starts[piece.name])])


def local_tensor(blueprint: Blueprint, name: str, shard: ModelShard, read: Callable[[TensorSlice], Tensor]) -> Tensor:
    """A parameter as a rank holds it: the slices that `read` returns, concatenated, and padded where the blueprint
    pads."""
    spec = blueprint.spec(name)
    pieces = [read(piece) for piece in blueprint.local_slices(name, shard)]
    local = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
    padding = blueprint.local_shape(name, shard)[0] - local.shape[0] if spec.padded else 0
    return F.pad(local, (0, 0) * (local.dim() - 1) + (0, padding)) if padding else local


def fused_starts(blueprint: Blueprint, name: str) -> dict[str, int]:
    """The first row of each unfused tensor of a parameter in the full (fused) parameter."""
    pieces = blueprint.local_slices(name)
    starts = accumulate((piece.sizes[0] for piece in pieces[:-1]), initial=0)
    return {piece.name: start for piece, start in zip(pieces, starts, strict=True)}


def fused_index(piece: TensorSlice, start: int) -> TensorIndex:
    """The index of an unfused tensor's slice in the full (fused) parameter, where the tensor begins at row `start`."""
    return piece.to_index((-start, *(0 for _ in piece.sizes[1:])))


def unshard_tensor(blueprint: Blueprint, name: str, shards: Sequence[Tensor], ep: int = 1) -> Tensor:
    """The full tensor from the shards of all expert-parallel and tensor-parallel ranks, [ep][tp]."""
    spec, tp = blueprint.spec(name), len(shards) // ep
    if spec.tp_dim is None and not spec.experts:
        return shards[0]
    full, starts = shards[0].new_empty(spec.shape), fused_starts(blueprint, name)
    for index, tensor in enumerate(shards):
        start = 0
        for piece in blueprint.local_slices(name, ModelShard(tp, index % tp, ep, index // tp)):
            rows = tensor.narrow(0, start, piece.sizes[0])
            full[fused_index(piece, starts[piece.name])].copy_(rows)
            start += piece.sizes[0]
    return full


def shard_values(blueprint: Blueprint, full: ParameterValues, shard: ModelShard) -> ParameterValues:
    """The values of a rank's shards, from a function that returns full tensors."""
    return lambda name: shard_tensor(blueprint, name, full(name), shard)
