"""Files of an NxD optimizer: found, and each one's tensors in the order in which the optimizer had its parameters.

    TAG/optim/dp_rank_00_tp_rank_00_pp_rank_00.pt    beside TAG/model; one for each data-parallel rank with ZeRO-1
    optim.dp_rank_00.tp_rank_00                      before NxD 0.7, beside the model's files

ZeRO-1 pads the rows of each parameter with zeros to a multiple of the data-parallel ranks, and each rank has an equal
run of them. `Rows` is all of a parameter's runs as one tensor, so that nothing else has to know of that.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainyard.checkpoint.formats.nxd.files import CURRENT_FILE_NAME, find_nxd
from trainyard.checkpoint.formats.nxd.layout import PpTpRank
from trainyard.checkpoint.formats.tensor_map import TensorIndex, full_index
from trainyard.checkpoint.io.torch_file import LazyTensor, open_torch_file
from trainyard.core.errors import UserError, one_line

OLD_OPTIMIZER_NAME = re.compile(r"optim\.dp_rank_(?P<dp>\d+)\.tp_rank_(?P<tp>\d+)")
MASTER_WEIGHTS_KEY = "sharded_master_weights"
MOMENT_KEYS = {"first": "exp_avg", "second": "exp_avg_sq"}
"""What the files call them."""


@dataclass(frozen=True)
class OptimizerFiles:
    root: Path
    """The directory that the files are in."""
    files: dict[PpTpRank, tuple[Path, ...]]
    """For each rank of the model's files those of its data-parallel ranks, in order."""


def find_optimizer(path: Path) -> OptimizerFiles | None:
    """The optimizer's files of the checkpoint in `path`, which may be all that find_nxd takes; None: it has none."""
    model = find_nxd(path)
    if model is None:
        return None
    tag = model.root.parent
    for folder, names in (
        (tag / "optim", (CURRENT_FILE_NAME, OLD_OPTIMIZER_NAME)),
        (tag, (OLD_OPTIMIZER_NAME,)),
        (model.root, (OLD_OPTIMIZER_NAME,)),
    ):
        files = _find_files(folder, names)
        if files:
            return OptimizerFiles(folder, _complete_grid(folder, files, list(model.files)))
    if other := sorted(file.name for file in (tag / "optim").glob("*")):
        raise UserError(
            f"{tag / 'optim'}: has {other[0]}, but no dp_rank_00_tp_rank_00_pp_rank_00.pt; what use_zero1_dcp or "
            f"nxd_convert_zero_checkpoints --convert_to_full made is not read"
        )
    return None


@dataclass(frozen=True)
class OptimizerShard:
    """What one file holds, parameters in the optimizer's order."""

    path: Path
    shapes: list[tuple[int, ...]]
    """Of the rank's whole parameters, without padding."""
    tensors: dict[str, list[LazyTensor]]
    """Its rows of the first and second moments, and of the master weights ("weights") if they were saved."""
    updates: int


def read_optimizer_shard(path: Path) -> OptimizerShard:
    state = open_torch_file(path, allow_stubs=True)
    try:
        numbers = [number for group in state["param_groups"] for number in group["params"]]
        states = state["base_state"] if "base_state" in state else state["state"]  # without ZeRO-1 there is no base
        missing = [number for number in numbers if number not in states]
        if missing or not numbers:
            what = f"no state for {len(missing)} of its {len(numbers)} parameters"
            raise UserError(f"{path}: holds {what}; it was saved before the first update, or some were frozen")
        tensors = {kind: [states[number][name] for number in numbers] for kind, name in MOMENT_KEYS.items()}
        if MASTER_WEIGHTS_KEY in state:
            tensors["weights"] = [state[MASTER_WEIGHTS_KEY][number] for number in numbers]
        if not all(isinstance(each, LazyTensor) for held in tensors.values() for each in held):
            raise TypeError("something else where a tensor should be")
        shapes = [state["shape_info"][number] for number in numbers] if "base_state" in state else None
        return OptimizerShard(
            path,
            [tuple(shape) for shape in shapes] if shapes else [each.shape for each in tensors["first"]],
            tensors,
            _as_int(states[numbers[0]]["step"]),
        )
    except UserError:
        raise
    except (LookupError, TypeError, ValueError, RuntimeError, OverflowError) as error:
        what = f"{type(error).__name__} {one_line(error)}"
        raise UserError(f"{path}: not the state of an Adam optimizer as NxD saves it: {what}") from None


class RowShardedTensor(LazyTensor):
    """A tensor of which several files have an equal number of rows each; what is beyond `shape` is padding."""

    def __init__(self, files: Sequence[LazyTensor], shape: tuple[int, ...]) -> None:
        self._files, self._shape = files, shape
        self._rows_per_file = rows_per_file(shape, len(files))

    @property
    def shape(self) -> tuple[int, ...]:
        return self._shape

    @property
    def dtype(self) -> torch.dtype:
        return self._files[0].dtype

    def read(self, index: TensorIndex | None = None) -> Tensor:
        rows, *rest = index or full_index(self._shape)
        out = []
        for number in range(rows.start // self._rows_per_file, -(-rows.stop // self._rows_per_file)):
            begin = number * self._rows_per_file
            inside = slice(max(rows.start - begin, 0), min(rows.stop - begin, self._rows_per_file))
            out.append(self._files[number].read((inside, *rest)))
        return out[0] if len(out) == 1 else torch.cat(out)


def rows_per_file(shape: tuple[int, ...], files: int) -> int:
    return -(-shape[0] // files)


def _find_files(folder: Path, names: Sequence[re.Pattern[str]]) -> dict[PpTpRank, dict[int, Path]]:
    files: dict[PpTpRank, dict[int, Path]] = {}
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        match = next(filter(None, (name.fullmatch(path.name) for name in names)), None)
        if not match:  # so it is with the .tensors and .info.pt of xser
            continue
        rank = {key: int(value or 0) for key, value in match.groupdict().items()}
        if rank.get("ep"):
            raise UserError(f"{path}: expert-parallel ranks hold a mixture of experts; Llama models have none")
        files.setdefault((rank.get("pp", 0), rank["tp"]), {})[rank["dp"]] = path
    return files


def _complete_grid(
    folder: Path, files: dict[PpTpRank, dict[int, Path]], ranks: list[PpTpRank]
) -> dict[PpTpRank, tuple[Path, ...]]:
    """All of them in order, if there is one for each rank of the model and of data parallelism."""
    if extra := sorted(set(files) - set(ranks)):
        pp, tp = extra[0]
        raise UserError(f"{folder}: has tp_rank_{tp:02d}_pp_rank_{pp:02d}, which the model's files do not have")
    dp = max(max(held) for held in files.values()) + 1
    grid = [(d, rank) for rank in ranks for d in range(dp)]
    if missing := [(d, rank) for d, rank in grid if d not in files.get(rank, {})]:
        some = ", ".join(f"dp_rank_{d:02d}_tp_rank_{tp:02d}_pp_rank_{pp:02d}" for d, (pp, tp) in missing[:4])
        more = " and others" if len(missing) > 4 else ""
        raise UserError(f"{folder}: {len(missing)} of {len(grid)} files are missing: {some}{more}")
    return {rank: tuple(files[rank][d] for d in range(dp)) for rank in ranks}


def _as_int(value: Any) -> int:
    """A step: some optimizers keep a number, some a tensor of one."""
    return int(value.read().item() if isinstance(value, LazyTensor) else value)
