"""Tensors in files that are read slice by slice through mapped memory.

Nothing is read before it is used, and then only the pages of the slice. The mapping is private and copy-on-write, so
that writing to a tensor by mistake does not harm the file. It lives as long as the tensor: a checkpoint can have more
files than a process may keep open, and more bytes than memory.
"""

import mmap
import os
import stat
import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainyard.core.errors import UserError
from trainyard.core.quantities import counted
from trainyard.core.tensor_slice import TensorIndex, TensorSlice

_NO_RESERVE = 0x4000 if sys.platform == "linux" else 0
"""MAP_NORESERVE, which Python 3.11 does not define. Pages are only copied by mistake, so none are reserved; otherwise a
file larger than memory could not be mapped."""
_MAX_SIZE = 2**48
"""Exclusive limit of sizes, strides, offsets and numbers of elements."""
_MAX_DIMS = 32
_READAHEAD_BYTES = 2**20
"""Reads of at least this many bytes announce the range to the kernel for read-ahead."""
_MAX_EXPANDED_BYTES = 2**30
"""Maximum size of a tensor that is larger than its storage because it is expanded (strides of 0)."""


class LazyTensor(ABC):
    """A tensor in a file that is read on demand."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def exists(self) -> bool:
        """False for a reference to a missing file."""
        return True

    def read(self, index: TensorIndex | None = None) -> Tensor:
        """Read a slice (None: all). The result may be a view of mapped memory."""
        return self.read_slice(tuple(slice(0, size) for size in self.shape) if index is None else index)

    @abstractmethod
    def read_slice(self, index: TensorIndex) -> Tensor:
        """Read a slice, with a start and a stop for each dim."""


class MappedFile:
    """A file that must not change after it was opened."""

    def __init__(self, path: Path) -> None:
        self.path = path
        state = os.stat(path)
        if not stat.S_ISREG(state.st_mode):
            raise UserError(f"{path}: not a file")
        self.size, self._mtime_ns = state.st_size, state.st_mtime_ns

    def map_bytes(self, start: int, count: int, needed: tuple[int, int]) -> Tensor:
        """A view of `count` > 0 bytes, of which the range `needed` will be read. Each view has its own mapping that is
        released with it, so that memory holds only tensors in use."""
        page = start // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
        try:
            with open(self.path, "rb") as file:
                state = os.fstat(file.fileno())
                if (state.st_size, state.st_mtime_ns) != (self.size, self._mtime_ns):
                    raise UserError(f"{self.path}: changed after it was opened; start again")
                flags, protection = mmap.MAP_PRIVATE | _NO_RESERVE, mmap.PROT_READ | mmap.PROT_WRITE
                mapping = mmap.mmap(file.fileno(), start + count - page, flags=flags, prot=protection, offset=page)
        except OSError as error:
            raise UserError(f"{self.path}: cannot be read: {error.strerror}") from None
        first, stop = (start - page + offset for offset in needed)
        if stop - first >= _READAHEAD_BYTES:  # reading page by page on access would be far slower
            first = first // mmap.PAGESIZE * mmap.PAGESIZE
            mapping.madvise(mmap.MADV_WILLNEED, first, stop - first)
        return torch.frombuffer(mapping, dtype=torch.uint8, count=count, offset=start - page)


@dataclass
class TensorStorage:
    """A range of a file that tensors are views of."""

    file: MappedFile
    dtype: torch.dtype
    numel: int
    start: int
    """Offset in bytes. In the legacy format, it is known only after the tensors."""
    byte_swapped: bool = False
    """The file was written on a machine of the other byte order."""


class StorageView(LazyTensor):
    """A tensor that is a view of a storage. Offset and strides count elements; if invalid, they raise ValueError."""

    def __init__(self, storage: Any, dtype: Any, offset: Any, shape: Any, stride: Any) -> None:
        if not isinstance(storage, TensorStorage) or not isinstance(dtype, torch.dtype):
            raise ValueError("tensor without storage or dtype")
        self._storage, self.dtype = storage, dtype
        self.shape, self._stride, (self._offset,) = check_sizes(shape), check_sizes(stride), check_sizes((offset,))
        if len(self.shape) != len(self._stride) or len(self.shape) > _MAX_DIMS:
            raise ValueError(f"tensor of {counted(len(self.shape), 'dim')} with {counted(len(self._stride), 'stride')}")
        storage_bytes, count = storage.numel * storage.dtype.itemsize, prod(self.shape)
        self._span = 1 + sum((size - 1) * step for size, step in zip(self.shape, self._stride, strict=True))
        if count and (self._offset + self._span) * dtype.itemsize > storage_bytes:
            raise ValueError(f"tensor of {self.shape} exceeds its storage of {storage_bytes} bytes")
        if count * dtype.itemsize > max(storage_bytes, _MAX_EXPANDED_BYTES) or count >= _MAX_SIZE:
            raise ValueError(f"tensor of {self.shape} in a storage of {storage_bytes} bytes")

    def read_slice(self, index: TensorIndex) -> Tensor:
        if 0 in self.shape:
            return torch.empty(self.shape, dtype=self.dtype)[index]
        element_bytes = self.dtype.itemsize
        needed = 0, self._span * element_bytes
        if self._stride:
            row_bytes = self._stride[0] * element_bytes
            needed = index[0].start * row_bytes, min(index[0].stop * row_bytes, needed[1])
        start = self._storage.start + self._offset * element_bytes
        mapped = self._storage.file.map_bytes(start, self._span * element_bytes, needed)
        # As bytes, with the bytes of an element in the last dim: the position in the file may be unaligned.
        view = mapped.as_strided((*self.shape, element_bytes), (*(step * element_bytes for step in self._stride), 1))
        view = view[index]
        number_bytes = element_bytes // 2 if self.dtype.is_complex else element_bytes
        if self._storage.byte_swapped and number_bytes > 1:
            view = view.reshape(*view.shape[:-1], -1, number_bytes).flip(-1).flatten(-2)
        elif mapped.data_ptr() % element_bytes:  # torch requires aligned elements
            view = view.clone(memory_format=torch.contiguous_format)
        return view.view(self.dtype).squeeze(-1)


class InlineTensor(LazyTensor):
    """A tensor in memory, such as one whose values are in the pickle itself."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor, self.shape, self.dtype = tensor, tuple(tensor.shape), tensor.dtype

    def read_slice(self, index: TensorIndex) -> Tensor:
        return self._tensor[index]


