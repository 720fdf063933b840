"""Opens safetensors files: a tensor is a view of the mapped file, and is compared with its checksum if it has one."""

import zlib
from math import prod
from pathlib import Path

from torch import Tensor

from trainyard.checkpoint.safetensors_file import TensorEntry, parse_header, read_checksums, tensor_bytes
from trainyard.core.errors import UserError, one_line
from trainyard.core.tensor_slice import TensorIndex
from trainyard.formats.io.lazy_tensor import LazyTensor, MappedFile, StorageView, TensorStorage
from trainyard.remote.storage import LocalStorage


def open_safetensors(path: Path) -> dict[str, LazyTensor]:
    """All tensors of a file by name. No tensor is read yet; if the file has checksums, they are CheckedTensors."""
    checksums: dict[str, str] = {}
    try:
        file = MappedFile(path)
        with LocalStorage(path.parent).open(path.name) as opened:
            entries, metadata = parse_header(opened.read, file.size)
            if {"HEADER_CRC32", "CRC32"} & metadata.keys():
                end = min((entry.start for entry in entries.values()), default=file.size)
                checksums = read_checksums(bytes(opened.read(0, end)), metadata)
                if checksums.keys() != entries.keys():
                    raise ValueError("it has no checksum of some of its tensors")
        tensors = {name: _lazy_tensor(file, entry) for name, entry in entries.items()}
    except UserError:
        raise
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; expected a Hugging Face directory with safetensors") from None
    except EOFError:
        raise UserError(f"{path}: not a readable safetensors file: file is truncated") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: not a readable safetensors file: {one_line(error)}") from None
    for name, crc in checksums.items():
        tensors[name] = CheckedTensor(tensors[name], crc, f"{path}: corrupt: the checksum of {name} differs")
    return tensors


def _lazy_tensor(file: MappedFile, entry: TensorEntry) -> LazyTensor:
    storage = TensorStorage(file, entry.dtype, prod(entry.shape), entry.start)
    strides = [prod(entry.shape[dim + 1 :]) for dim in range(len(entry.shape))]
    return StorageView(storage, entry.dtype, 0, entry.shape, strides)


class CheckedTensor(LazyTensor):
    """A contiguous tensor that is compared with its checksum when it is first read."""

    def __init__(self, tensor: LazyTensor, crc: str, problem: str) -> None:
        self.tensor, self.shape, self.dtype = tensor, tensor.shape, tensor.dtype
        self.crc, self.problem, self.is_verified = crc, problem, False

    def read_slice(self, index: TensorIndex) -> Tensor:
        if not self.is_verified:
            if f"{zlib.crc32(tensor_bytes(self.tensor.read())):08x}" != self.crc:
                raise UserError(self.problem)
            self.is_verified = True
        return self.tensor.read(index)
