"""The blueprint: one table per model family that says how every parameter is laid out.

    name pattern | global shape | tensor-parallel dim | fused parts | pipeline place | init | weight decay

Initialisation, local shapes, optimizer groups, gradient sums, checkpoints, conversion and the memory plan read this
table and nothing else. In a pattern `*` stands for the layer number.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Literal

from trainyard.parallel.layout import head_range, replication_factor

StagePlacement = Literal["first", "block", "last", "both"]
FlopsTokens = Literal["tokens", "masked", "first", "nothing"]


@dataclass(frozen=True)
class FusedPart:
    """A stretch of a fused matrix along its first dim, split over tensor-parallel ranks on its own.

    Its name is what the parameter would be called unfused; weights are a function of that name, so fusing does not
    change them.
    """

    name: str
    size: int
    units: int
    """Indivisible pieces (heads). Fewer than tp ranks, or not a multiple: some are held by several ranks."""


@dataclass(frozen=True)
class ParamSpec:
    name: str
    shape: tuple[int, ...]
    tp_dim: int | None = None
    """Dim that tensor-parallel ranks share; None: every rank has it whole."""
    fused_parts: tuple[FusedPart, ...] = ()
    """Empty for a matrix that is not fused."""
    pipeline_stage: StagePlacement = "block"
    init_std: float | None = None
    """Normal initial values with this standard deviation; None: all `fill`."""
    init_value: float = 0.0
    weight_decay: bool = False
    flops_tokens: FlopsTokens = "nothing"
    """Which tokens this matrix multiplies (for FLOP counts); nothing: a look-up or a vector."""
    padded: bool = False
    """Rows of zeros at the end make the ranks' shares equal (vocabularies)."""
    replicated_compute: bool = False
    """Not split, and used on all tokens by every tensor-parallel rank even under sequence parallelism."""


@dataclass(frozen=True)
class TpSlice:
    """What one rank holds of one part: [start, stop) along `dim` of a whole tensor of `shape`."""

    name: str
    shape: tuple[int, ...]
    dim: int
    start: int
    stop: int


@dataclass(frozen=True)
class Blueprint:
    specs: tuple[ParamSpec, ...]
    layers: int
    tied_head: tuple[int, int, FlopsTokens] | None = None
    """(vocab, hidden, tokens seen) of an output head that shares the embedding's matrix."""

    @cached_property
    def _by_pattern(self) -> dict[str, ParamSpec]:
        return {row.name: row for row in self.specs}

    def parameter_names(self) -> Iterator[str]:
        """Every parameter of the whole model."""
        for row in self.specs:
            yield from (row.name.replace("*", str(i)) for i in range(self.layers if "*" in row.name else 1))

    def spec(self, name: str) -> ParamSpec:
        return self._by_pattern[name_pattern(name)]

    def __contains__(self, name: str) -> bool:
        return name_pattern(name) in self._by_pattern

    def tp_slices(self, name: str, tp: int = 1, rank: int = 0) -> list[TpSlice]:
        """What tensor-parallel rank `rank` of `tp` holds of `name`: a slice of each part, in order."""
        row, number = self.spec(name), layer_index(name)
        parts = row.fused_parts or (FusedPart(row.name, row.shape[row.tp_dim or 0], row.shape[row.tp_dim or 0]),)
        out = []
        for part in parts:
            start, stop = 0, part.size
            if row.padded:
                rows = -(-part.size // tp)
                start, stop = (min(end * rows, part.size) for end in (rank, rank + 1))
            elif row.tp_dim is not None:
                unit = part.size // part.units
                start, stop = (end * unit for end in head_range(part.units, tp, rank))
            shape = (part.size, *row.shape[1:]) if row.fused_parts else row.shape
            own = part.name.replace("*", "" if number is None else str(number))
            out.append(TpSlice(own, shape, row.tp_dim or 0, start, stop))
        return out

    def replication(self, name: str, tp: int) -> list[int]:
        """For each slice of `name`, how many tensor-parallel ranks hold the same values."""
        row = self.spec(name)
        if row.tp_dim is None:
            return [tp]
        return [replication_factor(part.units, tp) for part in row.fused_parts] or [1]

    def local_shape(self, name: str, tp: int = 1, rank: int = 0) -> tuple[int, ...]:
        row = self.spec(name)
        shape = list(row.shape)
        if row.padded:
            shape[0] = -(-shape[0] // tp)
        elif row.tp_dim is not None:
            shape[row.tp_dim] = sum(piece.stop - piece.start for piece in self.tp_slices(name, tp, rank))
        return tuple(shape)

    def parameter_count(self) -> int:
        """Number of weights in the whole model."""
        return sum(prod(row.shape) * (self.layers if "*" in row.name else 1) for row in self.specs)


def name_pattern(name: str) -> str:
    """`layers.3.mlp.up.weight` -> `layers.*.mlp.up.weight`."""
    return re.sub(r"\.\d+\.", ".*.", name)


def layer_index(name: str) -> int | None:
    """3 for `layers.3.mlp.up.weight`; None outside the blocks."""
    match = re.search(r"\.(\d+)\.", name)
    return int(match.group(1)) if match else None
