"""Reads the training state of an NxD run: master weights and AdamW's moments, saved at any tp, pp and dp.

The optimizer's tensors are sharded as the model's, so the description of the model's files also serves for them. What
the optimizer's files lack is names: parameters are numbered in the order of their groups. The examples of NxD and NxDT
put all parameters of a Llama model into one group (they look for the name LayerNorm, which does not occur); NeMo and
transformers have a second group, without weight decay, for norms and biases. Both orders are tried against the stored
shapes and, if there are master weights, against the weights themselves. State that fits neither order is refused.

Files and tensors, in the order of the optimizer's parameters:

    TAG/optim/dp_rank_00_tp_rank_00_pp_rank_00.pt    next to TAG/model; one per data-parallel rank with ZeRO-1
    optim.dp_rank_00.tp_rank_00                      before NxD 0.7, next to the model's files

ZeRO-1 pads the rows of each parameter with zeros to a multiple of the data-parallel size and gives each rank an equal
range of rows.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import reduce
from math import prod
from pathlib import Path

import torch

from trainyard.checkpoint.weights import TrainingState
from trainyard.core.errors import UserError, one_line
from trainyard.core.quantities import counted
from trainyard.core.tensor_slice import TensorSlice
from trainyard.families.decoder import DecoderConfig
from trainyard.formats.format import LayoutHints
from trainyard.formats.hf import IGNORED_BUFFERS
from trainyard.formats.io.lazy_tensor import AssembledTensor, LazyTensor
from trainyard.formats.io.torch_file import open_torch_file
from trainyard.formats.nxd.layout import NxdRank, is_key_or_value, rank_tensors, require_nxd_model
from trainyard.formats.nxd.names import NAME_TABLES
from trainyard.formats.nxd.rank_files import (
    CURRENT_FILE_NAME,
    check_complete,
    find_nxd,
    find_rank_files,
    open_nxd,
    rank_name,
)
from trainyard.formats.tensor_map import ShardedWeights
from trainyard.models import ModelConfig

OLD_OPTIMIZER_NAME = re.compile(r"optim\.dp_rank_(?P<dp>\d+)\.tp_rank_(?P<tp>\d+)")
MASTER_WEIGHTS_KEY = "sharded_master_weights"
MOMENT_KEYS = {"first": "exp_avg", "second": "exp_avg_sq"}
"""Names of the moments in the files, by kind of state."""
NO_DECAY_NAME = re.compile("bias|norm")
PARAM_ORDERS: dict[str, Callable[[list[str]], list[str]]] = {
    "the model's order": lambda names: names,
    "the order of decay and no decay": lambda names: sorted(names, key=lambda name: bool(NO_DECAY_NAME.search(name))),
}
MASTER_RTOL = torch.finfo(torch.bfloat16).eps
"""A master weight may differ from the weight by one bf16 step: Trainium supports stochastic rounding, and with
XLA_DOWNCAST_BF16 a tensor saved as fp32 was bf16 on the device (and one saved as fp64 was fp32)."""
SAMPLE_ELEMENTS = 4096
"""Elements compared at each end of a parameter."""
STEP_IN_TAG = re.compile(r"step[_=](\d+)")
STEP_COUNTER_FILES = {"user_content.pt": ("total_steps", "global_step"), "scheduler.pt": ("last_epoch",)}


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


def join_rows(name: str, files: Sequence[LazyTensor], shape: tuple[int, ...]) -> LazyTensor:
    """The tensor whose rows are distributed over several files in equal numbers; rows beyond `shape` are padding."""
    full, rows = TensorSlice.full(name, shape), rows_per_file(shape, len(files))
    starts = (min(i * rows, shape[0]) for i in range(len(files)))
    pieces = [full.narrow(0, start, min(start + rows, shape[0])) for start in starts]
    dtype = reduce(torch.promote_types, (file.dtype for file in files))
    return AssembledTensor(name, shape, dtype, list(zip(pieces, files, strict=True)))


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


def open_nxd_state(path: Path, model: ModelConfig, hints: LayoutHints | None = None) -> TrainingState:
    """Open the state at `path`, a checkpoint with model and optimizer. `hints` are those of open_nxd.

    All state is fp32, except for weights without master weights, which keep their dtype.
    """
    decoder, weights, files = require_nxd_model(model), open_nxd(path, model, hints), find_optimizer(path)
    if files is None:
        raise UserError(f"{path}: has no optimizer state (no directory optim next to model), only weights")
    if weights.layout.ep > 1:
        raise UserError(
            f"{path}: optimizer state with ep_size={weights.layout.ep} is not supported, as its files do not say which "
            "ranks' experts it is of; use --weights-only"
        )
    shards = {rank: [read_optimizer_shard(file) for file in rank_files] for rank, rank_files in files.items()}
    all_shards = [shard for rank_shards in shards.values() for shard in rank_shards]
    _check_consistent(all_shards)
    parameters = {rank: _trained_parameters(decoder, tensors) for rank, tensors in weights.rank_tensors.items()}
    named = {rank: _name_tensors(rank_shards, parameters[rank]) for rank, rank_shards in shards.items()}
    stored = [
        (rank, tensor)
        for rank, tensors in rank_tensors(decoder, weights.layout).items()
        for tensor in tensors
        if tensor.name in parameters[rank]
    ]
    sources: dict[str, ShardedWeights] = {
        kind: ShardedWeights(
            decoder, ((tensor, named[rank][kind][tensor.name]) for rank, tensor in stored), is_key_or_value
        )
        for kind in all_shards[0].tensors
    }
    dtypes = dict.fromkeys(sources, torch.float32)
    if "weights" not in sources:
        sources["weights"] = weights
        stored_dtypes = (tensor.dtype for tensors in parameters.values() for tensor in tensors.values())
        dtypes["weights"] = reduce(torch.promote_types, stored_dtypes)
    counters = {"updates": all_shards[0].updates}
    if (step := _find_step(weights.files.root)) is not None:
        counters["step"] = step
    return TrainingState(decoder, dtypes, {kind: source.read for kind, source in sources.items()}, counters)


def _check_consistent(shards: list[OptimizerShard]) -> None:
    """Refuse files with different kinds of tensors, or of different updates."""
    first = shards[0]
    for shard in shards[1:]:
        if shard.tensors.keys() != first.tensors.keys():
            has, lacks = (first, shard) if "weights" in first.tensors else (shard, first)
            problem = f"{lacks.path}: has no {MASTER_WEIGHTS_KEY}, but {has.path.name} has"
        elif shard.updates != first.updates:
            problem = f"{shard.path}: is of update {shard.updates}, {first.path.name} of {first.updates}"
        else:
            continue
        raise UserError(f"{problem}; they do not belong to one checkpoint")


def _trained_parameters(model: DecoderConfig, tensors: Mapping[str, LazyTensor]) -> dict[str, LazyTensor]:
    """The tensors of a rank's file that the optimizer has state for. A tied output projection on the rank of the
    embedding is the same parameter as the embedding."""
    tied = [names.output for names in NAME_TABLES.values() if model.tie_embeddings and names.embedding in tensors]
    return {name: tensor for name, tensor in tensors.items() if not IGNORED_BUFFERS.search(name) and name not in tied}


def _name_tensors(
    shards: Sequence[OptimizerShard], weights: Mapping[str, LazyTensor]
) -> dict[str, dict[str, LazyTensor]]:
    """The tensors of a rank by kind and name, in the first parameter order that fits."""
    first, problems = shards[0], []
    for shard in shards:
        if len(shard.shapes) != len(weights):
            raise UserError(
                f"{shard.path}: has {counted(len(shard.shapes), 'parameter')}, its model file {len(weights)}; "
                "expected a run that trains all parameters"
            )
        if shard.shapes != first.shapes:
            raise UserError(f"{shard.path}: its parameters have other shapes than those of {first.path.name}")
    for order, sort in PARAM_ORDERS.items():
        names = sort(list(weights))
        wrong = next((i for i, name in enumerate(names) if first.shapes[i] != weights[name].shape), None)
        if wrong is not None:
            shape, expected = list(first.shapes[wrong]), list(weights[names[wrong]].shape)
            problems.append(f"in {order} parameter {wrong} is {names[wrong]} {expected}, but has shape {shape}")
            continue
        merged = {kind: _merge_shards(shards, kind, names) for kind in first.tensors}
        different = (
            name for name, master in merged.get("weights", {}).items() if not _nearly_equal(master, weights[name])
        )
        if (name := next(different, None)) is None:
            return merged
        problems.append(f"in {order} the master weights of {name} differ from its weights")
    raise UserError(f"{first.path}: does not fit its model file: {'; '.join(problems)}")


def _merge_shards(shards: Sequence[OptimizerShard], kind: str, names: list[str]) -> dict[str, LazyTensor]:
    out: dict[str, LazyTensor] = {}
    for i, name in enumerate(names):
        full_shape = shards[0].shapes[i]
        expected = (rows_per_file(full_shape, len(shards)), *full_shape[1:])
        for shard in shards:
            if (shape := shard.tensors[kind][i].shape) != expected:
                # NxDT without model.wrap_with_zero saves one rank's rows; nxd_convert_zero_checkpoints keeps only the
                # first rank's master weights.
                raise UserError(
                    f"{shard.path}: {MOMENT_KEYS.get(kind, MASTER_WEIGHTS_KEY)} of {name} is {list(shape)}, expected "
                    f"{list(expected)}, for {list(full_shape)} sharded over {counted(len(shards), 'file')}; "
                    "rows are missing, or it belongs to another checkpoint"
                )
        out[name] = join_rows(name, [shard.tensors[kind][i] for shard in shards], full_shape)
    return out


def _nearly_equal(master: LazyTensor, weights: LazyTensor) -> bool:
    """Compare the first and the last rows."""
    full, rows = TensorSlice.full("", weights.shape), weights.shape[0]
    sample_rows = min(rows, max(1, SAMPLE_ELEMENTS // prod(weights.shape[1:])))
    for start in (0, rows - sample_rows):
        index = full.narrow(0, start, start + sample_rows).to_index()
        sampled = master.read(index).float(), weights.read(index).float()
        if not torch.allclose(*sampled, rtol=MASTER_RTOL, atol=1e-7, equal_nan=True):
            return False
    return True


def _find_step(root: Path) -> int | None:
    tag = root.parent if root.name == "model" else root
    if steps := STEP_IN_TAG.findall(tag.name):
        return int(steps[-1])
    for name, keys in STEP_COUNTER_FILES.items():
        with suppress(UserError):  # the content of these files is up to the user
            content = open_torch_file(tag / name, allow_stubs=True)
            counts = [content.get(key) for key in keys] if isinstance(content, dict) else []
            if step := next((count for count in counts if type(count) is int), None):
                return step
    return None