class AssembledTensor(LazyTensor):
    """A tensor that consists of slices, each of them a tensor of its own, as the files of several ranks hold them."""

    def __init__(
        self, name: str, shape: tuple[int, ...], dtype: torch.dtype, pieces: Sequence[tuple[TensorSlice, LazyTensor]]
    ) -> None:
        self.name, self.shape, self.dtype, self._pieces = name, shape, dtype, pieces

    def check_complete(self) -> None:
        """Refuse a tensor whose slices do not add up to it."""
        if (stored := sum(piece.numel for piece, _ in self._pieces)) != prod(self.shape):
            raise UserError(f"checkpoint is incomplete: {self.name} has {stored} of {prod(self.shape)} elements")

    def read_slice(self, index: TensorIndex) -> Tensor:
        wanted = TensorSlice.full(self.name, self.shape)
        for dim, part in enumerate(index):
            wanted = wanted.narrow(dim, part.start, part.stop)
        found = [(overlap, piece, tensor) for piece, tensor in self._pieces if (overlap := wanted.intersect(piece))]
        if len(found) == 1 and found[0][0] == wanted:
            _, piece, tensor = found[0]
            return tensor.read(wanted.to_index(piece.offsets))
        if not _is_partition(wanted, [overlap for overlap, _, _ in found]):
            raise UserError(f"checkpoint is incomplete: the chunks of {self.name} overlap or leave gaps")
        out = torch.empty(wanted.sizes, dtype=self.dtype)
        for overlap, piece, tensor in found:
            out[overlap.to_index(wanted.offsets)] = tensor.read(overlap.to_index(piece.offsets))
        return out


def _is_partition(wanted: TensorSlice, pieces: list[TensorSlice]) -> bool:
    """True if every element of `wanted` is in exactly one of the pieces, which are parts of it."""
    split_dims = {dim for piece in pieces for dim, size in enumerate(piece.sizes) if size != wanted.sizes[dim]}
    if sum(piece.numel for piece in pieces) != wanted.numel:
        return False
    if len(split_dims) == 1:  # as ranks usually split tensors; this needs no mask of all elements
        (dim,) = split_dims
        starts = sorted((piece.offsets[dim], piece.sizes[dim]) for piece in pieces)
        return all(start + size == stop for (start, size), (stop, _) in pairwise(starts))
    is_covered = torch.zeros(wanted.sizes, dtype=torch.bool)
    for piece in pieces:
        is_covered[piece.to_index(wanted.offsets)] = True
    return bool(is_covered.all())


def check_sizes(values: Any) -> tuple[int, ...]:
    """Validate a shape or strides from a file."""
    if not isinstance(values, tuple | list) or not all(type(size) is int and 0 <= size < _MAX_SIZE for size in values):
        raise ValueError("invalid shape or strides")
    return tuple(values)
