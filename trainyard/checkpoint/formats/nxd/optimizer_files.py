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

import torch
from torch import Tensor

from trainyard.checkpoint.formats.nxd.files import (
    CURRENT_FILE_NAME,
    check_complete,
    find_nxd,
    find_rank_files,
    rank_name,
)
from trainyard.checkpoint.formats.nxd.layout import NxdRank
from trainyard.checkpoint.io.torch_file import LazyTensor, open_torch_file
from trainyard.core.errors import UserError, one_line
from trainyard.core.quantities import counted
from trainyard.core.tensor_slice import TensorIndex, TensorSlice

OLD_OPTIMIZER_NAME = re.compile(r"optim\.dp_rank_(?P<dp>\d+)\.tp_rank_(?P<tp>\d+)")
MASTER_WEIGHTS_KEY = "sharded_master_weights"
MOMENT_KEYS = {"first": "exp_avg", "second": "exp_avg_sq"}
"""Names of the moments in the files, by kind of state."""


def find_optimizer(path: Path) -> dict[NxdRank, tuple[Path, ...]] | None:
    """Find the optimizer files of the checkpoint at `path` (any path that find_nxd accepts). None: it has none.

    For each rank of the model, these are the files of its data-parallel ranks in order. With expert parallelism, files
    are divided among the ranks in other ways: they are those that exist, and nothing reads them.
    """
    model = find_nxd(path)
    if model is None:
        return None
    tag, old = model.root.parent, (OLD_OPTIMIZER_NAME,)
    for folder, names in {tag / "optim": (CURRENT_FILE_NAME, *old), tag: old, model.root: old}.items():
        if files := find_rank_files(folder, *names):
            if any(rank.ep for rank in model.files):
                return {rank: tuple(by_dp.values()) for rank, by_dp in files.items()}
            return _complete_grid(folder, files, list(model.files))
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
                f"{path}: holds no state for {len(missing)} of its {counted(len(ids), 'parameter')}; "
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
        step = states[ids[0]]["step"]  # a number, or a tensor in some optimizers
        return OptimizerShard(path, shapes, tensors, int(step.read().item() if isinstance(step, LazyTensor) else step))
    except UserError:
        raise
    except (LookupError, TypeError, ValueError, RuntimeError, OverflowError) as error:
        reason = f"{type(error).__name__} {one_line(error)}"
        raise UserError(f"{path}: not the state of an Adam optimizer as NxD saves it: {reason}") from None


class RowShardedTensor(LazyTensor):
    """A tensor whose rows are distributed over several files in equal numbers; rows beyond `shape` are padding."""

    def __init__(self, files: Sequence[LazyTensor], shape: tuple[int, ...]) -> None:
        self._files, self.shape, self.dtype = files, shape, files[0].dtype
        self._rows_per_file = rows_per_file(shape, len(files))

    def read(self, index: TensorIndex | None = None) -> Tensor:
        rows, *rest = index or TensorSlice.full("", self.shape).to_index()
        out = []
        for i in range(rows.start // self._rows_per_file, -(-rows.stop // self._rows_per_file)):
            first_row = i * self._rows_per_file
            file_rows = slice(max(rows.start - first_row, 0), min(rows.stop - first_row, self._rows_per_file))
            out.append(self._files[i].read((file_rows, *rest)))
        return out[0] if len(out) == 1 else torch.cat(out)


def rows_per_file(shape: tuple[int, ...], files: int) -> int:
    return -(-shape[0] // files)


def _complete_grid(
    folder: Path, files: dict[NxdRank, dict[int, Path]], ranks: list[NxdRank]
) -> dict[NxdRank, tuple[Path, ...]]:
    """The files in rank order. Refuses missing files and files of ranks that the model does not have."""
    if extra := sorted(set(files) - set(ranks)):
        raise UserError(f"{folder}: has {rank_name(extra[0], extra[0].ep + 1)}, which the model's files do not have")
    dp = max(max(by_dp) for by_dp in files.values()) + 1
    exists = {f"dp_rank_{d:02d}_{rank_name(rank, 1)}": d in files.get(rank, {}) for rank in ranks for d in range(dp)}
    check_complete(folder, "files", exists)
    return {rank: tuple(files[rank][d] for d in range(dp)) for rank in ranks}
