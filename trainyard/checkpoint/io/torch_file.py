"""Files of torch.save, opened safely and lazily: today's zip format, the format before torch 1.6, and xser.

A checkpoint from somewhere else is a pickle, and a pickle is a program. `pickles_machine` reads it as data: only the
names in `pickles_names` mean anything, and everything else is refused by name before anything happens. Tensors are not
read but described (`pickles_tensors`), so that a converter can go through files that are greater than memory.

xser: a checkpoint saved through torch-xla has references instead of tensors, each to PATH.tensors/tensor_<tid>.pt.
"""

import io
import mmap
import os
import struct
import sys
import zipfile
import zlib
from collections.abc import Callable
from functools import cached_property, partial
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch import Tensor

from trainyard.checkpoint.io.lazy_tensor import LazyTensor, MappedFile, TensorStorage, check_sizes
from trainyard.checkpoint.io.pickle_allowlist import ALLOWED_GLOBALS, REFERENCE_CLASSES, STATE_SETTERS, StorageType
from trainyard.checkpoint.io.pickle_limits import AllowedGlobal, StubObject
from trainyard.checkpoint.io.pickle_vm import UnpickleRules, unpickle
from trainyard.core.errors import UserError, one_line
from trainyard.core.tensor_slice import TensorIndex

__all__ = ["LazyTensor", "StubObject", "open_torch_file"]

_MAX_PICKLE_BYTES = 2**30
"""Bytes of a pickle."""
_MAX_DIRECTORY_BYTES = 2**26
"""Bytes of a zip file's directory; a storage takes about a hundred."""
_MAGIC = 0x1950A86A20F9469CFC6C
_CORRUPTION_ERRORS = (
    ValueError,
    LookupError,
    TypeError,
    ArithmeticError,
    RuntimeError,
    EOFError,
    MemoryError,
    AttributeError,
)
_ZIP_ERRORS = (zipfile.BadZipFile, struct.error, zlib.error)


def open_torch_file(path: Path, *, allow_stubs: bool = False) -> Any:
    """The object in the file, with a Lazy for each tensor.

    Containers are plain ones (an OrderedDict or argparse's Namespace is a dict), numpy scalars are plain numbers.
    A class or function that is not known is refused. With `inert` it is replaced by an Inert with its name: for files
    that have foreign objects beside the weights, such as Megatron's arguments. Nothing foreign runs either way.
    """
    try:
        file = MappedFile(path)
        with _CappedFile(path) as stream:
            read = _read_zip if stream.read(4) == b"PK\3\4" else _read_legacy
            return read(file, stream, partial(_find_global, path, _ReferenceFiles(path), allow_stubs))
    except UserError:
        raise
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or one_line(error)}") from None
    except (*_CORRUPTION_ERRORS, *_ZIP_ERRORS) as error:
        said = ascii(one_line(error))[1:-1][:200] or type(error).__name__
        raise UserError(f"{path}: damaged, or not a file of torch.save: {said}") from None


FindGlobal = Callable[[str, str], Any]


def _find_global(path: Path, references: "_ReferenceFiles", allow_stubs: bool, module: str, name: str) -> Any:
    full = f"{'builtins' if module == '__builtin__' else module}.{name}"
    if full in REFERENCE_CLASSES:
        return AllowedGlobal(full, lambda: _ReferencedTensor(references))
    if full in ALLOWED_GLOBALS:
        return ALLOWED_GLOBALS[full]
    shown = ascii(full)[1:-1][:200]
    if allow_stubs:
        return StubObject(shown)
    raise UserError(
        f"{path}: refuses to load {shown}: not a tensor, a number, a string or a container of these;"
        " save the weights alone, as a dict of tensors"
    )


class _CappedFile(io.FileIO):
    """A file that gives no more at once than its directory may have, whatever lengths it claims."""

    def read(self, size: int | None = -1, /) -> bytes:
        if size is None or size < 0:
            size = os.fstat(self.fileno()).st_size - self.tell()
        if size > _MAX_DIRECTORY_BYTES:
            raise ValueError(f"a directory of {size} bytes")
        return super().read(size)


def _read_zip(file: MappedFile, stream: _CappedFile, find_global: FindGlobal) -> Any:
    """Records, stored as they are, in a folder: data.pkl, byteorder, and data/<key> for each storage."""
    with zipfile.ZipFile(stream) as archive:
        records = {record.filename: record for record in archive.infolist()}
    folder = next(iter(records), "").split("/")[0]
    if f"{folder}/data.pkl" not in records or f"{folder}/constants.pkl" in records:
        raise UserError(f"{file.path}: a zip file, but not of torch.save; TorchScript and other archives are not read")

    def locate(name: str) -> tuple[int, int]:
        record = records[f"{folder}/{name}"]
        if record.compress_type != zipfile.ZIP_STORED or record.flag_bits & 1:
            raise ValueError(f"record {name!a:.100} is compressed or encrypted")
        stream.seek(record.header_offset)
        mark, name_length, extra_length = struct.unpack("<4s22xHH", stream.read(30))
        called, extra = stream.read(name_length), stream.read(extra_length)
        at = 0
        while at + 4 <= extra_length:  # fields of a kind, a length and themselves fill the header up to the data
            at += 4 + int.from_bytes(extra[at + 2 : at + 4], "little")
        there = (mark, called, at) == (b"PK\3\4", record.orig_filename.encode(), extra_length)
        if not there or stream.tell() + record.file_size > file.size:
            raise ValueError(f"record {name!a:.100} is not where it should be")
        return stream.tell(), record.file_size

    def content(name: str) -> bytes:
        start, size = locate(name)
        if size > _MAX_PICKLE_BYTES:
            raise ValueError(f"record {name} has {size} bytes; at most {_MAX_PICKLE_BYTES} are read")
        data = os.pread(stream.fileno(), size, start)
        if (crc := records[f"{folder}/{name}"].CRC) and crc != zlib.crc32(data):  # 0 where torch was told to make none
            raise ValueError(f"record {name} has another checksum")
        return data

    order = content("byteorder") if f"{folder}/byteorder" in records else b"little"
    if order not in (b"little", b"big"):
        raise ValueError("an unknown byte order")

    def storage(name: Any) -> TensorStorage:
        tag, kind, place, _, count = name
        if tag != "storage" or not isinstance(kind, StorageType) or not isinstance(place, str):
            raise ValueError("a storage that is none")
        start, size = locate(f"data/{place}")
        (count,) = check_sizes((count,))
        if count * kind.dtype.itemsize > size:
            raise ValueError(f"a storage of {count} elements in a record of {size} bytes")
        return TensorStorage(file, kind.dtype, count, start, order.decode() != sys.byteorder)

    return unpickle(io.BytesIO(content("data.pkl")), UnpickleRules(find_global, _STATE_SETTERS, storage))


