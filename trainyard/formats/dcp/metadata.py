"""Reads the tensors of a torch.distributed.checkpoint (DCP) directory slice by slice.

    DIRECTORY/.metadata                  a pickle: the shape of each tensor, its chunks, and the bytes of each chunk
    DIRECTORY/__0_0.distcp ...           chunks, each in the format of torch.save

The pickle is interpreted as data. Objects of torch's and Megatron's classes become stubs, whose fields are collected;
nothing is imported or called.
"""

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainyard.core.errors import UserError
from trainyard.core.tensor_slice import TensorIndex, TensorSlice
from trainyard.formats.io.lazy_tensor import AssembledTensor, LazyTensor, check_sizes
from trainyard.formats.io.pickle_allowlist import ALLOWED_GLOBALS, STATE_SETTERS
from trainyard.formats.io.pickle_vm import StubObject, UnpickleRules, unpickle
from trainyard.formats.io.torch_file import one_line_errors, open_torch_file

METADATA_FILE = ".metadata"
_MAX_OPCODES = 40_000_000
"""Maximum opcodes of the metadata. A chunk takes about 70, and 0.2 ms; 512 ranks have about 500,000 chunks."""


class ChunkTensor(LazyTensor):
    """A slice of a tensor, in a range of bytes of a file."""

    def __init__(self, piece: TensorSlice, dtype: torch.dtype, path: Path, span: tuple[int, int]) -> None:
        self.name, self.shape, self.dtype, self.path, self.span = piece.name, piece.sizes, dtype, path, span

    def read_slice(self, index: TensorIndex) -> Tensor:
        return self._tensor.read(index)

    @cached_property
    def _tensor(self) -> LazyTensor:
        tensor = open_torch_file(self.path, span=self.span)
        if not isinstance(tensor, LazyTensor) or (tensor.shape, tensor.dtype) != (self.shape, self.dtype):
            expected = f"{list(self.shape)} of {self.dtype}"
            raise UserError(f"{self.path}: {self.name} at byte {self.span[0]} is not {expected}")
        return tensor


def read_dcp_tensors(directory: Path) -> dict[str, AssembledTensor]:
    """Every tensor of a directory by name. Nothing but the metadata is read yet."""
    path = directory / METADATA_FILE
    with one_line_errors(path, "of torch.distributed.checkpoint"):
        return _parse(directory, *_unpickle(path))


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


def _parse(directory: Path, metadata: Any, fields: Fields) -> dict[str, AssembledTensor]:
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


def _parse_tensor(
    directory: Path, name: Any, description: Any, fields: Fields, places: Mapping[Any, Any]
) -> AssembledTensor:
    shape, dtype = check_sizes(description["size"]), fields[description["properties"]][0]
    if type(name) is not str or not isinstance(dtype, torch.dtype):
        raise ValueError("tensor without name or dtype")
    chunks: dict[tuple[int, ...], tuple[TensorSlice, LazyTensor]] = {}
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
        chunk = ChunkTensor(piece, dtype, directory / file, (start, start + length))
        chunks.setdefault(offsets, (piece, chunk))
    return AssembledTensor(name, shape, dtype, list(chunks.values()))
