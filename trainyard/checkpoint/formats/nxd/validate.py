"""Whether the files of an NxD checkpoint hold what a layout says, and the same wherever several hold it."""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from trainyard.checkpoint.formats.hf import BUFFERS
from trainyard.checkpoint.formats.nxd.layout import Rank
from trainyard.checkpoint.formats.tensor_map import Region, Stored, everything, stored_shape
from trainyard.checkpoint.io.torch_file import Lazy
from trainyard.core.errors import UserError

Files = Mapping[Rank, Mapping[str, Lazy]]
Held = Iterable[tuple[Rank, Stored]]
Parts = Mapping[str, tuple[int, ...]]


def reader(files: Files) -> Callable[[Rank, str, Region], Tensor]:
    return lambda rank, name, region: files[rank][name].read(region)


def check_names(paths: Mapping[Rank, Path], files: Files, held: Held, parts: Parts) -> None:
    """All that is held is there in the right shape, and nothing else."""
    wanted: dict[Rank, dict[str, Stored]] = {rank: {} for rank in files}
    for rank, each in held:
        wanted[rank][each.name] = each
    for rank, names in wanted.items():
        missing = [name for name in names if name not in files[rank]]
        extra = [name for name in files[rank] if name not in names and not BUFFERS.search(name)]
        if missing or extra:
            what = f"{missing[0]} is missing" if missing else f"{extra[0]} has no place in this model"
            counts = f"({len(missing)} missing, {len(extra)} unknown)"
            raise UserError(f"{paths[rank]}: does not fit the model: {what} {counts}")
        for name, each in names.items():
            shape, right = list(files[rank][name].shape), list(stored_shape(each, parts))
            if shape != right:
                raise UserError(f"{paths[rank]}: does not fit the model: {name} is {shape}, wanted {right}")


def differing(files: Files, held: Held, parts: Parts) -> str | None:
    """The name of a tensor that holds a piece with other bits than an earlier tensor with the same piece."""
    read = reader(files)
    seen: dict[object, tuple[Rank, str, Region]] = {}
    for rank, each in held:
        at = 0
        for piece in each.pieces:
            region = list(everything(stored_shape(each, parts)))
            region[each.dim] = slice(at, at + piece.stop - piece.start)
            at = region[each.dim].stop
            here = (rank, each.name, tuple(region))
            first = seen.setdefault(piece, here)
            if first is not here and not _same_bits(read(*first), read(*here)):
                return each.name
    return None


def _same_bits(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
