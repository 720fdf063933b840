"""The checkpoint file of one rank: safetensors, in the layout of torch.distributed.checkpoint's sharded files.

Tensors have the names of the full tensors, and the header (`DCP_SHARDING_INFO`) says at which offsets each slice
begins, so that torch's HuggingFaceStorageReader can also assemble them. The header also holds a checksum of every
tensor and one of itself, so that every changed bit of a file is detected.
"""

import json
import zlib
from collections.abc import Iterable, Mapping, Sequence
from math import prod

import torch
from torch import Tensor

from trainyard.checkpoint.safetensors_file import (
    TensorEntry,
    TensorSpec,
    encode_checked_header,
    parse_header,
    read_checksums,
    stream_tensors,
    tensor_bytes,
    write_tensor,
)
from trainyard.core.errors import UserError, one_line
from trainyard.core.tensor_slice import TensorIndex
from trainyard.remote.storage import RandomAccessFile, Storage

VERIFY_CHUNK_BYTES = 2**24
"""Bytes read at a time to verify checksums."""


class CorruptCheckpoint(UserError):
    """A checkpoint file does not hold what was written to it."""


SliceSpec = tuple[TensorSpec, Sequence[int]]
"""A tensor of the file, and the offsets of its first element in the full tensor."""


def write_shard(
    storage: Storage, name: str, tensors: Sequence[tuple[str, Sequence[int], Tensor]], metadata: Mapping[str, str]
) -> None:
    """Write a file of (name, offsets, contiguous host tensor), with `metadata` in its header."""
    slices = [(TensorSpec(key, tensor.dtype, tuple(tensor.shape)), offsets) for key, offsets, tensor in tensors]
    checksums = {key: zlib.crc32(tensor_bytes(tensor)) for key, _, tensor in tensors}
    specs, metadata = [spec for spec, _ in slices], {**_shard_metadata(slices), **metadata}
    with storage.write(name) as file:
        file.write(encode_checked_header(specs, checksums, metadata))
        for _, _, tensor in tensors:
            write_tensor(file, tensor)


def stream_shard(storage: Storage, name: str, slices: Sequence[SliceSpec], tensors: Iterable[Tensor]) -> None:
    """Write a file with only one tensor in memory at a time. The storage's files must be seekable."""
    with storage.write(name) as file:
        stream_tensors(file, [spec for spec, _ in slices], tensors, _shard_metadata(slices))


def _shard_metadata(slices: Sequence[SliceSpec]) -> dict[str, str]:
    offsets = {spec.name: {"saved_offsets": list(offsets)} for spec, offsets in slices}
    return {"DCP_VERSION": "1.0", "DCP_SHARDING_INFO": json.dumps(offsets)}


class ShardFile:
    """A checkpoint file of one rank, open for reading."""

    def __init__(self, file: RandomAccessFile, path: str) -> None:
        self.file, self.path = file, path
        self._verified: set[str] = set()
        try:
            self.entries, self.metadata = parse_header(file.read, file.size)
            header_end = min((entry.start for entry in self.entries.values()), default=file.size)
            self.checksums = read_checksums(bytes(file.read(0, header_end)), self.metadata)
        except EOFError:
            raise self._corrupt("file is truncated") from None
        except (ValueError, TypeError, AttributeError) as error:
            raise self._corrupt(one_line(error)) from None

    def read(self, key: str, index: TensorIndex, verify: bool = True) -> Tensor:
        """Read a slice of a stored tensor, after a check of the whole tensor's checksum when it is first read.

        Without `verify`, a local file reads no other bytes than the slice; a remote one reads whole rows.
        """
        entry = self.entries[key]
        rows, element_bytes = index[0], entry.dtype.itemsize
        row_bytes = prod(entry.shape[1:]) * element_bytes
        sizes = [dim.stop - dim.start for dim in index]
        start = entry.start + rows.start * row_bytes
        try:
            if tuple(sizes[1:]) == entry.shape[1:]:
                data = self.file.read(start, start + sizes[0] * row_bytes)
            else:
                assert len(index) == 2
                start += index[1].start * element_bytes
                data = self.file.read_strided(start, sizes[1] * element_bytes, row_bytes, sizes[0])
            if verify and key not in self._verified:
                is_full = len(data) == entry.stop - entry.start
                self._check(key, zlib.crc32(data) if is_full else self._checksum(entry))
        except EOFError:
            raise self._corrupt("file is truncated") from None
        if not len(data):
            return torch.empty(sizes, dtype=entry.dtype)
        return torch.frombuffer(data, dtype=entry.dtype).view(sizes)

    def verify(self) -> None:
        """Read the file once, front to back, and compare all checksums."""
        chunk_start, chunk = 0, memoryview(b"")
        for key, entry in sorted(self.entries.items(), key=lambda item: item[1].start):
            position, crc = entry.start, 0
            while position < entry.stop:
                if position >= chunk_start + len(chunk):
                    chunk_start = position
                    chunk = self.file.read(position, min(position + VERIFY_CHUNK_BYTES, self.file.size))
                data = chunk[position - chunk_start : entry.stop - chunk_start]
                crc = zlib.crc32(data, crc)
                position += len(data)
            self._check(key, crc)

    def _checksum(self, entry: TensorEntry) -> int:
        crc = 0
        for start in range(entry.start, entry.stop, VERIFY_CHUNK_BYTES):
            crc = zlib.crc32(self.file.read(start, min(start + VERIFY_CHUNK_BYTES, entry.stop)), crc)
        return crc

    def _check(self, key: str, crc: int) -> None:
        if f"{crc:08x}" != self.checksums.get(key):
            raise self._corrupt(f"the checksum of {key} differs")
        self._verified.add(key)

    def _corrupt(self, reason: str) -> CorruptCheckpoint:
        return CorruptCheckpoint(f"{self.path}: corrupt: {reason}")
