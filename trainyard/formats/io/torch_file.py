"""Opens files of torch.save safely and lazily: the zip format, the format before torch 1.6, and xser.

A foreign checkpoint is a pickle, and a pickle is a program. `pickle_vm` interprets it as data: only the globals in
`pickle_allowlist` have a meaning, and any other is refused by name before anything else happens. Tensors are not read
but described (`lazy_tensor`), so that files larger than memory can be converted.

xser: a checkpoint saved through torch-xla has references instead of tensors, each to PATH.tensors/tensor_<tid>.pt.
"""

import io
import mmap
import os
import struct
import sys
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, cached_property, partial
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch import Tensor

from trainyard.core.errors import UserError, one_line
from trainyard.core.tensor_slice import TensorIndex
from trainyard.formats.io.lazy_tensor import LazyTensor, MappedFile, TensorStorage, check_sizes
from trainyard.formats.io.pickle_allowlist import ALLOWED_GLOBALS, REFERENCE_CLASSES, STATE_SETTERS, StorageType
from trainyard.formats.io.pickle_vm import AllowedGlobal, StubObject, UnpickleRules, unpickle

_MAX_PICKLE_BYTES = 2**30
"""Maximum size of a pickle."""
_MAX_DIRECTORY_BYTES = 2**26
"""Maximum size of the directory of a zip file; a storage takes about 100 bytes."""
_MAGIC = 0x1950A86A20F9469CFC6C
_DATA_ERRORS = ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RuntimeError, EOFError, MemoryError
_ZIP_ERRORS = zipfile.BadZipFile, struct.error, zlib.error


def open_torch_file(path: Path, *, allow_stubs: bool = False, span: tuple[int, int] | None = None) -> Any:
    """Return the object in the file, with a LazyTensor for each tensor.

    `span` is the range of bytes [start, stop) of the file if `path` holds several, one after the other.

    Containers become plain ones (an OrderedDict or argparse's Namespace is a dict), numpy scalars plain numbers.
    An unknown class or function is refused. With `allow_stubs`, it becomes a StubObject with its name: for files that
    also hold foreign objects, such as Megatron's arguments. Foreign code never runs.
    """
    with one_line_errors(path, "a file of torch.save"):
        file = MappedFile(path)
        with _CappedFile(path, span) as stream:
            is_zip = stream.read(4) == b"PK\3\4"
            if span and (not is_zip or span[1] > file.size):
                raise ValueError(f"bytes {span[0]} to {span[1]} are not one")
            read = _read_zip if is_zip else _read_legacy
            return read(file, stream, partial(_find_global, path, cache(partial(_tensor_info, path)), allow_stubs))


@contextmanager
def one_line_errors(path: Path, kind: str) -> Iterator[None]:
    """Report in one line any error that a corrupt or hostile file causes, which should have been `kind`."""
    try:
        yield
    except UserError:
        raise
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or one_line(error)}") from None
    except (*_DATA_ERRORS, *_ZIP_ERRORS) as error:
        reason = ascii(one_line(error))[1:-1][:200] or type(error).__name__
        raise UserError(f"{path}: corrupt, or not {kind}: {reason}") from None


def named_tensors(state: Any) -> dict[str, LazyTensor]:
    """The tensors of a dict by name, without its other entries; empty if `state` is not a dict."""
    items = state.items() if isinstance(state, dict) else ()
    return {name: tensor for name, tensor in items if isinstance(name, str) and isinstance(tensor, LazyTensor)}


FindGlobal = Callable[[str, str], Any]
TensorInfo = Callable[[], dict[Any, Any]]


def _find_global(path: Path, info: TensorInfo, allow_stubs: bool, module: str, name: str) -> Any:
    full_name = f"{'builtins' if module == '__builtin__' else module}.{name}"
    if full_name in REFERENCE_CLASSES:
        return AllowedGlobal(full_name, lambda: _ReferencedTensor(path, info))
    if full_name in ALLOWED_GLOBALS:
        return ALLOWED_GLOBALS[full_name]
    shown = ascii(full_name)[1:-1][:200]
    if allow_stubs:
        return StubObject(shown)
    raise UserError(
        f"{path}: refusing to load {shown}: not a tensor, number, string or container of these;"
        " save only the weights, as a dict of tensors"
    )


