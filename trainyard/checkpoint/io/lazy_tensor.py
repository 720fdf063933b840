"""Tensors that lie in a file: where one is, and the reading of any box of it through mapped memory.

Nothing is read before it is asked for, and then only the pages of the box. The mapping is private and copied on
writing, so a tensor may be written to by mistake without harm to the file. It lives as long as the tensor does: a
checkpoint can have more files than a process may hold open, and more bytes than it has memory.
"""

import mmap
import os
import stat
import sys
from abc import ABC, abstractmethod
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainyard.core.errors import UserError
from trainyard.core.tensor_slice import TensorIndex

# Pages are only ever copied by mistake, so none are reserved: without this a file greater than memory cannot be mapped.
# Python 3.11 has no name for the flag.
_NO_RESERVE = 0x4000 if sys.platform == "linux" else 0
_MAX_SIZE = 2**48
"""No size, stride, offset or number of elements reaches this."""
_MAX_DIMS = 32
_READAHEAD_BYTES = 2**20
"""Bytes from which the disk is told that all of a stretch will be read."""
_MAX_EXPANDED_BYTES = 2**30
"""Bytes of a tensor that is greater than its storage because it repeats it (strides of 0)."""


class LazyTensor(ABC):
    """A tensor in a file, not read yet."""

    @property
    @abstractmethod
    def shape(self) -> tuple[int, ...]: ...

    @property
    @abstractmethod
    def dtype(self) -> torch.dtype: ...

    @abstractmethod
    def read(self, index: TensorIndex | None = None) -> Tensor:
        """That box of it (None: all). May be a view of mapped memory."""


class MappedFile:
    """A file as it was when it was opened."""

    def __init__(self, path: Path) -> None:
        self.path = path
        state = os.stat(path)
        if not stat.S_ISREG(state.st_mode):
            raise UserError(f"{path}: not a file")
        self.size, self._mtime_ns = state.st_size, state.st_mtime_ns

    def map_bytes(self, start: int, count: int, needed: tuple[int, int]) -> Tensor:
        """A view of `count` > 0 bytes, of which [needed) are going to be read. It has a mapping of its own, which goes
        when it goes: memory holds what is being worked on and not what has been."""
        page = start // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
        try:
            with open(self.path, "rb") as file:
                state = os.fstat(file.fileno())
                if (state.st_size, state.st_mtime_ns) != (self.size, self._mtime_ns):
                    raise UserError(f"{self.path}: has changed since it was opened; start again")
                flags, protection = mmap.MAP_PRIVATE | _NO_RESERVE, mmap.PROT_READ | mmap.PROT_WRITE
                mapping = mmap.mmap(file.fileno(), start + count - page, flags=flags, prot=protection, offset=page)
        except OSError as error:
            raise UserError(f"{self.path}: cannot be read: {error.strerror}") from None
        begin, stop = (start - page + place for place in needed)
        if stop - begin >= _READAHEAD_BYTES:  # the disk may begin: page by page, when touched, it would be far slower
            begin = begin // mmap.PAGESIZE * mmap.PAGESIZE
            mapping.madvise(mmap.MADV_WILLNEED, begin, stop - begin)
        return torch.frombuffer(mapping, dtype=torch.uint8, count=count, offset=start - page)


@dataclass
class TensorStorage:
    """A stretch of a file that tensors are views of."""

    file: MappedFile
    dtype: torch.dtype
    numel: int
    """Elements."""
    start: int
    """In bytes. The old format tells after it has described the tensors."""
    byte_swapped: bool
    """Written on a machine of the other byte order."""


class StorageView(LazyTensor):
    """A tensor as a view of a storage; offset and strides count elements. Raises ValueError where it is none."""

    def __init__(self, storage: Any, dtype: Any, offset: Any, shape: Any, stride: Any) -> None:
        if not isinstance(storage, TensorStorage) or not isinstance(dtype, torch.dtype):
            raise ValueError("a tensor without storage or dtype")
        self._storage, self._dtype = storage, dtype
        self._shape, self._stride = check_sizes(shape), check_sizes(stride)
        (self._offset,) = check_sizes((offset,))
        if len(self._shape) != len(self._stride) or len(self._shape) > _MAX_DIMS:
            raise ValueError(f"a tensor of {len(self._shape)} dims with {len(self._stride)} strides")
        held, count = storage.numel * storage.dtype.itemsize, prod(self._shape)
        self._span = 1 + sum((size - 1) * step for size, step in zip(self._shape, self._stride, strict=True))
        if count and (self._offset + self._span) * dtype.itemsize > held:
            raise ValueError(f"a tensor of {self._shape} leaves its storage of {held} bytes")
        if count * dtype.itemsize > max(held, _MAX_EXPANDED_BYTES) or count >= _MAX_SIZE:
            raise ValueError(f"a tensor of {self._shape} in a storage of {held} bytes")

    @property
    def shape(self) -> tuple[int, ...]:
        return self._shape

    @property
    def dtype(self) -> torch.dtype:
        return self._dtype

    def read(self, index: TensorIndex | None = None) -> Tensor:
        if 0 in self._shape:
            empty = torch.empty(self._shape, dtype=self._dtype)
            return empty if index is None else empty[index]
        width = self._dtype.itemsize
        needed = 0, self._span * width
        if index is not None and self._stride:
            row = self._stride[0] * width
            needed = index[0].start * row, min(index[0].stop * row, needed[1])
        held = self._storage.file.map_bytes(self._storage.start + self._offset * width, self._span * width, needed)
        # As bytes, with those of an element along a last dim: so that any place in the file will do.
        box = held.as_strided((*self._shape, width), (*(step * width for step in self._stride), 1))
        if index is not None:
            box = box[index]
        number = width // 2 if self._dtype.is_complex else width
        if self._storage.byte_swapped and number > 1:
            box = box.reshape(*box.shape[:-1], -1, number).flip(-1).flatten(-2)
        elif held.data_ptr() % width:  # torch may not be given an element that is not aligned
            box = box.clone(memory_format=torch.contiguous_format)
        return box.view(self._dtype).squeeze(-1)


class InlineTensor(LazyTensor):
    """A tensor whose values stood in the pickle itself."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self._tensor.shape)

    @property
    def dtype(self) -> torch.dtype:
        return self._tensor.dtype

    def read(self, index: TensorIndex | None = None) -> Tensor:
        return self._tensor if index is None else self._tensor[index]


def check_sizes(values: Any) -> tuple[int, ...]:
    """A shape or strides from a file, checked."""
    if not isinstance(values, tuple | list) or not all(type(each) is int and 0 <= each < _MAX_SIZE for each in values):
        raise ValueError("sizes that are none")
    return tuple(values)
