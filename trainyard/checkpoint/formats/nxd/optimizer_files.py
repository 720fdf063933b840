"""Finds and reads the optimizer files of an NxD checkpoint; tensors are in the order of the optimizer's parameters.

    TAG/optim/dp_rank_00_tp_rank_00_pp_rank_00.pt    next to TAG/model; one per data-parallel rank with ZeRO-1
    optim.dp_rank_00.tp_rank_00                      before NxD 0.7, next to the model's files

ZeRO-1 pads the rows of each parameter with zeros to a multiple of the data-parallel size and gives each rank an equal
range of rows. `RowShardedTensor` presents these ranges as one tensor.
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
from trainyard.checkpoint.io.torch_file import LazyTensor, open_torch_file
from trainyard.core.errors import UserError, one_line
from trainyard.core.tensor_slice import TensorIndex, TensorSlice

OLD_OPTIMIZER_NAME = re.compile(r"optim\.dp_rank_(?P<dp>\d+)\.tp_rank_(?P<tp>\d+)")
MASTER_WEIGHTS_KEY = "sharded_master_weights"
MOMENT_KEYS = {"first": "exp_avg", "second": "exp_avg_sq"}
"""Names of the moments in the files, by kind of state."""


@dataclass(frozen=True)
class OptimizerFiles:
    root: Path
    """The directory of the files."""
    files: dict[PpTpRank, tuple[Path, ...]]
    """For each rank of the model, the files of its data-parallel ranks in order."""


def find_optimizer(path: Path) -> OptimizerFiles | None:
    """Find the optimizer files of the checkpoint at `path` (any path that find_nxd accepts). None: it has none."""
    model = find_nxd(path)
    if model is None:
        return None
    tag = model.root.parent
    for folder, names in (
        (tag / "optim", (CURRENT_FILE_NAME, OLD_OPTIMIZER_NAME)),
        (tag, (OLD_OPTIMIZER_NAME,)),
        (model.root, (OLD_OPTIMIZER_NAME,)),
    ):
        if files := _find_files(folder, names):
            return OptimizerFiles(folder, _complete_grid(folder, files, list(model.files)))
    if unknown := sorted(file.name for file in (tag / "optim").glob("*")):
        raise UserError(
            f"{tag / 'optim'}: has {unknown[0]}, but no dp_rank_00_tp_rank_00_pp_rank_00.pt; the output of "
            "use_zero1_dcp and of nxd_convert_zero_checkpoints --convert_to_full is not supported"
        )
    return None


@dataclass(frozen=True)
class OptimizerShard:
    """The content of one file, with parameters in the optimizer's order."""

    path: Path
    shapes: list[tuple[int, ...]]
    """Shapes of the rank's full parameters, without padding."""
    tensors: dict[str, list[LazyTensor]]
    """This file's rows of the moments, and of the master weights ("weights") if they were saved."""
    updates: int


def read_optimizer_shard(path: Path) -> OptimizerShard:
    state = open_torch_file(path, allow_stubs=True)
    try:
        ids = [param_id for group in state["param_groups"] for param_id in group["params"]]
        states = state["base_state"] if "base_state" in state else state["state"]  # base_state: ZeRO-1
        missing = [param_id for param_id in ids if param_id not in states]
        if missing or not ids:
            raise UserError(
                f"{path}: holds no state for {len(missing)} of its {len(ids)} parameters; "
                "it was saved before the first update, or some were frozen"
            )
        tensors = {kind: [states[param_id][key] for param_id in ids] for kind, key in MOMENT_KEYS.items()}
        if MASTER_WEIGHTS_KEY in state:
            tensors["weights"] = [state[MASTER_WEIGHTS_KEY][param_id] for param_id in ids]
        if not all(isinstance(tensor, LazyTensor) for values in tensors.values() for tensor in values):
            raise TypeError("a value is not a tensor")
        shapes = [tensor.shape for tensor in tensors["first"]]
        if "base_state" in state:
            shapes = [tuple(state["shape_info"][param_id]) for param_id in ids]
        return OptimizerShard(path, shapes, tensors, _as_int(states[ids[0]]["step"]))
    except UserError:
        raise
    except (LookupError, TypeError, ValueError, RuntimeError, OverflowError) as error:
        reason = f"{type(error).__name__} {one_line(error)}"
        raise UserError(f"{path}: not the state of an Adam optimizer as NxD saves it: {reason}") from None


class RowShardedTensor(LazyTensor):
    """A tensor whose rows are distributed over several files in equal numbers; rows beyond `shape` are padding."""

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
        rows, *rest = index or TensorSlice.full("", self._shape).to_index()
        out = []
        for i in range(rows.start // self._rows_per_file, -(-rows.stop // self._rows_per_file)):
            first_row = i * self._rows_per_file
            file_rows = slice(max(rows.start - first_row, 0), min(rows.stop - first_row, self._rows_per_file))
            out.append(self._files[i].read((file_rows, *rest)))
        return out[0] if len(out) == 1 else torch.cat(out)


def rows_per_file(shape: tuple[int, ...], files: int) -> int:
    return -(-shape[0] // files)


def _find_files(folder: Path, names: Sequence[re.Pattern[str]]) -> dict[PpTpRank, dict[int, Path]]:
    files: dict[PpTpRank, dict[int, Path]] = {}
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        match = next(filter(None, (name.fullmatch(path.name) for name in names)), None)
        if not match:  # such as the .tensors and .info.pt files of xser
            continue
        rank = {key: int(value or 0) for key, value in match.groupdict().items()}
        if rank.get("ep"):
            raise UserError(f"{path}: file of an expert-parallel rank; Llama models have no experts")
        files.setdefault((rank.get("pp", 0), rank["tp"]), {})[rank["dp"]] = path
    return files


def _complete_grid(
    folder: Path, files: dict[PpTpRank, dict[int, Path]], ranks: list[PpTpRank]
) -> dict[PpTpRank, tuple[Path, ...]]:
    """The files in rank order. Refuses missing files and files of ranks that the model does not have."""
    if extra := sorted(set(files) - set(ranks)):
        pp, tp = extra[0]
        raise UserError(f"{folder}: has tp_rank_{tp:02d}_pp_rank_{pp:02d}, which the model's files do not have")
    dp = max(max(by_dp) for by_dp in files.values()) + 1
    grid = [(d, rank) for rank in ranks for d in range(dp)]
    if missing := [(d, rank) for d, rank in grid if d not in files.get(rank, {})]:
        names = ", ".join(f"dp_rank_{d:02d}_tp_rank_{tp:02d}_pp_rank_{pp:02d}" for d, (pp, tp) in missing[:4])
        more = " and others" if len(missing) > 4 else ""
        raise UserError(f"{folder}: {len(missing)} of {len(grid)} files are missing: {names}{more}")
    return {rank: tuple(files[rank][d] for d in range(dp)) for rank in ranks}


def _as_int(value: Any) -> int:
    """A step count, which some optimizers store as a number and others as a tensor."""
    return int(value.read().item() if isinstance(value, LazyTensor) else value)
