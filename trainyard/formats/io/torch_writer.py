"""Writes files that torch.load reads one tensor at a time, so that the dict of a rank never has to be in memory.

torch's format is a zip file of uncompressed records: a pickle of the dict, whose tensors name their storages, and a
record for each storage. The directory of a zip file comes last, so storages can be written as they come and the pickle
after them. The pickle is built from opcodes, because it names classes (such as torch-xla's reference) that need not be
installed.
"""

import os
import pickle
import sys
import zipfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from trainyard.checkpoint.safetensors_file import chunks
from trainyard.core.atomic_files import atomic_file, fsync_directory
from trainyard.formats.io.async_io import fsync_files
from trainyard.formats.io.pickle_allowlist import REBUILD_MODULE, REFERENCE_CLASSES, STORAGE_DTYPES

_ALIGNMENT = 64
_ZIP64_BYTES = 2**30
"""Records of at least this size use zip64 headers. The format requires them from 2 GiB."""
_STORAGE_NAMES = {dtype: name for name, dtype in STORAGE_DTYPES.items()}


class TorchFileWriter:
    """Writes a file of {name: tensor}. Like XserWriter, it is meant for an atomic directory: `close` only fsyncs."""

    def __init__(self, path: Path) -> None:
        self._pickled_items: list[bytes] = []
        self._file = path.open("wb")
        self._archive = _Archive(self._file)

    def add(self, name: str, tensor: Tensor) -> None:
        rebuild = self._archive.write_tensor(str(len(self._pickled_items)), tensor)
        self._pickled_items.append(_pickle_value(name) + rebuild)

    def close(self) -> None:
        with self._file:
            self._archive.finish(_pickle_dict(self._pickled_items))
            self._file.flush()
            os.fsync(self._file.fileno())

    def abandon(self) -> None:
        """Close the file if it is still open. It is then incomplete."""
        with suppress(OSError, ValueError), self._file:
            self._archive.close()


class XserWriter:
    """Writes the same in torch-xla's layout: a file of references, and a directory with a file per tensor."""

    def __init__(self, path: Path, is_expert: Callable[[str], bool] = lambda name: False) -> None:
        """`is_expert` selects the tensors that differ between expert-parallel ranks; NxD reads all other ones from
        the first rank's directory."""
        self._path, self._tensors, self._is_expert = path, Path(f"{path}.tensors"), is_expert
        self._pickled_items: list[bytes] = []
        self._info: dict[int, dict[str, Any]] = {}
        self._tensors.mkdir()

    def add(self, name: str, tensor: Tensor) -> None:
        tid = len(self._info)
        with open(self._tensors / f"tensor_{tid}.pt", "wb") as file:
            archive = _Archive(file)
            archive.finish(archive.write_tensor("0", tensor))
        self._info[tid] = {"dtype": tensor.dtype, "shape": tensor.shape, "expert_model_parallel": self._is_expert(name)}
        reference = _pickle_global(REFERENCE_CLASSES[0]) + pickle.EMPTY_TUPLE + pickle.NEWOBJ
        self._pickled_items.append(_pickle_value(name) + reference + _pickle_value({"tid": tid}) + pickle.BUILD)

    def close(self) -> None:
        fsync_files(self._tensors.iterdir())
        fsync_directory(self._tensors)
        with atomic_file(Path(f"{self._path}.info.pt")) as file:
            torch.save(self._info, file)
        with atomic_file(self._path) as file:
            _Archive(file).finish(_pickle_dict(self._pickled_items))

    def abandon(self) -> None:
        """Nothing is open."""


class _Archive:
    """A zip file in torch's format."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._zip = zipfile.ZipFile(file, "w")

    def write_tensor(self, storage: str, tensor: Tensor) -> bytes:
        """Write the storage of a tensor. Returns the opcodes that rebuild the tensor."""
        tensor = tensor.detach().cpu().contiguous()
        self._write_record(f"data/{storage}", tensor.view(-1).view(torch.uint8).numpy().data)
        typed = _STORAGE_NAMES.get(tensor.dtype)
        kind = _pickle_global(f"torch.{typed or 'storage.UntypedStorage'}")
        key = (_pickle_value(item) for item in (storage, "cpu", tensor.numel() if typed else tensor.nbytes))
        persistent_id = _pickle_tuple(_pickle_value("storage"), kind, *key) + pickle.BINPERSID
        view = (_pickle_value(item) for item in (0, tuple(tensor.shape), tensor.stride()))
        no_hooks = _pickle_global("collections.OrderedDict") + pickle.EMPTY_TUPLE + pickle.REDUCE
        args = [persistent_id, *view, pickle.NEWFALSE, no_hooks]  # NEWFALSE: requires_grad
        if not typed:  # dtypes newer than the typed storages
            args.append(_pickle_global(str(tensor.dtype)))
        rebuild = _pickle_global(f"{REBUILD_MODULE}._rebuild_tensor_v{2 if typed else 3}")
        return rebuild + _pickle_tuple(*args) + pickle.REDUCE

    def finish(self, value: bytes) -> None:
        """Write the pickle from the opcodes of the file's object, and close the file."""
        self._write_record("data.pkl", memoryview(pickle.PROTO + b"\2" + value + pickle.STOP))
        self._write_record("byteorder", memoryview(sys.byteorder.encode()))
        self._write_record("version", memoryview(b"3\n"))
        self.close()

    def close(self) -> None:
        self._zip.close()

    def _write_record(self, name: str, data: memoryview) -> None:
        record = zipfile.ZipInfo(f"archive/{name}")
        zip64 = data.nbytes >= _ZIP64_BYTES
        # An extra field of zeros aligns the data for mapping; zipfile adds a field of 20 bytes for zip64 sizes.
        start = self._file.tell() + 30 + len(record.filename) + (20 if zip64 else 0)
        padding = -(start + 4) % _ALIGNMENT
        record.extra = b"FB" + padding.to_bytes(2, "little") + bytes(padding)
        with self._zip.open(record, "w", force_zip64=zip64) as file:
            for chunk in chunks(data):
                file.write(chunk)


def _pickle_value(value: Any) -> bytes:
    """The opcodes of a plain Python value."""
    return pickle.dumps(value, 2)[2:-1]


def _pickle_global(full_name: str) -> bytes:
    module, _, name = full_name.rpartition(".")
    return pickle.GLOBAL + f"{module}\n{name}\n".encode()


def _pickle_tuple(*items: bytes) -> bytes:
    return pickle.MARK + b"".join(items) + pickle.TUPLE


def _pickle_dict(items: list[bytes]) -> bytes:
    return pickle.EMPTY_DICT + pickle.MARK + b"".join(items) + pickle.SETITEMS
