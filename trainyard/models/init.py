"""Initial weights as a function of (seed, parameter name, element index).

A rank makes just its own slice, at any layout, and gets the same bits as one rank would.
"""

from collections.abc import Callable
from math import prod

import torch
from torch import Tensor

from trainyard.core.counter_rng import key64, normal_slice
from trainyard.models.blueprint import Blueprint, TpSlice

ParameterValues = Callable[[str], Tensor]
"""From a parameter's name to this rank's fp32 values of it."""


def initial_values(
    blueprint: Blueprint, seed: int, device: torch.device | str = "cpu", tp: int = 1, rank: int = 0
) -> ParameterValues:
    def values(name: str) -> Tensor:
        row = blueprint.spec(name)
        out = torch.full(blueprint.local_shape(name, tp, rank), row.init_value, device=device)
        if row.init_std is None:
            return out
        # A padded parameter has rows beyond its slices: they stay 0.
        taken = 0
        for piece in blueprint.tp_slices(name, tp, rank):
            size = piece.stop - piece.start
            torch.mul(_draw(piece, seed, device), row.init_std, out=out.narrow(piece.dim, taken, size))
            taken += size
        return out

    return values


def _draw(piece: TpSlice, seed: int, device: torch.device | str) -> Tensor:
    columns = prod(piece.shape[1:])
    rows, cols = slice(0, piece.shape[0]), slice(0, columns)
    held = slice(piece.start, piece.stop)
    if piece.dim == 0:
        rows = held
    else:
        assert (piece.dim, len(piece.shape)) == (1, 2)
        cols = held
    values = normal_slice(key64(seed, piece.name), columns, rows, cols, device)
    return values.view(-1, *piece.shape[1:]) if piece.dim == 0 else values