def _read_legacy(file: MappedFile, stream: _CappedFile, find_global: FindGlobal) -> Any:
    """Pickles one after the other (a magic number, a version, facts about the machine, the object, the keys of the
    storages), then the storages, each with its number of elements before it."""
    storages: dict[str, list[TensorStorage]] = {}

    def storage(name: Any) -> TensorStorage:
        tag, kind, place, _, count, view = name
        if tag != "storage" or not isinstance(kind, StorageType) or not isinstance(place, str) or view is not None:
            raise ValueError("a storage that is none")
        (count,) = check_sizes((count,))
        made = TensorStorage(file, kind.dtype, count, 0, sys.byteorder != "little")
        storages.setdefault(place, []).append(made)
        return made

    language = UnpickleRules(find_global, _STATE_SETTERS, storage)
    with mmap.mmap(stream.fileno(), min(file.size, _MAX_PICKLE_BYTES), access=mmap.ACCESS_READ) as mapped:
        front = cast(IO[bytes], mapped)
        if unpickle(front, language) != _MAGIC or unpickle(front, language) != 1001:
            raise ValueError("no magic number")
        if unpickle(front, language).get("little_endian") is not True:
            raise UserError(f"{file.path}: written by a big-endian machine, in the format before torch 1.6")
        value, places = unpickle(front, language), unpickle(front, language)
        at = front.tell()
    if type(places) is not list or not all(type(place) is str for place in places):
        raise ValueError("storages without keys")
    for place in places:
        stream.seek(at)
        (count,) = struct.unpack("<q", stream.read(8))
        for each in storages[place]:
            if each.numel != count:
                raise ValueError(f"a storage of {count} elements where {each.numel} were expected")
            each.start = at + 8
        at += 8 + count * storages.pop(place)[0].dtype.itemsize
        if at > file.size:
            raise ValueError("a storage goes beyond the end")
    if storages:
        raise ValueError("storages are missing")
    return value


class _ReferenceFiles:
    """The tensors beside a file of references."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def tensor_path(self, tid: int) -> Path:
        return Path(f"{self._path}.tensors") / f"tensor_{tid}.pt"

    @cached_property
    def info(self) -> dict[Any, Any]:
        """Shape and dtype of each tensor, by tid. NxD up to 0.6.0 wrote none."""
        path = Path(f"{self._path}.info.pt")
        info = open_torch_file(path) if path.is_file() else {}
        if not isinstance(info, dict):
            raise UserError(f"{path}: a dict of shapes and dtypes was expected")
        return info


class _ReferencedTensor(LazyTensor):
    """A tensor in a file of its own, which is opened when it is read, or when nothing else tells its shape."""

    def __init__(self, references: _ReferenceFiles) -> None:
        self._references = references
        self._state: dict[Any, Any] = {}

    def set_state(self, state: Any) -> None:
        self._state = state
        if type(state) is not dict or type(state.get("tid")) is not int or state["tid"] < 0:
            raise ValueError("a reference to no tensor")

    @property
    def shape(self) -> tuple[int, ...]:
        return self._expected[0]

    @property
    def dtype(self) -> torch.dtype:
        return self._expected[1]

    def read(self, index: TensorIndex | None = None) -> Tensor:
        if (self._tensor.shape, self._tensor.dtype) != self._expected:
            raise UserError(
                f"{self._references.tensor_path(self._state['tid'])}: {list(self._tensor.shape)} of {self._tensor.dtype},"
                f" where its reference says {list(self.shape)} of {self.dtype}"
            )
        return self._tensor.read(index)

    @cached_property
    def _expected(self) -> tuple[tuple[int, ...], torch.dtype]:
        for said in (self._state, self._references.info.get(self._state["tid"])):
            if (
                isinstance(said, dict)
                and isinstance(said.get("dtype"), torch.dtype)
                and type(said.get("shape")) is torch.Size
            ):
                return tuple(said["shape"]), said["dtype"]
        return self._tensor.shape, self._tensor.dtype

    @cached_property
    def _tensor(self) -> LazyTensor:
        path = self._references.tensor_path(self._state["tid"])
        tensor = open_torch_file(path)
        if not isinstance(tensor, LazyTensor) or isinstance(tensor, _ReferencedTensor):
            raise UserError(f"{path}: a tensor was expected")
        return tensor


_STATE_SETTERS = {**STATE_SETTERS, _ReferencedTensor: _ReferencedTensor.set_state}
