"""Initial weights as a function of (seed, parameter name, element index).

A rank generates only its own slice, in any layout, and gets the same bits that a single rank would.
"""

from collections.abc import Callable
from math import prod

import torch
from torch import Tensor

from trainyard.core.counter_rng import key64, normal_slice
from trainyard.core.splits import FULL_MODEL, ModelShard
from trainyard.core.tensor_slice import TensorSlice
from trainyard.families.blueprint import Blueprint

ParameterValues = Callable[[str], Tensor]
"""A function from a parameter's name to this rank's fp32 values of it."""


def initial_values(
    blueprint: Blueprint, seed: int, device: torch.device | str = "cpu", shard: ModelShard = FULL_MODEL
) -> ParameterValues:
    """The initial values of the parameters that a rank holds."""

    def values(name: str) -> Tensor:
        spec = blueprint.spec(name)
        out = torch.full(blueprint.local_shape(name, shard), spec.init_value, device=device)
        if spec.init_std is None:
            return out
        # The padding rows after the slices of a padded parameter stay 0.
        start = 0
        for piece in blueprint.local_slices(name, shard):
            rows = out.narrow(0, start, piece.sizes[0])
            torch.mul(normal_values(piece, seed, device), spec.init_std, out=rows)
            start += piece.sizes[0]
        return out

    return values


def normal_values(piece: TensorSlice, seed: int, device: torch.device | str) -> Tensor:
    """The slice's elements of a standard normal tensor that depends only on the seed and the tensor's name."""
    columns = prod(piece.global_shape[1:])
    rows, cols = piece.to_index()[0], slice(0, columns)
    if len(piece.sizes) == 2:
        cols = piece.to_index()[1]
    else:
        assert piece.sizes[1:] == piece.global_shape[1:]
    return normal_slice(key64(seed, piece.name), columns, rows, cols, device).view(piece.sizes)
