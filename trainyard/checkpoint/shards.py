"""One rank's file of a checkpoint: safetensors, as torch.distributed.checkpoint writes it in pieces.

A tensor's name is that of the whole; where its box begins is in the header (`DCP_SHARDING_INFO`), so that torch's own
HuggingFaceStorageReader puts the pieces together too. Beside it stands a checksum of every tensor.
"""

import json
import struct
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from trainyard.checkpoint.places import Place, Readable
from trainyard.errors import UserError

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "U8": torch.uint8,
}
CODES = {dtype: code for code, dtype in DTYPES.items()}
LARGEST_HEADER = 100_000_000
BLOCK = 2**24
"""Bytes written, or checked, at a time."""


class Broken(UserError):
    """A file that is not what was written."""


@dataclass(frozen=True)
class Entry:
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    """First byte in the file."""
    stop: int
    crc: int | None


def write_shard(
    place: Place, name: str, tensors: Sequence[tuple[str, Sequence[int], Tensor]], extra: Mapping[str, str]
) -> None:
    """Write (name, offsets, contiguous host tensor) of each, and `extra` in the header."""
    at = 0
    header: dict[str, Any] = {}
    sums: dict[str, int] = {}
    views = []
    for key, _, tensor in tensors:
        view = as_bytes(tensor)
        views.append(view)
        header[key] = {
            "dtype": CODES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [at, at + len(view)],
        }
        sums[key] = zlib.crc32(view)
        at += len(view)
    header["__metadata__"] = {
        "format": "pt",
        "DCP_VERSION": "1.0",
        "DCP_SHARDING_INFO": json.dumps({key: {"saved_offsets": list(offsets)} for key, offsets, _ in tensors}),
        "CRC32": json.dumps(sums),
        **extra,
    }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with place.write(name) as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for view in views:
            for start in range(0, len(view), BLOCK):
                file.write(view[start : start + BLOCK])


def as_bytes(tensor: Tensor) -> memoryview:
    """The memory of a contiguous host tensor."""
    return memoryview(tensor.detach().reshape(-1).view(torch.uint8).numpy().data)


class Shard:
    """An open file of a checkpoint."""

    def __init__(self, file: Readable, where: str) -> None:
        self.file, self.where = file, where
        try:
            (length,) = struct.unpack("<Q", file.read(0, 8))
            if length > min(LARGEST_HEADER, file.size - 8):
                raise ValueError("its header is longer than the file")
            header = json.loads(bytes(file.read(8, 8 + length)))
            self.extra: dict[str, str] = header.pop("__metadata__", {})
            sums = json.loads(self.extra.get("CRC32", "{}"))
            self.entries = {key: self._entry(value, 8 + length, sums.get(key)) for key, value in header.items()}
        except (ValueError, KeyError, TypeError, AttributeError, EOFError) as error:
            raise Broken(f"{where}: broken: {_why(error)}") from None

    def read(self, key: str, region: Sequence[tuple[int, int]]) -> Tensor:
        """The box of a tensor that begins and ends at `region`, reading no byte outside it where that can be."""
        entry = self.entries[key]
        width = entry.dtype.itemsize
        rows, row = region[0], prod(entry.shape[1:]) * width
        sizes = [stop - start for start, stop in region]
        try:
            if all(stop - start == size for (start, stop), size in zip(region[1:], entry.shape[1:], strict=True)):
                data = self.file.read(entry.start + rows[0] * row, entry.start + rows[1] * row)
            else:
                assert len(region) == 2
                first, end = region[1]
                start = entry.start + rows[0] * row + first * width
                data = self.file.strips(start, (end - first) * width, row, sizes[0])
        except EOFError:
            raise Broken(f"{self.where}: broken: it ends too early") from None
        return torch.frombuffer(data, dtype=entry.dtype).view(sizes) if len(data) else torch.empty(sizes)

    def check(self) -> None:
        """Read everything once and compare checksums."""
        end = max((entry.stop for entry in self.entries.values()), default=None)
        if end is not None and end != self.file.size:
            raise Broken(f"{self.where}: broken: {self.file.size} bytes where its header says {end}")
        for key, entry in self.entries.items():
            crc = 0
            for start in range(entry.start, entry.stop, BLOCK):
                crc = zlib.crc32(self.file.read(start, min(start + BLOCK, entry.stop)), crc)
            if crc != entry.crc:
                raise Broken(f"{self.where}: broken: the checksum of {key} differs")

    def _entry(self, value: Any, begin: int, crc: int | None) -> Entry:
        start, stop = value["data_offsets"]
        dtype, shape = DTYPES[value["dtype"]], tuple(value["shape"])
        if not (0 <= start <= stop and stop - start == prod(shape) * dtype.itemsize):
            raise ValueError("a tensor's size is not that of its bytes")
        if begin + stop > self.file.size:
            raise EOFError
        return Entry(dtype, shape, begin + start, begin + stop, crc)


def total_bytes(tensors: Iterable[tuple[int, torch.dtype]]) -> int:
    """Bytes of so many elements of each dtype."""
    return sum(count * dtype.itemsize for count, dtype in tensors)


def _why(error: Exception) -> str:
    return "it ends too early" if isinstance(error, EOFError) else " ".join(str(error).split()) or "no header"
