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

from trainyard.checkpoint.io.safetensors_file import Spec, as_bytes, header, parse, write_tensor
from trainyard.checkpoint.io.storage import Place, Readable
from trainyard.core.errors import UserError, one_line

BLOCK = 2**24
"""Bytes checked at a time."""
CHUNK = 2**22
"""Bytes summed up and written at a time."""
NOTHING = "0" * 8
"""Stands in a header where its own checksum belongs, while that is made."""


class Broken(UserError):
    """A file that is not what was written."""


def write_shard(
    place: Place, name: str, tensors: Sequence[tuple[str, Sequence[int], Tensor]], extra: Mapping[str, str]
) -> None:
    """Write (name, offsets, contiguous host tensor) of each, and `extra` in the header."""
    sums = {key: _sum(as_bytes(tensor)) for key, _, tensor in tensors}
    specs = [(key, tensor.dtype, tuple(tensor.shape)) for key, _, tensor in tensors]
    offsets = {key: begins for key, begins, _ in tensors}
    with place.write(name) as file:
        file.write(_signed(header(specs, {**_texts(offsets, sums), **extra})))
        for _, _, tensor in tensors:
            write_tensor(file, tensor)


def stream_shard(
    place: Place, name: str, specs: Sequence[Spec], offsets: Mapping[str, Sequence[int]], tensors: Iterable[Tensor]
) -> None:
    """The same without holding more than one tensor: to a file that can be gone back in."""
    sums = {key: _sum(b"") for key, _, _ in specs}
    with place.write(name) as file:
        file.write(header(specs, _texts(offsets, sums)))
        for (key, _, _), tensor in zip(specs, tensors, strict=True):
            view, crc = as_bytes(tensor), 0
            for start in range(0, len(view), CHUNK):  # it stays in the cache between the two
                crc = zlib.crc32(view[start : start + CHUNK], crc)
                file.write(view[start : start + CHUNK])
            sums[key] = f"{crc:08x}"
        file.seek(0)
        file.write(_signed(header(specs, _texts(offsets, sums))))


def _texts(offsets: Mapping[str, Sequence[int]], sums: Mapping[str, str]) -> dict[str, str]:
    return {
        "HEADER_CRC32": NOTHING,  # the first text, so that nothing before it can look the same
        "format": "pt",
        "DCP_VERSION": "1.0",
        "DCP_SHARDING_INFO": json.dumps({key: {"saved_offsets": list(begins)} for key, begins in offsets.items()}),
        "CRC32": json.dumps(sums),
    }


def _sum(data: memoryview | bytes) -> str:
    """Always as long, so that a header's length does not depend on it."""
    return f"{zlib.crc32(data):08x}"


def _signed(begin: bytes) -> bytes:
    """A header with its checksum in the place that is kept for it."""
    return begin.replace(NOTHING.encode(), _sum(begin).encode(), 1)


class Shard:
    """An open file of a checkpoint."""

    def __init__(self, file: Readable, where: str) -> None:
        self.file, self.where = file, where
        try:
            self.entries, self.extra = parse(file.read, file.size)
            begin = bytes(file.read(0, min((each.start for each in self.entries.values()), default=file.size)))
            own = self.extra.get("HEADER_CRC32", "")
            if _signed(begin.replace(own.encode(), NOTHING.encode(), 1)) != begin:
                raise ValueError("the checksum of its header differs")
            self.sums: dict[str, str] = json.loads(self.extra.get("CRC32", "{}"))
        except EOFError:
            raise Broken(f"{where}: broken: it ends too early") from None
        except (ValueError, TypeError, AttributeError) as error:
            raise Broken(f"{where}: broken: {one_line(error)}") from None

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
        return (
            torch.frombuffer(data, dtype=entry.dtype).view(sizes)
            if len(data)
            else torch.empty(sizes, dtype=entry.dtype)
        )

    def check(self) -> None:
        """Read everything once, from front to back, and compare checksums."""
        end = max((entry.stop for entry in self.entries.values()), default=None)
        if end is not None and end != self.file.size:
            raise Broken(f"{self.where}: broken: {self.file.size} bytes where its header says {end}")
        begin, block = 0, memoryview(b"")
        for key, entry in sorted(self.entries.items(), key=lambda each: each[1].start):
            at, crc = entry.start, 0
            while at < entry.stop:
                if at >= begin + len(block):
                    begin, block = at, self.file.read(at, min(at + BLOCK, self.file.size))
                piece = block[at - begin : entry.stop - begin]
                crc = zlib.crc32(piece, crc)
                at += len(piece)
            if f"{crc:08x}" != self.sums.get(key):
                raise Broken(f"{self.where}: broken: the checksum of {key} differs")
