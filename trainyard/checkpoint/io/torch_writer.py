"""Files that torch.load reads, written one tensor at a time: the dict of a whole rank never has to be in memory.

torch's format is a zip file of stored records: a pickle of the dict, whose tensors name their storages, and a record
for each storage. A zip file's directory comes last, so storages can be written as they come and the pickle after them.
The pickle is put together from opcodes: it names classes (torch-xla's reference among them) that need not be installed.
"""

import os
import pickle
import shutil
import sys
import tempfile
import zipfile
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from trainyard.checkpoint.io.async_io import fsync_files
from trainyard.checkpoint.io.pickle_allowlist import REBUILD_MODULE, REFERENCE_CLASSES, STORAGE_DTYPES
from trainyard.core.atomic_files import atomic_file, fsync_directory

_ALIGNMENT = 64
_ZIP64_BYTES = 2**30
"""Bytes from which a record has its sizes in 64 bits. They must have from 2 GiB."""
_WRITE_CHUNK_BYTES = 2**22
"""Bytes that are summed up and written at a time: they stay in the cache between the two."""
_STORAGE_NAMES = {dtype: name for name, dtype in STORAGE_DTYPES.items()}


class _WriteAbandoned(Exception):
    """Ends a writer's block, so that nothing is left of its file."""


class TorchFileWriter:
    """One file of {name: tensor}, or of {under: {name: tensor}}. It has its name from `close` on."""

    def __init__(self, path: Path, root_key: str | None = None) -> None:
        self._root_key = root_key
        self._pickled_items: list[bytes] = []
        self._exit_stack = ExitStack()
        self._archive = _Archive(self._exit_stack.enter_context(atomic_file(path)))

    def add(self, name: str, tensor: Tensor) -> None:
        self._pickled_items.append(
            _pickle_value(name) + self._archive.write_tensor(str(len(self._pickled_items)), tensor)
        )

    def close(self) -> None:
        with self._exit_stack:
            self._archive.finish(_pickle_dict(self._pickled_items, self._root_key))

    def abandon(self) -> None:
        with suppress(_WriteAbandoned, OSError), self._exit_stack:
            self._archive.close()
            raise _WriteAbandoned


class XserWriter:
    """The same as torch-xla lays it out: references in the file itself, each tensor in a file beside it.

    The folder of tensors gets its name at the end and the file of references last of all: where that one is, all is.
    """

    def __init__(self, path: Path, root_key: str | None = None) -> None:
        self._path, self._root_key = path, root_key
        self._pickled_items: list[bytes] = []
        self._info: dict[int, dict[str, Any]] = {}
        self._temporary = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}.", suffix=".part"))

    def add(self, name: str, tensor: Tensor) -> None:
        tid = len(self._info)
        with open(self._temporary / f"tensor_{tid}.pt", "wb") as file:
            archive = _Archive(file)
            archive.finish(archive.write_tensor("0", tensor))
        self._info[tid] = {"dtype": tensor.dtype, "shape": tensor.shape, "expert_model_parallel": False}
        module, _, kind = REFERENCE_CLASSES[0].rpartition(".")
        made = (
            _pickle_global(module, kind)
            + pickle.EMPTY_TUPLE
            + pickle.NEWOBJ
            + _pickle_value({"tid": tid})
            + pickle.BUILD
        )
        self._pickled_items.append(_pickle_value(name) + made)

    def close(self) -> None:
        tensors = Path(f"{self._path}.tensors")
        try:
            self._path.unlink(missing_ok=True)  # it would refer to the new tensors
            shutil.rmtree(tensors, ignore_errors=True)
            os.chmod(self._temporary, 0o755)
            fsync_files(self._temporary.iterdir())
            os.replace(self._temporary, tensors)
            fsync_directory(tensors)
        except BaseException:
            self.abandon()
            raise
        with atomic_file(Path(f"{self._path}.info.pt")) as file:
            torch.save(self._info, file)
        with atomic_file(self._path) as file:
            _Archive(file).finish(_pickle_dict(self._pickled_items, self._root_key))

    def abandon(self) -> None:
        shutil.rmtree(self._temporary, ignore_errors=True)


class _Archive:
    """A zip file with the records of torch's format."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._zip = zipfile.ZipFile(file, "w")

    def write_tensor(self, storage: str, tensor: Tensor) -> bytes:
        """Write its storage; what stands for it in the pickle."""
        tensor = tensor.detach().cpu().contiguous()
        self._write_record(f"data/{storage}", tensor.view(-1).view(torch.uint8).numpy().data)
        named = _STORAGE_NAMES.get(tensor.dtype)
        kind = _pickle_global("torch", named) if named else _pickle_global("torch.storage", "UntypedStorage")
        count = tensor.numel() if named else tensor.nbytes
        held = (
            _pickle_tuple(
                _pickle_value("storage"), kind, _pickle_value(storage), _pickle_value("cpu"), _pickle_value(count)
            )
            + pickle.BINPERSID
        )
        view = _pickle_value(0), _pickle_value(tuple(tensor.shape)), _pickle_value(tensor.stride())
        no_grad, no_hooks = (
            pickle.NEWFALSE,
            _pickle_global("collections", "OrderedDict") + pickle.EMPTY_TUPLE + pickle.REDUCE,
        )
        if named:
            made = _pickle_global(REBUILD_MODULE, "_rebuild_tensor_v2") + _pickle_tuple(held, *view, no_grad, no_hooks)
        else:  # dtypes that came after the typed storages
            dtype = _pickle_global("torch", str(tensor.dtype).removeprefix("torch."))
            made = _pickle_global(REBUILD_MODULE, "_rebuild_tensor_v3") + _pickle_tuple(
                held, *view, no_grad, no_hooks, dtype
            )
        return made + pickle.REDUCE

    def finish(self, value: bytes) -> None:
        """With the opcodes that leave the file's object on the stack."""
        self._write_record("data.pkl", memoryview(pickle.PROTO + b"\2" + value + pickle.STOP))
        self._write_record("byteorder", memoryview(sys.byteorder.encode()))
        self._write_record("version", memoryview(b"3\n"))
        self.close()

    def close(self) -> None:
        self._zip.close()

    def _write_record(self, name: str, data: memoryview) -> None:
        record = zipfile.ZipInfo(f"archive/{name}")
        great = data.nbytes >= _ZIP64_BYTES
        # An extra field of zeros moves the data to where it can be mapped; zipfile adds one of its own for great sizes.
        start = self._file.tell() + 30 + len(record.filename) + (20 if great else 0)
        padding = -(start + 4) % _ALIGNMENT
        record.extra = b"FB" + padding.to_bytes(2, "little") + bytes(padding)
        with self._zip.open(record, "w", force_zip64=great) as file:
            for at in range(0, data.nbytes, _WRITE_CHUNK_BYTES):
                file.write(data[at : at + _WRITE_CHUNK_BYTES])


def _pickle_value(value: Any) -> bytes:
    """The opcodes for a value of Python's own."""
    return pickle.dumps(value, 2)[2:-1]


def _pickle_global(module: str, name: str) -> bytes:
    return pickle.GLOBAL + f"{module}\n{name}\n".encode()


def _pickle_tuple(*items: bytes) -> bytes:
    return pickle.MARK + b"".join(items) + pickle.TUPLE


def _pickle_dict(items: list[bytes], root_key: str | None) -> bytes:
    state = pickle.EMPTY_DICT + pickle.MARK + b"".join(items) + pickle.SETITEMS
    return state if root_key is None else pickle.EMPTY_DICT + _pickle_value(root_key) + state + pickle.SETITEM
