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

from trainyard.checkpoint.io.async_io import sync_all
from trainyard.checkpoint.io.pickle_allowlist import REBUILD, REFERENCES, STORAGES
from trainyard.core.atomic_files import sync_directory, whole_file

_ALIGNMENT = 64
_GREAT = 2**30
"""Bytes from which a record has its sizes in 64 bits. They must have from 2 GiB."""
_CHUNK = 2**22
"""Bytes that are summed up and written at a time: they stay in the cache between the two."""
_NAMES = {dtype: name for name, dtype in STORAGES.items()}


class _Abandoned(Exception):
    """Ends a writer's block, so that nothing is left of its file."""


class PickleWriter:
    """One file of {name: tensor}, or of {under: {name: tensor}}. It has its name from `close` on."""

    def __init__(self, path: Path, under: str | None = None) -> None:
        self._under = under
        self._items: list[bytes] = []
        self._open = ExitStack()
        self._archive = _Archive(self._open.enter_context(whole_file(path)))

    def add(self, name: str, tensor: Tensor) -> None:
        self._items.append(_plain(name) + self._archive.tensor(str(len(self._items)), tensor))

    def close(self) -> None:
        with self._open:
            self._archive.finish(_state(self._items, self._under))

    def abandon(self) -> None:
        with suppress(_Abandoned, OSError), self._open:
            self._archive.close()
            raise _Abandoned


class XserWriter:
    """The same as torch-xla lays it out: references in the file itself, each tensor in a file beside it.

    The folder of tensors gets its name at the end and the file of references last of all: where that one is, all is.
    """

    def __init__(self, path: Path, under: str | None = None) -> None:
        self._path, self._under = path, under
        self._items: list[bytes] = []
        self._info: dict[int, dict[str, Any]] = {}
        self._part = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}.", suffix=".part"))

    def add(self, name: str, tensor: Tensor) -> None:
        tid = len(self._info)
        with open(self._part / f"tensor_{tid}.pt", "wb") as file:
            archive = _Archive(file)
            archive.finish(archive.tensor("0", tensor))
        self._info[tid] = {"dtype": tensor.dtype, "shape": tensor.shape, "expert_model_parallel": False}
        module, _, kind = REFERENCES[0].rpartition(".")
        made = _named(module, kind) + pickle.EMPTY_TUPLE + pickle.NEWOBJ + _plain({"tid": tid}) + pickle.BUILD
        self._items.append(_plain(name) + made)

    def close(self) -> None:
        tensors = Path(f"{self._path}.tensors")
        try:
            self._path.unlink(missing_ok=True)  # it would refer to the new tensors
            shutil.rmtree(tensors, ignore_errors=True)
            os.chmod(self._part, 0o755)
            sync_all(self._part.iterdir())
            os.replace(self._part, tensors)
            sync_directory(tensors)
        except BaseException:
            self.abandon()
            raise
        with whole_file(Path(f"{self._path}.info.pt")) as file:
            torch.save(self._info, file)
        with whole_file(self._path) as file:
            _Archive(file).finish(_state(self._items, self._under))

    def abandon(self) -> None:
        shutil.rmtree(self._part, ignore_errors=True)


class _Archive:
    """A zip file with the records of torch's format."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._zip = zipfile.ZipFile(file, "w")

    def tensor(self, storage: str, tensor: Tensor) -> bytes:
        """Write its storage; what stands for it in the pickle."""
        tensor = tensor.detach().cpu().contiguous()
        self._record(f"data/{storage}", tensor.view(-1).view(torch.uint8).numpy().data)
        named = _NAMES.get(tensor.dtype)
        kind = _named("torch", named) if named else _named("torch.storage", "UntypedStorage")
        count = tensor.numel() if named else tensor.nbytes
        held = _tuple(_plain("storage"), kind, _plain(storage), _plain("cpu"), _plain(count)) + pickle.BINPERSID
        view = _plain(0), _plain(tuple(tensor.shape)), _plain(tensor.stride())
        no_grad, no_hooks = pickle.NEWFALSE, _named("collections", "OrderedDict") + pickle.EMPTY_TUPLE + pickle.REDUCE
        if named:
            made = _named(REBUILD, "_rebuild_tensor_v2") + _tuple(held, *view, no_grad, no_hooks)
        else:  # dtypes that came after the typed storages
            dtype = _named("torch", str(tensor.dtype).removeprefix("torch."))
            made = _named(REBUILD, "_rebuild_tensor_v3") + _tuple(held, *view, no_grad, no_hooks, dtype)
        return made + pickle.REDUCE

    def finish(self, value: bytes) -> None:
        """With the opcodes that leave the file's object on the stack."""
        self._record("data.pkl", memoryview(pickle.PROTO + b"\2" + value + pickle.STOP))
        self._record("byteorder", memoryview(sys.byteorder.encode()))
        self._record("version", memoryview(b"3\n"))
        self.close()

    def close(self) -> None:
        self._zip.close()

    def _record(self, name: str, data: memoryview) -> None:
        record = zipfile.ZipInfo(f"archive/{name}")
        great = data.nbytes >= _GREAT
        # An extra field of zeros moves the data to where it can be mapped; zipfile adds one of its own for great sizes.
        start = self._file.tell() + 30 + len(record.filename) + (20 if great else 0)
        padding = -(start + 4) % _ALIGNMENT
        record.extra = b"FB" + padding.to_bytes(2, "little") + bytes(padding)
        with self._zip.open(record, "w", force_zip64=great) as file:
            for at in range(0, data.nbytes, _CHUNK):
                file.write(data[at : at + _CHUNK])


def _plain(value: Any) -> bytes:
    """The opcodes for a value of Python's own."""
    return pickle.dumps(value, 2)[2:-1]


def _named(module: str, name: str) -> bytes:
    return pickle.GLOBAL + f"{module}\n{name}\n".encode()


def _tuple(*items: bytes) -> bytes:
    return pickle.MARK + b"".join(items) + pickle.TUPLE


def _state(items: list[bytes], under: str | None) -> bytes:
    state = pickle.EMPTY_DICT + pickle.MARK + b"".join(items) + pickle.SETITEMS
    return state if under is None else pickle.EMPTY_DICT + _plain(under) + state + pickle.SETITEM
