"""Describes the tensors of a checkpoint format as data, so that one description serves both reading and writing.

All formats are described in terms of the same tensors: the unfused, unsharded parameters of a model, under the
blueprint's names. For every tensor in its files, a format lists the slices of unfused tensors that it consists of.
Writing a stored tensor concatenates these slices; reading an unfused tensor finds the stored tensors that cover it.
Only the tensor being converted is in memory.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from trainyard import models
from trainyard.checkpoint.weights import WeightSource, unfused_tensors
from trainyard.core.errors import UserError
from trainyard.core.tensor_slice import TensorSlice
from trainyard.formats.io.lazy_tensor import LazyTensor


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file: slices of unfused tensors, concatenated along `dim` and perhaps stacked."""

    name: str
    dim: int
    slices: tuple[TensorSlice, ...]
    padded_size: int | None = None
    """Size along `dim` if zeros follow the slices (padded vocabularies)."""
    transposed: bool = False
    """The file stores [in, out] where the unfused tensor is [out, in]. `dim` is a dim of the unfused tensor."""
    stacked: int | None = None
    """Number of matrices (experts) that the file stacks along a new first dim, each of equally many slices."""
    interleaved: bool = False
    """The rows of the slices of a matrix, which are equally many, alternate; `dim` is 0."""
    groups: int = 1
    """Number of groups of rows, in each of which an equal share of every slice follows that of the slice before it.
    Slices are full tensors then; `dim` is 0."""

    @property
    def matrices(self) -> tuple[tuple[TensorSlice, ...], ...]:
        """The slices of each stacked matrix, or of the only one."""
        count = len(self.slices) // (self.stacked or 1)
        return tuple(self.slices[start : start + count] for start in range(0, len(self.slices), count))

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape in the file."""
        shape = list(self.slices[0].global_shape)
        shape[self.dim] = self.padded_size or sum(piece.sizes[self.dim] for piece in self.matrices[0])
        stack = () if self.stacked is None else (self.stacked,)
        return (*stack, *(reversed(shape) if self.transposed else shape))


def padded_shard(name: str, full: TensorSlice, rows: int, rank: int) -> StoredTensor:
    """Shard `rank` of a tensor whose shards all have `rows` rows; the rows beyond the end of `full` are zeros."""
    start, stop = (min(end * rows, full.sizes[0]) for end in (rank, rank + 1))
    # A shard of padding only gets an empty slice, the same for all of them.
    piece = full.narrow(0, start, stop) if start < stop else full.narrow(0, 0, 0)
    return StoredTensor(name, 0, (piece,), padded_size=rows)


def check_all_stored(model: models.ModelConfig, tensors: Iterable[StoredTensor], names: str) -> None:
    """Raise UserError if a tensor of the model is in none of the `tensors` that a format has for it. `names` says whose
    names the format uses."""
    stored = {piece.name for tensor in tensors for piece in tensor.slices}
    if missing := next((name for name in unfused_tensors(model) if name not in stored), None):
        raise UserError(f"model.family={model.family}: {names} have none for {missing}, which would be lost")


def assemble(stored: StoredTensor, weights: WeightSource, dtype: torch.dtype | None = None) -> Tensor:
    """Read the slices of a stored tensor and return it on the host as the file holds it (`dtype` None: its own)."""

    def matrix(slices: tuple[TensorSlice, ...]) -> Tensor:
        pieces = [weights.read(piece) for piece in slices]
        if stored.interleaved or stored.groups > 1:
            groups = len(pieces[0]) if stored.interleaved else stored.groups
            by_group = [piece.reshape(groups, -1, *piece.shape[1:]) for piece in pieces]
            joined = torch.cat(by_group, 1).flatten(0, 1)
        else:
            joined = torch.cat(pieces, stored.dim)
        tensor = pieces[0] if len(pieces) == 1 else joined
        if stored.padded_size is not None and (missing := stored.padded_size - tensor.shape[stored.dim]):
            tensor = F.pad(tensor, (0, 0) * (tensor.dim() - 1 - stored.dim) + (0, missing))
        return tensor.T if stored.transposed else tensor

    tensors = [matrix(slices) for slices in stored.matrices]
    tensor = tensors[0] if stored.stacked is None else torch.stack(tensors)
    return tensor.contiguous().to(device="cpu", dtype=dtype)


def check_tensors(
    where: str,
    expected: Mapping[str, StoredTensor],
    tensors: Mapping[str, LazyTensor],
    ignored: Callable[[str], object] = lambda name: False,
) -> None:
    """Refuse missing and unknown tensors and wrong shapes. The error message begins with `where`."""
    missing = [name for name in expected if name not in tensors]
    unknown = [name for name in tensors if name not in expected and not ignored(name)]
    if missing or unknown:
        problem = f"{missing[0]} is missing" if missing else f"{unknown[0]} is not a tensor of this model"
        raise UserError(f"{where} does not fit the model: {problem} ({len(missing)} missing, {len(unknown)} unknown)")
    for name, stored in expected.items():
        if (shape := tensors[name].shape) != stored.shape:
            raise UserError(f"{where} does not fit the model: {name} is {list(shape)}, expected {list(stored.shape)}")


@dataclass(frozen=True)
class StoredSlice:
    """A slice of an unfused tensor that starts at `start` along the dim of a stored tensor, whose data is `tensor`, and
    has every `step`-th row from there on. `matrix` is its place among stacked matrices."""

    piece: TensorSlice
    stored: StoredTensor
    tensor: LazyTensor
    matrix: int
    start: int
    step: int

    def read(self, part: TensorSlice) -> Tensor:
        """Read a part of the slice."""
        rows, dim = list(part.to_index(self.piece.offsets)), self.stored.dim
        first, stop = (self.start + end * self.step for end in (rows[dim].start, rows[dim].stop))
        rows[dim] = slice(first, stop - self.step + 1)
        index = rows[::-1] if self.stored.transposed else rows
        if self.stored.stacked is None:
            tensor = self.tensor.read(tuple(index))
        else:
            tensor = self.tensor.read((slice(self.matrix, self.matrix + 1), *index))[0]
        tensor = tensor.T if self.stored.transposed else tensor
        return tensor if self.step == 1 else tensor[:: self.step]


TensorPairs = Iterable[tuple[StoredTensor, LazyTensor]]
"""Stored tensors, each with its data in a file."""


def in_groups(slices: Sequence[TensorSlice], groups: int) -> Iterator[TensorSlice]:
    """The slices themselves, or what `groups` groups have of their rows."""
    for group in range(groups):
        for piece in slices:
            rows = piece.sizes[0] // groups
            yield piece.narrow(0, group * rows, (group + 1) * rows) if groups > 1 else piece


def stored_slices(tensors: TensorPairs) -> Iterator[StoredSlice]:
    """The slices of all stored tensors."""
    for stored, tensor in tensors:
        for matrix, slices in enumerate(stored.matrices):
            start, step = 0, len(slices) if stored.interleaved else 1
            for piece in in_groups(slices, stored.groups):
                yield StoredSlice(piece, stored, tensor, matrix, start, step)
                start += 1 if stored.interleaved else piece.sizes[stored.dim]


def read_slices(slices: Sequence[StoredSlice], piece: TensorSlice) -> Tensor:
    """Read a piece of an unfused tensor from its slices, which are in order."""
    if not piece.numel:
        return torch.empty(piece.sizes, dtype=slices[0].tensor.dtype)
    dim, out, remaining = slices[0].stored.dim, [], piece
    stop = piece.offsets[dim] + piece.sizes[dim]
    for stored in slices:
        if overlap := remaining.intersect(stored.piece):
            out.append(stored.read(overlap))
            remaining = remaining.narrow(dim, overlap.offsets[dim] + overlap.sizes[dim], stop)
    assert not remaining.numel, remaining
    return out[0] if len(out) == 1 else torch.cat(out, dim)


class ShardedWeights:
    """A WeightSource whose unfused tensors are spread over the stored tensors of several files.

    Where several stored tensors hold the same elements (replicas), the first one is read. The replicas of unfused
    tensors that `must_agree` selects by name are all read, and must have the same bits.
    """

    notes: tuple[str, ...] = ()
    """Assumptions made to read them, for the user."""
    location = "checkpoint"
    """Names the files in error messages."""

    def __init__(
        self, model: models.ModelConfig, tensors: TensorPairs, must_agree: Callable[[str], bool] = lambda name: False
    ) -> None:
        self.model, self._must_agree = model, must_agree
        self._slices: dict[str, list[StoredSlice]] = {}
        for stored in stored_slices(tensors):
            self._slices.setdefault(stored.piece.name, []).append(stored)
        for name, tensor in unfused_tensors(model).items():
            self._sort_and_check_coverage(name, tensor)

    def dtype(self, name: str) -> torch.dtype:
        return self._slices[name][0].tensor.dtype

    def read(self, piece: TensorSlice) -> Tensor:
        tensor = read_slices(self._slices[piece.name], piece)
        for stored in self._slices[piece.name] if self._must_agree(piece.name) else ():
            overlap = piece.intersect(stored.piece)
            if overlap and not _same_bits(tensor[overlap.to_index(piece.offsets)], stored.read(overlap)):
                raise UserError(f"{self.location}: {different_copies(stored.stored.name)}")
        return tensor

    def _sort_and_check_coverage(self, name: str, tensor: TensorSlice) -> None:
        if name not in self._slices:
            raise UserError(f"checkpoint does not fit the model: no tensor in it holds {name}")
        dim, end = self._slices[name][0].stored.dim, 0
        self._slices[name].sort(key=lambda stored: stored.piece.offsets[dim])  # stable: the first replica stays first
        for stored in self._slices[name]:
            if stored.piece.offsets[dim] > end:
                break
            end = max(end, stored.piece.offsets[dim] + stored.piece.sizes[dim])
        if end != tensor.sizes[dim]:
            raise UserError(f"checkpoint does not fit the model: {name} ends at {end} of {tensor.sizes}")


def find_mismatched_copy(tensors: TensorPairs) -> str | None:
    """The name of the first tensor that holds elements with other bits than an earlier tensor with the same ones."""
    seen: dict[str, list[StoredSlice]] = {}
    for stored in stored_slices(tensors):
        earlier = seen.setdefault(stored.piece.name, [])
        overlaps = [(other, overlap) for other in earlier if (overlap := stored.piece.intersect(other.piece))]
        if not all(_same_bits(other.read(overlap), stored.read(overlap)) for other, overlap in overlaps):
            return stored.stored.name
        if all(overlap != stored.piece for _, overlap in overlaps):
            earlier.append(stored)
    return None


def different_copies(name: str) -> str:
    """The error message for what find_mismatched_copy returns."""
    return f"the copies in {name} differ between ranks; its files belong to several checkpoints, or one is corrupt"


def _same_bits(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
