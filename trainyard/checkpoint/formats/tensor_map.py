"""Describes the tensors of a checkpoint format as data, so that one description serves both reading and writing.

All formats are described in terms of the same tensors: the unfused, unsharded parameters of a model, under the
blueprint's names. For every tensor in its files, a format lists the slices of unfused tensors that it consists of.
Writing a stored tensor concatenates these slices; reading an unfused tensor finds the stored tensors that cover it.
Only the tensor being converted is in memory.
"""

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Generic, Protocol, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from trainyard import models
from trainyard.core.errors import UserError
from trainyard.core.tensor_slice import TensorIndex, TensorSlice
from trainyard.models.sharding import local_tensor

FileKey = TypeVar("FileKey", bound=Hashable)


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file: slices of unfused tensors, concatenated along `dim`."""

    name: str
    dim: int
    slices: tuple[TensorSlice, ...]
    padded_size: int | None = None
    """Size along `dim` if zeros follow the slices (padded vocabularies)."""
    transposed: bool = False
    """The file stores [in, out] where the unfused tensor is [out, in]. `dim` is a dim of the unfused tensor."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape in the file."""
        shape = list(self.slices[0].global_shape)
        if self.padded_size is None:
            shape[self.dim] = sum(piece.sizes[self.dim] for piece in self.slices)
        else:
            shape[self.dim] = self.padded_size
        return tuple(reversed(shape)) if self.transposed else tuple(shape)


class WeightSource(Protocol):
    """Weights from any source, addressed by unfused parameter names. Nothing is read before `read` asks for it."""

    @property
    def model(self) -> models.AnyModelConfig: ...

    def dtype(self, name: str) -> torch.dtype: ...

    def read(self, piece: TensorSlice) -> Tensor:
        """Return a slice of an unfused tensor in its stored dtype. It may be a read-only view of mapped memory."""
        ...


@lru_cache(maxsize=8)
def unfused_tensors(model: models.AnyModelConfig) -> Mapping[str, TensorSlice]:
    """Every unfused tensor of the model, in full, by name, in the blueprint's order."""
    blueprint = models.family_of(model).blueprint(model)
    return {piece.name: piece for name in blueprint.parameter_names() for piece in blueprint.tp_slices(name)}


def assemble(stored: StoredTensor, weights: WeightSource) -> Tensor:
    """Read the slices of a stored tensor and return it as the file holds it."""
    pieces = [weights.read(piece) for piece in stored.slices]
    tensor = pieces[0] if len(pieces) == 1 else torch.cat(pieces, stored.dim)
    if stored.padded_size is not None and (missing := stored.padded_size - tensor.shape[stored.dim]):
        tensor = F.pad(tensor, (0, 0) * (tensor.dim() - 1 - stored.dim) + (0, missing))
    return (tensor.T if stored.transposed else tensor).contiguous()


class HasShape(Protocol):
    @property
    def shape(self) -> Sequence[int]: ...


def check_tensors(
    where: str,
    expected: Mapping[str, StoredTensor],
    tensors: Mapping[str, HasShape],
    ignored: Callable[[str], object] = lambda name: False,
) -> None:
    """Refuse missing and unknown tensors and wrong shapes. The error message begins with `where`."""
    missing = [name for name in expected if name not in tensors]
    unknown = [name for name in tensors if name not in expected and not ignored(name)]
    if missing or unknown:
        problem = f"{missing[0]} is missing" if missing else f"{unknown[0]} is not a tensor of this model"
        raise UserError(f"{where} does not fit the model: {problem} ({len(missing)} missing, {len(unknown)} unknown)")
    for name, stored in expected.items():
        if (shape := tuple(tensors[name].shape)) != stored.shape:
            raise UserError(f"{where} does not fit the model: {name} is {list(shape)}, expected {list(stored.shape)}")


@dataclass(frozen=True)
class _StoredSlice(Generic[FileKey]):
    """A slice of an unfused tensor, stored at [start, start + size) along the dim of a stored tensor."""

    file: FileKey
    stored: StoredTensor
    piece: TensorSlice
    start: int

    def index(self, part: TensorSlice) -> TensorIndex:
        """Where a part of the slice is in the stored tensor."""
        dim, origin = self.stored.dim, list(self.piece.offsets)
        origin[dim] -= self.start
        index = part.to_index(tuple(origin))
        return index[::-1] if self.stored.transposed else index


class ShardedWeights(Generic[FileKey]):
    """A WeightSource whose unfused tensors are spread over the stored tensors of several files.

    `read_tensor(file, name, index)` and `dtype_of(file, name)` access a stored tensor. Where several stored tensors
    hold the same slice (replicas), the first one is read.
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
        self._slices: dict[str, list[_StoredSlice[FileKey]]] = {}
        for file, stored in tensors:
            start = 0
            for piece in stored.slices:
                self._slices.setdefault(piece.name, []).append(_StoredSlice(file, stored, piece, start))
                start += piece.sizes[stored.dim]
        for name, tensor in unfused_tensors(model).items():
            self._check_coverage(name, tensor)

    def dtype(self, name: str) -> torch.dtype:
        first = self._slices[name][0]
        return self._dtype_of(first.file, first.stored.name)

    def read(self, piece: TensorSlice) -> Tensor:
        if not piece.numel:
            return torch.empty(piece.sizes, dtype=self.dtype(piece.name))
        dim = self._slices[piece.name][0].stored.dim
        remaining: TensorSlice = piece
        out = []
        for stored in self._slices[piece.name]:
            overlap = remaining.intersect(stored.piece)
            if overlap is None or overlap.offsets[dim] != remaining.offsets[dim]:
                continue
            tensor = self._read_tensor(stored.file, stored.stored.name, stored.index(overlap))
            out.append(tensor.T if stored.stored.transposed else tensor)
            end = piece.offsets[dim] + piece.sizes[dim]
            remaining = remaining.narrow(dim, overlap.offsets[dim] + overlap.sizes[dim], end)
            if not remaining.numel:
                break
        assert not remaining.numel, piece
        return out[0] if len(out) == 1 else torch.cat(out, dim)

    def _check_coverage(self, name: str, tensor: TensorSlice) -> None:
        stored_slices = self._slices.get(name)
        if not stored_slices:
            raise UserError(f"checkpoint does not fit the model: no tensor in it holds {name}")
        dim = stored_slices[0].stored.dim
        stored_slices.sort(key=lambda stored: stored.piece.offsets[dim])  # stable: the first replica stays first
        end = 0
        for stored in stored_slices:
            if stored.piece.offsets[dim] > end:
                break
            end = max(end, stored.piece.offsets[dim] + stored.piece.sizes[dim])
        if end != tensor.sizes[dim]:
            raise UserError(f"checkpoint does not fit the model: {name} ends at {end} of {tensor.sizes}")


def tp_rank_values(weights: WeightSource, tp: int = 1, rank: int = 0) -> models.ParameterValues:
    """A function from parameter names to the fp32 values that a tensor-parallel rank holds. It reads nothing else."""
    blueprint = models.family_of(weights.model).blueprint(weights.model)
    return lambda name: local_tensor(blueprint, name, tp, rank, lambda piece: weights.read(piece).float())
