"""What the files of a format hold of a model, as data: one description serves reading and writing.

The hub of all conversion are a model's *parts*, whole and unfused, by the blueprint's names for them. A format says,
for each tensor in its files, which stretches of which parts it is made of. To write a tensor is to put its pieces
together; to read a part is to find the pieces that cover it. Nothing is ever held but the tensor in hand.
"""

from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from trainyard import models
from trainyard.core.errors import UserError
from trainyard.models.blueprint import Blueprint

FileKey = TypeVar("FileKey", bound=Hashable)
TensorIndex = tuple[slice, ...]
"""A box in a tensor: a slice with start and stop for each dim."""


@dataclass(frozen=True)
class TensorRange:
    """[start, stop) of a part, along the dim of the tensor that holds it."""

    name: str
    start: int
    stop: int


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file: pieces one after the other along `dim`."""

    name: str
    dim: int
    ranges: tuple[TensorRange, ...]
    padded_size: int | None = None
    """Along `dim`, where zeros follow the pieces (padded vocabularies)."""
    transposed: bool = False
    """The file has it [in, out] where the part is [out, in]; `dim` counts as in the part."""


class WeightSource(Protocol):
    """Somebody's weights, as parts of a model of ours. Nothing is read before it is asked for."""

    @property
    def model(self) -> models.AnyModelConfig: ...

    def dtype(self, name: str) -> torch.dtype: ...

    def read(self, name: str, index: TensorIndex) -> Tensor:
        """In the dtype it has; may be a view of mapped memory, not to be written to."""
        ...


def blueprint_shapes(blueprint: Blueprint) -> dict[str, tuple[int, ...]]:
    """Every part of the whole model, in the blueprint's order."""
    return {piece.name: piece.shape for name in blueprint.parameter_names() for piece in blueprint.tp_slices(name)}


def unfused_shapes(model: models.AnyModelConfig) -> dict[str, tuple[int, ...]]:
    return blueprint_shapes(models.family_of(model).blueprint(model))


def full_index(shape: tuple[int, ...]) -> TensorIndex:
    return tuple(slice(0, size) for size in shape)


def stored_shape(stored: StoredTensor, shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
    """As in the file."""
    shape = list(shapes[stored.ranges[0].name])
    total = sum(piece.stop - piece.start for piece in stored.ranges)
    shape[stored.dim] = total if stored.padded_size is None else stored.padded_size
    return tuple(reversed(shape)) if stored.transposed else tuple(shape)


def assemble(stored: StoredTensor, shapes: Mapping[str, tuple[int, ...]], weights: WeightSource) -> Tensor:
    """The tensor that belongs in the file."""
    read = []
    for piece in stored.ranges:
        region = list(full_index(shapes[piece.name]))
        region[stored.dim] = slice(piece.start, piece.stop)
        read.append(weights.read(piece.name, tuple(region)))
    whole = read[0] if len(read) == 1 else torch.cat(read, stored.dim)
    if stored.padded_size is not None and (missing := stored.padded_size - whole.shape[stored.dim]):
        whole = F.pad(whole, (0, 0) * (whole.dim() - 1 - stored.dim) + (0, missing))
    return (whole.T if stored.transposed else whole).contiguous()


@dataclass(frozen=True)
class _StoredRange(Generic[FileKey]):
    """Where a stretch of a part lies: it begins at `at` of the stored tensor."""

    file: FileKey
    stored: StoredTensor
    start: int
    stop: int
    offset: int


class ShardedWeights(Generic[FileKey]):
    """Weights whose parts lie scattered over the tensors of some files.

    `read(file, name, region)` and `dtype_of(file, name)` look into a file. Stretches that several tensors hold (copies)
    are taken from the first of them.
    """

    def __init__(
        self,
        model: models.AnyModelConfig,
        tensors: Iterable[tuple[FileKey, StoredTensor]],
        read_tensor: Callable[[FileKey, str, TensorIndex], Tensor],
        dtype_of: Callable[[FileKey, str], torch.dtype],
    ) -> None:
        self.model = model
        self._read_tensor, self._dtype_of = read_tensor, dtype_of
        self._shapes = unfused_shapes(model)
        self._ranges: dict[str, list[_StoredRange[FileKey]]] = {}
        for file, stored in tensors:
            at = 0
            for piece in stored.ranges:
                self._ranges.setdefault(piece.name, []).append(_StoredRange(file, stored, piece.start, piece.stop, at))
                at += piece.stop - piece.start
        for part, shape in self._shapes.items():
            found = self._ranges.get(part)
            if not found:
                raise UserError(f"checkpoint does not fit the model: nothing in it holds {part}")
            found.sort(key=lambda each: each.start)  # stable: the first copy stays first
            end = 0
            for each in found:
                if each.start > end:
                    break
                end = max(end, each.stop)
            if end != shape[found[0].stored.dim]:
                raise UserError(f"checkpoint does not fit the model: {part} ends at {end} of {shape}")

    def dtype(self, name: str) -> torch.dtype:
        found = self._ranges[name][0]
        return self._dtype_of(found.file, found.stored.name)

    def read(self, name: str, index: TensorIndex) -> Tensor:
        dim = self._ranges[name][0].stored.dim
        at, stop = index[dim].start, index[dim].stop
        out = []
        for each in self._ranges[name]:
            if each.start <= at < each.stop or (at == stop == each.start):
                end = min(stop, each.stop)
                out.append(self._read_range(each, index, dim, at, end))
                at = end
                if at == stop:
                    break
        assert at == stop, (name, index)
        return out[0] if len(out) == 1 else torch.cat(out, dim)

    def _read_range(self, each: _StoredRange[FileKey], region: TensorIndex, dim: int, start: int, stop: int) -> Tensor:
        inside = list(region)
        inside[dim] = slice(each.offset + start - each.start, each.offset + stop - each.start)
        if each.stored.transposed:
            return self._read_tensor(each.file, each.stored.name, tuple(reversed(inside))).T
        return self._read_tensor(each.file, each.stored.name, tuple(inside))


def tp_rank_values(weights: WeightSource, tp: int = 1, rank: int = 0) -> models.ParameterValues:
    """What a tensor-parallel rank holds of these weights, in fp32. Nothing else is read."""
    blueprint = models.family_of(weights.model).blueprint(weights.model)

    def values(name: str) -> Tensor:
        pieces = []
        for piece in blueprint.tp_slices(name, tp, rank):
            region = list(full_index(piece.shape))
            region[piece.dim] = slice(piece.start, piece.stop)
            pieces.append(weights.read(piece.name, tuple(region)).float())
        held = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
        missing = blueprint.local_shape(name, tp)[0] - len(held) if blueprint.spec(name).padded else 0
        return F.pad(held, (0, 0) * (held.dim() - 1) + (0, missing)) if missing else held

    return values