class _CappedFile(io.FileIO):
    """A file, or a range of bytes of it, whose reads are limited to the maximum size of a zip directory, whatever
    lengths the file claims."""

    def __init__(self, path: Path, span: tuple[int, int] | None = None) -> None:
        super().__init__(path)
        self.start, self.stop = span or (0, os.fstat(self.fileno()).st_size)
        self.seek(0)

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        origin = {os.SEEK_SET: self.start, os.SEEK_END: self.stop}.get(whence)
        return super().seek(super().tell() + offset if origin is None else origin + offset) - self.start

    def tell(self) -> int:
        return super().tell() - self.start

    def read(self, size: int | None = -1, /) -> bytes:
        remaining = max(self.stop - self.start - self.tell(), 0)
        size = remaining if size is None or size < 0 else size
        if size > _MAX_DIRECTORY_BYTES:
            raise ValueError(f"zip directory of {size} bytes")
        return super().read(min(size, remaining))


def _read_zip(file: MappedFile, stream: _CappedFile, find_global: FindGlobal) -> Any:
    """Read the zip format: uncompressed records data.pkl, byteorder, and data/<key> for each storage, in one folder."""
    with zipfile.ZipFile(stream) as archive:
        records = {record.filename: record for record in archive.infolist()}
    folder = next(iter(records), "").split("/")[0]
    if f"{folder}/data.pkl" not in records or f"{folder}/constants.pkl" in records:
        raise UserError(
            f"{file.path}: a zip file, but not of torch.save; TorchScript and other archives are not supported"
        )

    def locate(name: str) -> tuple[int, int]:
        """The position and size of a record, after a check of its header."""
        record = records[f"{folder}/{name}"]
        if record.compress_type != zipfile.ZIP_STORED or record.flag_bits & 1:
            raise ValueError(f"record {name!a:.100} is compressed or encrypted")
        stream.seek(record.header_offset)
        signature, name_length, extra_length = struct.unpack("<4s22xHH", stream.read(30))
        local_name, extra = stream.read(name_length), stream.read(extra_length)
        position = 0
        while position + 4 <= extra_length:  # extra fields (id, length, content) must fill the header exactly
            position += 4 + int.from_bytes(extra[position + 2 : position + 4], "little")
        header = signature, local_name, position
        is_valid = header == (b"PK\3\4", record.orig_filename.encode(), extra_length)
        start = stream.start + stream.tell()
        if not is_valid or start + record.file_size > min(stream.stop, file.size):
            raise ValueError(f"record {name!a:.100} is not at its position")
        return start, record.file_size

    def content(name: str) -> bytes:
        start, size = locate(name)
        if size > _MAX_PICKLE_BYTES:
            raise ValueError(f"record {name} has {size} bytes; the maximum is {_MAX_PICKLE_BYTES}")
        data = os.pread(stream.fileno(), size, start)
        if (crc := records[f"{folder}/{name}"].CRC) and crc != zlib.crc32(data):  # 0: torch wrote no checksum
            raise ValueError(f"record {name} has a wrong checksum")
        return data

    order = content("byteorder") if f"{folder}/byteorder" in records else b"little"
    if order not in (b"little", b"big"):
        raise ValueError("unknown byte order")

    def load_storage(persistent_id: Any) -> TensorStorage:
        dtype, key, numel = _parse_storage_id(*persistent_id)
        start, size = locate(f"data/{key}")
        if numel * dtype.itemsize > size:
            raise ValueError(f"storage of {numel} elements in a record of {size} bytes")
        return TensorStorage(file, dtype, numel, start, order.decode() != sys.byteorder)

    return unpickle(io.BytesIO(content("data.pkl")), UnpickleRules(find_global, _STATE_SETTERS, load_storage))


