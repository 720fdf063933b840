"""Checks that the files of an NxD checkpoint hold what a layout says, and that all replicas are equal."""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from trainyard.checkpoint.formats.hf import IGNORED_BUFFERS
from trainyard.checkpoint.formats.nxd.layout import PpTpRank
from trainyard.checkpoint.formats.tensor_map import StoredTensor, check_tensors
from trainyard.checkpoint.io.torch_file import LazyTensor
from trainyard.core.tensor_slice import TensorIndex, TensorSlice

RankFiles = Mapping[PpTpRank, Mapping[str, LazyTensor]]
RankTensors = Iterable[tuple[PpTpRank, StoredTensor]]


def index_reader(files: RankFiles) -> Callable[[PpTpRank, str, TensorIndex], Tensor]:
    return lambda rank, name, index: files[rank][name].read(index)


def check_rank_files(paths: Mapping[PpTpRank, Path], files: RankFiles, tensors: RankTensors) -> None:
    """Refuse files with missing, unknown or misshapen tensors."""
    expected: dict[PpTpRank, dict[str, StoredTensor]] = {rank: {} for rank in files}
    for rank, stored in tensors:
        expected[rank][stored.name] = stored
    for rank, by_name in expected.items():
        check_tensors(f"{paths[rank]}:", by_name, files[rank], IGNORED_BUFFERS.search)


def find_mismatched_copy(files: RankFiles, tensors: RankTensors) -> str | None:
    """The name of the first tensor that holds a slice with other bits than an earlier tensor with the same slice."""
    read = index_reader(files)
    seen: dict[TensorSlice, tuple[PpTpRank, str, TensorIndex]] = {}
    for rank, stored in tensors:
        full, start = TensorSlice.full(stored.name, stored.shape), 0
        for piece in stored.slices:
            end = start + piece.sizes[stored.dim]
            location = rank, stored.name, full.narrow(stored.dim, start, end).to_index()
            start = end
            first = seen.setdefault(piece, location)
            if first is not location and not _same_bits(read(*first), read(*location)):
                return stored.name
    return None


def _same_bits(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
