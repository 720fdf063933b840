"""One rank's file of a checkpoint: safetensors, as torch.distributed.checkpoint writes it in pieces.

A tensor's name is that of the whole; where its box begins is in the header (`DCP_SHARDING_INFO`), so that torch's own
HuggingFaceStorageReader puts the pieces together too. Beside it stand a checksum of every tensor and one of the header
itself, so that no bit of a file can change unseen.
"""

import json
import zlib
from collections.abc import Iterable, Mapping, Sequence
from math import prod

import torch
from torch import Tensor

from trainyard.checkpoint.io.safetensors_file import TensorSpec, encode_header, parse_header, tensor_bytes, write_tensor
from trainyard.checkpoint.io.storage import RandomAccessFile, Storage
from trainyard.core.errors import UserError, one_line

VERIFY_CHUNK_BYTES = 2**24
"""Bytes checked at a time."""
WRITE_CHUNK_BYTES = 2**22
"""Bytes summed up and written at a time."""
CRC_PLACEHOLDER = "0" * 8
"""Stands in a header where its own checksum belongs, while that is made."""


class CorruptCheckpoint(UserError):
    """A file that is not what was written."""


def write_shard(
    storage: Storage, name: str, tensors: Sequence[tuple[str, Sequence[int], Tensor]], metadata: Mapping[str, str]
) -> None:
    """Write (name, offsets, contiguous host tensor) of each, and `extra` in the header."""
    sums = {key: _crc32_hex(tensor_bytes(tensor)) for key, _, tensor in tensors}
    specs = [(key, tensor.dtype, tuple(tensor.shape)) for key, _, tensor in tensors]
    offsets = {key: begins for key, begins, _ in tensors}
    with storage.write(name) as file:
        file.write(_with_header_crc(encode_header(specs, {**_metadata(offsets, sums), **metadata})))
        for _, _, tensor in tensors:
            write_tensor(file, tensor)


def stream_shard(
    storage: Storage,
    name: str,
    specs: Sequence[TensorSpec],
    offsets: Mapping[str, Sequence[int]],
    tensors: Iterable[Tensor],
) -> None:
    """The same without holding more than one tensor: to a file that can be gone back in."""
    sums = {key: _crc32_hex(b"") for key, _, _ in specs}
    with storage.write(name) as file:
        file.write(encode_header(specs, _metadata(offsets, sums)))
        for (key, _, _), tensor in zip(specs, tensors, strict=True):
            view, crc = tensor_bytes(tensor), 0
            for start in range(0, len(view), WRITE_CHUNK_BYTES):  # it stays in the cache between the two
                crc = zlib.crc32(view[start : start + WRITE_CHUNK_BYTES], crc)
                file.write(view[start : start + WRITE_CHUNK_BYTES])
            sums[key] = f"{crc:08x}"
        file.seek(0)
        file.write(_with_header_crc(encode_header(specs, _metadata(offsets, sums))))


def _metadata(offsets: Mapping[str, Sequence[int]], checksums: Mapping[str, str]) -> dict[str, str]:
    return {
        "HEADER_CRC32": CRC_PLACEHOLDER,  # the first text, so that nothing before it can look the same
        "format": "pt",
        "DCP_VERSION": "1.0",
        "DCP_SHARDING_INFO": json.dumps({key: {"saved_offsets": list(begins)} for key, begins in offsets.items()}),
        "CRC32": json.dumps(checksums),
    }


def _crc32_hex(data: memoryview | bytes) -> str:
    """Always as long, so that a header's length does not depend on it."""
    return f"{zlib.crc32(data):08x}"


def _with_header_crc(header: bytes) -> bytes:
    """A header with its checksum in the place that is kept for it."""
    return header.replace(CRC_PLACEHOLDER.encode(), _crc32_hex(header).encode(), 1)


class ShardFile:
    """An open file of a checkpoint."""

    def __init__(self, file: RandomAccessFile, path: str) -> None:
        self.file, self.path = file, path
        try:
            self.entries, self.metadata = parse_header(file.read, file.size)
            begin = bytes(file.read(0, min((each.start for each in self.entries.values()), default=file.size)))
            own = self.metadata.get("HEADER_CRC32", "")
            if _with_header_crc(begin.replace(own.encode(), CRC_PLACEHOLDER.encode(), 1)) != begin:
                raise ValueError("the checksum of its header differs")
            self.checksums: dict[str, str] = json.loads(self.metadata.get("CRC32", "{}"))
        except EOFError:
            raise CorruptCheckpoint(f"{path}: broken: it ends too early") from None
        except (ValueError, TypeError, AttributeError) as error:
            raise CorruptCheckpoint(f"{path}: broken: {one_line(error)}") from None

    def read(self, key: str, bounds: Sequence[tuple[int, int]]) -> Tensor:
        """The box of a tensor that begins and ends at `region`, reading no byte outside it where that can be."""
        entry = self.entries[key]
        width = entry.dtype.itemsize
        rows, row = bounds[0], prod(entry.shape[1:]) * width
        sizes = [stop - start for start, stop in bounds]
        try:
            if all(stop - start == size for (start, stop), size in zip(bounds[1:], entry.shape[1:], strict=True)):
                data = self.file.read(entry.start + rows[0] * row, entry.start + rows[1] * row)
            else:
                assert len(bounds) == 2
                first, end = bounds[1]
                start = entry.start + rows[0] * row + first * width
                data = self.file.read_strided(start, (end - first) * width, row, sizes[0])
        except EOFError:
            raise CorruptCheckpoint(f"{self.path}: broken: it ends too early") from None
        return (
            torch.frombuffer(data, dtype=entry.dtype).view(sizes)
            if len(data)
            else torch.empty(sizes, dtype=entry.dtype)
        )

    def verify(self) -> None:
        """Read everything once, from front to back, and compare checksums."""
        end = max((entry.stop for entry in self.entries.values()), default=None)
        if end is not None and end != self.file.size:
            raise CorruptCheckpoint(f"{self.path}: broken: {self.file.size} bytes where its header says {end}")
        begin, block = 0, memoryview(b"")
        for key, entry in sorted(self.entries.items(), key=lambda each: each[1].start):
            at, crc = entry.start, 0
            while at < entry.stop:
                if at >= begin + len(block):
                    begin, block = at, self.file.read(at, min(at + VERIFY_CHUNK_BYTES, self.file.size))
                piece = block[at - begin : entry.stop - begin]
                crc = zlib.crc32(piece, crc)
                at += len(piece)
            if f"{crc:08x}" != self.checksums.get(key):
                raise CorruptCheckpoint(f"{self.path}: broken: the checksum of {key} differs")
