"""Initial weights as a function of (seed, parameter name, element index).

A rank generates only its own slice, in any layout, and gets the same bits that a single rank would.
"""

from collections.abc import Callable
from math import prod

import torch
from torch import Tensor

from trainyard.core.counter_rng import key64, normal_slice, uniform_slice
from trainyard.core.splits import FULL_MODEL, ModelShard
from trainyard.core.tensor_slice import TensorSlice
from trainyard.families.blueprint import Blueprint, layer_index

ParameterValues = Callable[[str], Tensor]
"""A function from a parameter's name to this rank's fp32 values of it."""


def initial_values(
    blueprint: Blueprint, seed: int, device: torch.device | str = "cpu", shard: ModelShard = FULL_MODEL
) -> ParameterValues:
    """The initial values of the parameters that a rank holds."""

    def values(name: str) -> Tensor:
        # The padding rows after the slices of a padded parameter stay 0.
        out = torch.zeros(blueprint.local_shape(name, shard), device=device)
        start = 0
        for piece in blueprint.local_slices(name, shard):
            initial_slice(blueprint, name, piece, seed, device, out.narrow(0, start, piece.sizes[0]))
            start += piece.sizes[0]
        return out

    return values


def initial_slice(
    blueprint: Blueprint,
    name: str,
    piece: TensorSlice,
    seed: int,
    device: torch.device | str,
    out: Tensor,
    read: Callable[[TensorSlice], Tensor] | None = None,
) -> None:
    """Write the initial values of a slice of the parameter `name`. `read` returns slices of the weights that others
    start from (`ParamSpec.norms_of`), if these are not initial values too."""
    spec = blueprint.spec(name)
    if spec.init_std is not None:
        torch.mul(normal_values(piece, seed, device), spec.init_std, out=out)
    elif spec.init_log_range:
        low, high = spec.init_log_range
        first, count = piece.offsets[0], piece.sizes[0]
        torch.log(low + (high - low) * uniform_slice(key64(seed, piece.name), first, first + count, device), out=out)
    elif not spec.norms_of:
        out.fill_(spec.init_value)
    else:
        rows = weight_rows(blueprint, name, piece)
        if read:
            weight = read(rows)
        else:
            weight = torch.empty(rows.sizes, device=device)
            initial_slice(blueprint, weight_name(blueprint, name), rows, seed, device, weight)
        torch.linalg.vector_norm(weight, dim=1, dtype=torch.float32, out=out)


def weight_name(blueprint: Blueprint, name: str) -> str:
    """The weight whose row norms are the initial values of this vector."""
    layer = layer_index(name)
    return blueprint.spec(name).norms_of.replace("*", str(layer))


def weight_rows(blueprint: Blueprint, name: str, piece: TensorSlice) -> TensorSlice:
    """The rows, in full, of the unfused weight whose norms are this slice of the vector `name`."""
    suffix = name.rpartition(".")[2]
    weight = weight_name(blueprint, name)
    part = piece.name.removesuffix(suffix) + weight.rpartition(".")[2]
    shape = (*piece.global_shape, *blueprint.spec(weight).shape[1:])
    return TensorSlice.full(part, shape).narrow(0, piece.offsets[0], piece.offsets[0] + piece.sizes[0])


def normal_values(piece: TensorSlice, seed: int, device: torch.device | str) -> Tensor:
    """The slice's elements of a standard normal tensor that depends only on the seed and the tensor's name."""
    columns = prod(piece.global_shape[1:])
    rows, cols = piece.to_index()[0], slice(0, columns)
    if len(piece.sizes) == 2:
        cols = piece.to_index()[1]
    else:
        assert piece.sizes[1:] == piece.global_shape[1:]
    return normal_slice(key64(seed, piece.name), columns, rows, cols, device).view(piece.sizes)
