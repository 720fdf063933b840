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

File = TypeVar("File", bound=Hashable)
Region = tuple[slice, ...]
"""A box in a tensor: a slice with start and stop for each dim."""


@dataclass(frozen=True)
class Piece:
    """[start, stop) of a part, along the dim of the tensor that holds it."""

    part: str
    start: int
    stop: int


@dataclass(frozen=True)
class Stored:
    """A tensor in a file: pieces one after the other along `dim`."""

    name: str
    dim: int
    pieces: tuple[Piece, ...]
    length: int | None = None
    """Along `dim`, where zeros follow the pieces (padded vocabularies)."""
    transposed: bool = False
    """The file has it [in, out] where the part is [out, in]; `dim` counts as in the part."""


class Weights(Protocol):
    """Somebody's weights, as parts of a model of ours. Nothing is read before it is asked for."""

    @property
    def model(self) -> models.AnyModel: ...

    def dtype(self, part: str) -> torch.dtype: ...

    def read(self, part: str, region: Region) -> Tensor:
        """In the dtype it has; may be a view of mapped memory, not to be written to."""
        ...


def shapes(blueprint: Blueprint) -> dict[str, tuple[int, ...]]:
    """Every part of the whole model, in the blueprint's order."""
    return {piece.name: piece.shape for name in blueprint.names() for piece in blueprint.slices(name)}


def shapes_of(model: models.AnyModel) -> dict[str, tuple[int, ...]]:
    return shapes(models.family(model).blueprint(model))


def everything(shape: tuple[int, ...]) -> Region:
    return tuple(slice(0, size) for size in shape)


def stored_shape(stored: Stored, parts: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
    """As in the file."""
    shape = list(parts[stored.pieces[0].part])
    total = sum(piece.stop - piece.start for piece in stored.pieces)
    shape[stored.dim] = total if stored.length is None else stored.length
    return tuple(reversed(shape)) if stored.transposed else tuple(shape)


def put_together(stored: Stored, parts: Mapping[str, tuple[int, ...]], weights: Weights) -> Tensor:
    """The tensor that belongs in the file."""
    read = []
    for piece in stored.pieces:
        region = list(everything(parts[piece.part]))
        region[stored.dim] = slice(piece.start, piece.stop)
        read.append(weights.read(piece.part, tuple(region)))
    whole = read[0] if len(read) == 1 else torch.cat(read, stored.dim)
    if stored.length is not None and (missing := stored.length - whole.shape[stored.dim]):
        whole = F.pad(whole, (0, 0) * (whole.dim() - 1 - stored.dim) + (0, missing))
    return (whole.T if stored.transposed else whole).contiguous()


@dataclass(frozen=True)
class _Found(Generic[File]):
    """Where a stretch of a part lies: it begins at `at` of the stored tensor."""

    file: File
    stored: Stored
    start: int
    stop: int
    at: int


class Scattered(Generic[File]):
    """Weights whose parts lie scattered over the tensors of some files.

    `read(file, name, region)` and `dtype_of(file, name)` look into a file. Stretches that several tensors hold (copies)
    are taken from the first of them.
    """

    def __init__(
        self,
        model: models.AnyModel,
        held: Iterable[tuple[File, Stored]],
        read: Callable[[File, str, Region], Tensor],
        dtype_of: Callable[[File, str], torch.dtype],
    ) -> None:
        self.model = model
        self._read, self._dtype_of = read, dtype_of
        self._shapes = shapes_of(model)
        self._found: dict[str, list[_Found[File]]] = {}
        for file, stored in held:
            at = 0
            for piece in stored.pieces:
                self._found.setdefault(piece.part, []).append(_Found(file, stored, piece.start, piece.stop, at))
                at += piece.stop - piece.start
        for part, shape in self._shapes.items():
            found = self._found.get(part)
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

    def dtype(self, part: str) -> torch.dtype:
        found = self._found[part][0]
        return self._dtype_of(found.file, found.stored.name)

    def read(self, part: str, region: Region) -> Tensor:
        dim = self._found[part][0].stored.dim
        at, stop = region[dim].start, region[dim].stop
        out = []
        for each in self._found[part]:
            if each.start <= at < each.stop or (at == stop == each.start):
                end = min(stop, each.stop)
                out.append(self._look(each, region, dim, at, end))
                at = end
                if at == stop:
                    break
        assert at == stop, (part, region)
        return out[0] if len(out) == 1 else torch.cat(out, dim)

    def _look(self, each: _Found[File], region: Region, dim: int, start: int, stop: int) -> Tensor:
        inside = list(region)
        inside[dim] = slice(each.at + start - each.start, each.at + stop - each.start)
        if each.stored.transposed:
            return self._read(each.file, each.stored.name, tuple(reversed(inside))).T
        return self._read(each.file, each.stored.name, tuple(inside))


def slices_of(weights: Weights, tp: int = 1, rank: int = 0) -> models.Values:
    """What a tensor-parallel rank holds of these weights, in fp32. Nothing else is read."""
    blueprint = models.family(weights.model).blueprint(weights.model)

    def values(name: str) -> Tensor:
        pieces = []
        for piece in blueprint.slices(name, tp, rank):
            region = list(everything(piece.shape))
            region[piece.dim] = slice(piece.start, piece.stop)
            pieces.append(weights.read(piece.name, tuple(region)).float())
        held = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
        missing = blueprint.local_shape(name, tp)[0] - len(held) if blueprint.row(name).padded else 0
        return F.pad(held, (0, 0) * (held.dim() - 1) + (0, missing)) if missing else held

    return values
