"""Whether the files of an NxD checkpoint hold what a layout says, and the same wherever several hold it."""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from trainyard.checkpoint.formats.hf import IGNORED_BUFFERS
from trainyard.checkpoint.formats.nxd.layout import PpTpRank
from trainyard.checkpoint.formats.tensor_map import StoredTensor, TensorIndex, full_index, stored_shape
from trainyard.checkpoint.io.torch_file import LazyTensor
from trainyard.core.errors import UserError

RankFiles = Mapping[PpTpRank, Mapping[str, LazyTensor]]
RankTensors = Iterable[tuple[PpTpRank, StoredTensor]]
TensorShapes = Mapping[str, tuple[int, ...]]


def index_reader(files: RankFiles) -> Callable[[PpTpRank, str, TensorIndex], Tensor]:
    return lambda rank, name, region: files[rank][name].read(region)


def check_tensors(paths: Mapping[PpTpRank, Path], files: RankFiles, tensors: RankTensors, shapes: TensorShapes) -> None:
    """All that is held is there in the right shape, and nothing else."""
    wanted: dict[PpTpRank, dict[str, StoredTensor]] = {rank: {} for rank in files}
    for rank, each in tensors:
        wanted[rank][each.name] = each
    for rank, names in wanted.items():
        missing = [name for name in names if name not in files[rank]]
        extra = [name for name in files[rank] if name not in names and not IGNORED_BUFFERS.search(name)]
        if missing or extra:
            what = f"{missing[0]} is missing" if missing else f"{extra[0]} has no place in this model"
            counts = f"({len(missing)} missing, {len(extra)} unknown)"
            raise UserError(f"{paths[rank]}: does not fit the model: {what} {counts}")
        for name, each in names.items():
            shape, right = list(files[rank][name].shape), list(stored_shape(each, shapes))
            if shape != right:
                raise UserError(f"{paths[rank]}: does not fit the model: {name} is {shape}, wanted {right}")


def find_mismatched_copy(files: RankFiles, tensors: RankTensors, shapes: TensorShapes) -> str | None:
    """The name of a tensor that holds a piece with other bits than an earlier tensor with the same piece."""
    read = index_reader(files)
    seen: dict[object, tuple[PpTpRank, str, TensorIndex]] = {}
    for rank, each in tensors:
        at = 0
        for piece in each.ranges:
            region = list(full_index(stored_shape(each, shapes)))
            region[each.dim] = slice(at, at + piece.stop - piece.start)
            at = region[each.dim].stop
            here = (rank, each.name, tuple(region))
            first = seen.setdefault(piece, here)
            if first is not here and not _same_bits(read(*first), read(*here)):
                return each.name
    return None


def _same_bits(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
