"""Reads the headers of safetensors files and writes such files one tensor at a time.

The safetensors library reads into newly allocated memory and writes from a dict of all tensors. Here, a tensor is read
where its header says, and a file larger than memory can be written. The header of a file written here has a checksum
of every tensor and one of itself, so that every changed bit is detected. Other readers ignore them.
"""

import json
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor

DTYPE_BY_CODE = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
CODE_BY_DTYPE = {dtype: code for code, dtype in DTYPE_BY_CODE.items()}
MAX_HEADER_BYTES = 100_000_000
WRITE_CHUNK_BYTES = 2**22
CRC_PLACEHOLDER = "0" * 8
"""Stands for the header's checksum while that is computed."""


class TensorSpec(NamedTuple):
    """A tensor to be written."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class TensorEntry:
    """A tensor at bytes [start, stop) of a file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    stop: int


def encode_header(tensors: Sequence[TensorSpec], metadata: Mapping[str, str]) -> bytes:
    """The header of a file that holds these tensors one after the other."""
    offset = 0
    table: dict[str, Any] = {"__metadata__": dict(metadata)}
    for spec in tensors:
        end = offset + spec.nbytes
        table[spec.name] = {"dtype": CODE_BY_DTYPE[spec.dtype], "shape": spec.shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def encode_checked_header(
    tensors: Sequence[TensorSpec], checksums: Mapping[str, int], metadata: Mapping[str, str] | None
) -> bytes:
    """A header with the checksums of the tensors and its own. Its length does not depend on them."""
    crcs = json.dumps({spec.name: f"{checksums[spec.name]:08x}" for spec in tensors})
    # HEADER_CRC32 is first, so that no earlier text can equal the placeholder
    own = {"HEADER_CRC32": CRC_PLACEHOLDER, "format": "pt", "CRC32": crcs}
    return _with_header_crc(encode_header(tensors, {**own, **(metadata or {})}))


def _with_header_crc(header: bytes) -> bytes:
    """Replace the placeholder in a header by the header's checksum."""
    return header.replace(CRC_PLACEHOLDER.encode(), f"{zlib.crc32(header):08x}".encode(), 1)


def read_checksums(header: bytes, metadata: Mapping[str, str]) -> dict[str, str]:
    """The checksums of the tensors in a header. Raises ValueError if the header has changed or has none."""
    crc = metadata.get("HEADER_CRC32", "")
    if _with_header_crc(header.replace(crc.encode(), CRC_PLACEHOLDER.encode(), 1)) != header:
        raise ValueError("the checksum of its header differs")
    try:
        checksums = json.loads(metadata.get("CRC32", "{}"))
    except RecursionError:
        checksums = None
    if not isinstance(checksums, dict):
        raise ValueError("its checksums are not a table")
    return checksums


def parse_header(read: Callable[[int, int], Any], size: int) -> tuple[dict[str, TensorEntry], dict[str, str]]:
    """The tensors of a file of `size` bytes and its metadata. Raises ValueError or EOFError if the file is invalid.

    As strict as the safetensors library: no duplicate names, and tensors fill the file without gaps or overlaps.
    """
    (length,) = struct.unpack("<Q", bytes(read(0, 8))) if size >= 8 else (size,)
    if length > min(MAX_HEADER_BYTES, size - 8):
        raise EOFError
    data_start = 8 + length
    entries: dict[str, TensorEntry] = {}
    try:
        text = bytes(read(8, data_start)).decode()
        table = json.loads(text, object_pairs_hook=_unique_names, parse_constant=_refuse_constant, parse_int=_parse_int)
        metadata = {} if table.get("__metadata__") is None else table["__metadata__"]
        if not all(isinstance(value, str) for value in metadata.values()):
            raise TypeError("metadata is not text")
        table.pop("__metadata__", None)
        for name, value in table.items():
            start, stop = value["data_offsets"]
            dtype, shape = DTYPE_BY_CODE[value["dtype"]], tuple(value["shape"])
            is_valid = all(type(number) is int and 0 <= number < 2**63 for number in (start, stop, *shape))
            if not is_valid or start > stop or prod(filter(None, shape)) >= 2**63:
                raise ValueError(f"{name} has an invalid shape or invalid offsets")
            if stop - start != prod(shape) * dtype.itemsize:
                raise ValueError(f"the shape of {name} does not match its number of bytes")
            if data_start + stop > size:
                raise EOFError
            entries[name] = TensorEntry(dtype, shape, data_start + start, data_start + stop)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"its header is not a table of tensors ({error})") from None
    except RecursionError:
        raise ValueError("its header is not a table of tensors") from None
    end = data_start
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].stop)):
        if entry.start != end:
            raise ValueError(f"{name} begins at byte {entry.start} instead of {end}, after the tensor before it")
        end = entry.stop
    if end != size:
        raise ValueError(f"{size - end} bytes follow the last tensor")
    return entries, metadata


def _unique_names(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object whose names are all different and valid Unicode."""
    out: dict[str, Any] = {}
    for name, value in pairs:
        if name in out:
            raise ValueError(f"its header names {name} twice")
        out[name] = value
        name.encode()  # fails for half of a surrogate pair
    return out


def _parse_int(text: str) -> float:
    return float(text) if text == "-0" else int(text)


def _refuse_constant(name: str) -> None:
    raise ValueError(f"its header is not JSON: {name}")


def stream_tensors(
    file: BinaryIO, specs: Sequence[TensorSpec], tensors: Iterable[Tensor], metadata: Mapping[str, str] | None = None
) -> None:
    """Write a file with checksums, with one tensor in memory at a time. The file must be seekable."""
    checksums = {spec.name: 0 for spec in specs}
    file.write(encode_checked_header(specs, checksums, metadata))
    for spec, tensor in zip(specs, tensors, strict=True):
        for chunk in chunks(tensor_bytes(tensor)):
            checksums[spec.name] = zlib.crc32(chunk, checksums[spec.name])
            file.write(chunk)
    file.seek(0)
    file.write(encode_checked_header(specs, checksums, metadata))


def write_tensor(file: BinaryIO, tensor: Tensor) -> int:
    """Write the bytes of a tensor, without a copy if it is contiguous. Returns their number."""
    for chunk in chunks(tensor_bytes(tensor)):
        file.write(chunk)
    return tensor.nbytes


def chunks(data: memoryview) -> Iterator[memoryview]:
    """Parts of bytes that are checksummed and written at a time: small enough to stay in the CPU cache."""
    return (data[start : start + WRITE_CHUNK_BYTES] for start in range(0, data.nbytes, WRITE_CHUNK_BYTES))


def tensor_bytes(tensor: Tensor) -> memoryview:
    """The bytes of a host tensor: its memory if it is contiguous, else a copy."""
    flat = tensor.detach().reshape(-1)
    return memoryview(flat.view(torch.uint8).numpy().data)
