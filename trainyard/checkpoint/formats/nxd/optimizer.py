"""Reads the training state of an NxD run: master weights and AdamW's moments, saved at any tp, pp and dp.

The optimizer's tensors are sharded as the model's, so the description of the model's files also serves for them. What
the optimizer's files lack is names: parameters are numbered in the order of their groups. The examples of NxD and NxDT
put all parameters of a Llama model into one group (they look for the name LayerNorm, which does not occur); NeMo and
transformers have a second group, without weight decay, for norms and biases. Both orders are tried against the stored
shapes and, if there are master weights, against the weights themselves. State that fits neither order is refused.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import reduce
from math import prod
from pathlib import Path

import torch

from trainyard.checkpoint.formats.hf import IGNORED_BUFFERS
from trainyard.checkpoint.formats.nxd.files import open_nxd
from trainyard.checkpoint.formats.nxd.infer_layout import LayoutHints
from trainyard.checkpoint.formats.nxd.layout import is_key_or_value, rank_tensors, require_nxd_model
from trainyard.checkpoint.formats.nxd.names import NAME_TABLES
from trainyard.checkpoint.formats.nxd.optimizer_files import (
    MASTER_WEIGHTS_KEY,
    MOMENT_KEYS,
    OptimizerShard,
    RowShardedTensor,
    find_optimizer,
    read_optimizer_shard,
    rows_per_file,
)
from trainyard.checkpoint.formats.tensor_map import ShardedWeights, TrainingState
from trainyard.checkpoint.io.torch_file import LazyTensor, open_torch_file
from trainyard.core.errors import UserError
from trainyard.core.quantities import counted
from trainyard.core.tensor_slice import TensorSlice
from trainyard.families.decoder import DecoderConfig
from trainyard.models import ModelConfig

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
        out[name] = RowShardedTensor([shard.tensors[kind][i] for shard in shards], full_shape)
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