def _read_legacy(file: MappedFile, stream: _CappedFile, find_global: FindGlobal) -> Any:
    """Read the format before torch 1.6: a sequence of pickles (magic number, version, system info, the object, the
    keys of the storages), then the storages, each preceded by its number of elements."""
    storages: dict[str, list[TensorStorage]] = {}

    def load_storage(persistent_id: Any) -> TensorStorage:
        dtype, key, numel = _parse_storage_id(*persistent_id)
        storage = TensorStorage(file, dtype, numel, 0, sys.byteorder != "little")
        storages.setdefault(key, []).append(storage)
        return storage

    rules = UnpickleRules(find_global, _STATE_SETTERS, load_storage)
    with mmap.mmap(stream.fileno(), min(file.size, _MAX_PICKLE_BYTES), access=mmap.ACCESS_READ) as mapped:
        pickles = cast(IO[bytes], mapped)
        if unpickle(pickles, rules) != _MAGIC or unpickle(pickles, rules) != 1001:
            raise ValueError("no magic number")
        if unpickle(pickles, rules).get("little_endian") is not True:
            raise UserError(f"{file.path}: written by a big-endian machine, in the format before torch 1.6")
        value, keys = unpickle(pickles, rules), unpickle(pickles, rules)
        position = pickles.tell()
    if type(keys) is not list or not all(type(key) is str for key in keys):
        raise ValueError("storages without keys")
    for key in keys:
        stream.seek(position)
        (numel,) = struct.unpack("<q", stream.read(8))
        for storage in storages[key]:
            if storage.numel != numel:
                raise ValueError(f"storage of {numel} elements, expected {storage.numel}")
            storage.start = position + 8
        position += 8 + numel * storages.pop(key)[0].dtype.itemsize
        if position > file.size:
            raise ValueError("a storage exceeds the file")
    if storages:
        raise ValueError("storages are missing")
    return value


def _parse_storage_id(
    tag: Any, kind: Any, key: Any, _location: Any, numel: Any, view: Any = None
) -> tuple[torch.dtype, str, int]:
    """The dtype, key and number of elements of a storage. `view` is a field of the legacy format."""
    if tag != "storage" or not isinstance(kind, StorageType) or not isinstance(key, str) or view is not None:
        raise ValueError("invalid storage record")
    (numel,) = check_sizes((numel,))
    return kind.dtype, key, numel


def _tensor_info(path: Path) -> dict[Any, Any]:
    """Shape and dtype of each tensor of a file of references by tid. NxD up to 0.6.0 wrote no such file."""
    path = Path(f"{path}.info.pt")
    info = open_torch_file(path) if path.is_file() else {}
    if not isinstance(info, dict):
        raise UserError(f"{path}: expected a dict of shapes and dtypes")
    return info


class _ReferencedTensor(LazyTensor):
    """A tensor in a separate file, which is opened to read it, or if its shape is not stored elsewhere."""

    def __init__(self, path: Path, info: TensorInfo) -> None:
        self._references, self._info = path, info
        self._given_state: dict[Any, Any] | None = None

    def set_state(self, state: Any) -> None:
        if type(state) is not dict or type(state.get("tid")) is not int or state["tid"] < 0:
            raise ValueError("invalid tensor reference")
        self._given_state = state

    @property
    def _state(self) -> dict[Any, Any]:
        if self._given_state is None:
            raise UserError(f"{self._references}: corrupt, or not a file of torch.save: a tensor reference has no tid")
        return self._given_state

    @property
    def _path(self) -> Path:
        return Path(f"{self._references}.tensors") / f"tensor_{self._state['tid']}.pt"

    @property
    def exists(self) -> bool:
        return self._path.is_file()

    @property
    def shape(self) -> tuple[int, ...]:  # type: ignore[override]  # an attribute that is computed when first used
        return self._shape_and_dtype[0]

    @property
    def dtype(self) -> torch.dtype:  # type: ignore[override]
        return self._shape_and_dtype[1]

    def read_slice(self, index: TensorIndex) -> Tensor:
        tensor = self._tensor
        if (tensor.shape, tensor.dtype) != (self.shape, self.dtype):
            raise UserError(
                f"{self._path}: {list(tensor.shape)} of {tensor.dtype},"
                f" but its reference says {list(self.shape)} of {self.dtype}"
            )
        return tensor.read(index)

    @cached_property
    def _shape_and_dtype(self) -> tuple[tuple[int, ...], torch.dtype]:
        """From the reference itself, from the info file or, if neither has them, from the tensor's file."""
        for info in (self._state, self._info().get(self._state["tid"])):
            shape, dtype = (info.get("shape"), info.get("dtype")) if isinstance(info, dict) else (None, None)
            if type(shape) is torch.Size and isinstance(dtype, torch.dtype):
                return tuple(shape), dtype
        return self._tensor.shape, self._tensor.dtype

    @cached_property
    def _tensor(self) -> LazyTensor:
        tensor = open_torch_file(self._path)
        if not isinstance(tensor, LazyTensor) or isinstance(tensor, _ReferencedTensor):
            raise UserError(f"{self._path}: expected a tensor")
        return tensor


_STATE_SETTERS = {**STATE_SETTERS, _ReferencedTensor: _ReferencedTensor.set_state}
