"""Reads the tensors of a torch.distributed.checkpoint (DCP) directory slice by slice.

    DIRECTORY/.metadata                  a pickle: the shape of each tensor, its chunks, and the bytes of each chunk
    DIRECTORY/__0_0.distcp ...           chunks, each in the format of torch.save

The pickle is interpreted as data. Objects of torch's and Megatron's classes become stubs, whose fields are collected;
nothing is imported or called.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainyard.checkpoint.io.lazy_tensor import check_sizes
from trainyard.checkpoint.io.pickle_allowlist import ALLOWED_GLOBALS, STATE_SETTERS
from trainyard.checkpoint.io.pickle_vm import StubObject, UnpickleRules, unpickle
from trainyard.checkpoint.io.torch_file import LazyTensor, open_torch_file
from trainyard.core.errors import UserError, one_line
from trainyard.core.tensor_slice import TensorIndex, TensorSlice

METADATA_FILE = ".metadata"
_MAX_OPCODES = 40_000_000
"""Maximum opcodes of the metadata. A chunk takes about 70, and 0.2 ms; 512 ranks have about 500,000 chunks."""
_DATA_ERRORS = ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RuntimeError, EOFError, MemoryError


@dataclass(frozen=True)
class DcpChunk:
    """A slice of a tensor, in a range of bytes of a file."""

    piece: TensorSlice
    dtype: torch.dtype
    path: Path
    span: tuple[int, int]

    @cached_property
    def tensor(self) -> LazyTensor:
        tensor = open_torch_file(self.path, span=self.span)
        if not isinstance(tensor, LazyTensor) or (tensor.shape, tensor.dtype) != (self.piece.sizes, self.dtype):
            expected = f"{list(self.piece.sizes)} of {self.dtype}"
            raise UserError(f"{self.path}: {self.piece.name} at byte {self.span[0]} is not {expected}")
        return tensor


class DcpTensor(LazyTensor):
    """A tensor that consists of chunks."""

    def __init__(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, chunks: list[DcpChunk]) -> None:
        self.name, self.shape, self.dtype, self.chunks = name, shape, dtype, chunks

    def check_complete(self) -> None:
        """Refuse a tensor whose chunks do not add up to it."""
        if (stored := sum(chunk.piece.numel for chunk in self.chunks)) != prod(self.shape):
            raise UserError(f"checkpoint is incomplete: {self.name} has {stored} of {prod(self.shape)} elements")

    def read(self, index: TensorIndex | None = None) -> Tensor:
        wanted = TensorSlice.full(self.name, self.shape)
        for dim, part in enumerate(index or ()):
            wanted = wanted.narrow(dim, part.start, part.stop)
        found = [(chunk, overlap) for chunk in self.chunks if (overlap := wanted.intersect(chunk.piece))]
        if len(found) == 1 and found[0][1] == wanted:
            chunk = found[0][0]
            return chunk.tensor.read(wanted.to_index(chunk.piece.offsets))
        if not _is_partition(wanted, [overlap for _, overlap in found]):
            raise UserError(f"checkpoint is incomplete: the chunks of {self.name} overlap or leave gaps")
        out = torch.empty(wanted.sizes, dtype=self.dtype)
        for chunk, overlap in found:
            out[overlap.to_index(wanted.offsets)] = chunk.tensor.read(overlap.to_index(chunk.piece.offsets))
        return out


def _is_partition(wanted: TensorSlice, pieces: list[TensorSlice]) -> bool:
    """True if every element of `wanted` is in exactly one of the pieces, which are parts of it."""
    split_dims = {dim for piece in pieces for dim, size in enumerate(piece.sizes) if size != wanted.sizes[dim]}
    if sum(piece.numel for piece in pieces) != wanted.numel:
        return False
    if len(split_dims) == 1:
        (dim,) = split_dims
        starts = sorted((piece.offsets[dim], piece.sizes[dim]) for piece in pieces)
        return all(start + size == stop for (start, size), (stop, _) in pairwise(starts))
    is_covered = torch.zeros(wanted.sizes, dtype=torch.bool)
    for piece in pieces:
        is_covered[piece.to_index(wanted.offsets)] = True
    return bool(is_covered.all())


def read_dcp_tensors(directory: Path) -> dict[str, DcpTensor]:
    """Every tensor of a directory by name. Nothing but the metadata is read yet."""
    path = directory / METADATA_FILE
    try:
        return _parse(directory, *_unpickle(path))
    except UserError:
        raise
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or one_line(error)}") from None
    except _DATA_ERRORS as error:
        reason = ascii(one_line(error))[1:-1][:200] or type(error).__name__
        raise UserError(f"{path}: corrupt, or not of torch.distributed.checkpoint: {reason}") from None


Fields = Mapping[StubObject, Any]
"""The state of each object of a pickle."""


def _unpickle(path: Path) -> tuple[Any, Fields]:
    """The object in a pickle and the fields of all objects in it."""
    fields: dict[StubObject, Any] = {}

    def find_global(module: str, name: str) -> Any:
        full_name = f"{module}.{name}"
        return ALLOWED_GLOBALS[full_name] if full_name in ALLOWED_GLOBALS else StubObject(full_name)

    def no_storage(persistent_id: Any) -> Any:
        raise ValueError("tensors in the metadata")

    setters = {**STATE_SETTERS, StubObject: fields.__setitem__}
    rules = UnpickleRules(find_global, setters, no_storage, _MAX_OPCODES)
    with path.open("rb") as file:
        return unpickle(file, rules), fields


def _parse(directory: Path, metadata: Any, fields: Fields) -> dict[str, DcpTensor]:
    state = fields[metadata]
    places = {}
    for key, info in state["storage_data"].items():
        index = fields[key]
        if (offset := index.get("offset")) is not None:  # other objects than tensors have no offset
            places[index["fqn"], check_sizes(offset)] = fields[info]
    out = {}
    for name, entry in state["state_dict_metadata"].items():
        description = fields.get(entry) or {}
        if "chunks" in description:
            out[name] = _parse_tensor(directory, name, description, fields, places)
    return out


def _parse_tensor(directory: Path, name: Any, description: Any, fields: Fields, places: Mapping[Any, Any]) -> DcpTensor:
    shape, dtype = check_sizes(description["size"]), fields[description["properties"]][0]
    if type(name) is not str or not isinstance(dtype, torch.dtype):
        raise ValueError("tensor without name or dtype")
    chunks: dict[tuple[int, ...], DcpChunk] = {}
    for stub in description["chunks"]:
        offsets, sizes = (check_sizes(fields[stub][key]) for key in ("offsets", "sizes"))
        bounds = zip(offsets, sizes, shape, strict=True)
        if any(offset + size > full for offset, size, full in bounds):
            raise ValueError(f"a chunk exceeds {name}")
        place = places[name, offsets]
        start, length = check_sizes((place["offset"], place["length"]))
        file = place["relative_path"]
        if type(file) is not str or Path(file).name != file or file in ("", ".", ".."):
            raise ValueError(f"{file!r} is not the name of a file in the same directory")
        if place.get("transform_descriptors"):
            raise UserError(f"{directory / file}: compressed or transformed; save it without extensions")
        piece = TensorSlice(name, shape, offsets, sizes)
        chunks.setdefault(offsets, DcpChunk(piece, dtype, directory / file, (start, start + length)))
    return DcpTensor(name, shape, dtype, list(chunks.values()))
