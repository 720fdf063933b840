"""What an NxD run needs to go on here: master weights and AdamW's moments, at whatever tp, pp and dp it was saved.

The optimizer's tensors lie as the model's do, so the description of the model's files serves for them as well. What the
optimizer's files do not have are names: parameters are numbered in the order of their groups. NxD's and NxDT's own
examples put all of a Llama model into one group (the names that they look for, LayerNorm, are not in it); NeMo and
transformers have a second one, without weight decay, for norms and biases. Both orders are tried, against the shapes
that the files give and, where there are master weights, against the weights themselves. What fits neither is refused.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import reduce
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from trainyard.checkpoint.formats.hf import IGNORED_BUFFERS
from trainyard.checkpoint.formats.nxd import layout
from trainyard.checkpoint.formats.nxd.files import find_nxd, open_nxd, read_rank_file
from trainyard.checkpoint.formats.nxd.infer_layout import LayoutHints
from trainyard.checkpoint.formats.nxd.layout import PpTpRank
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
from trainyard.checkpoint.formats.nxd.validate import RankFiles, index_reader
from trainyard.checkpoint.formats.tensor_map import ShardedWeights
from trainyard.checkpoint.io.torch_file import LazyTensor, open_torch_file
from trainyard.checkpoint.native.partition import LocalSlice
from trainyard.config.model_schema import LlamaConfig
from trainyard.core.errors import UserError
from trainyard.models import AnyModelConfig

__all__ = ["NxdTrainingState", "find_optimizer", "open_nxd_state"]

NO_DECAY_NAME = re.compile("bias|norm")
PARAM_ORDERS: dict[str, Callable[[list[str]], list[str]]] = {
    "the model's order": lambda names: names,
    "the order of decay and no decay": lambda names: sorted(names, key=lambda name: bool(NO_DECAY_NAME.search(name))),
}
# A master weight may be a bf16 step away from the weight: Trainium can round at random, and with XLA_DOWNCAST_BF16 what
# is saved as fp32 was bf16 on the device. (What is saved as fp64 was fp32 there.)
MASTER_RTOL = torch.finfo(torch.bfloat16).eps
SAMPLE_ELEMENTS = 4096
"""Elements that are compared at each end of a parameter."""
STEP_IN_TAG = re.compile(r"step[_=](\d+)")
STEP_COUNTER_FILES = {"user_content.pt": ("total_steps", "global_step"), "scheduler.pt": ("last_epoch",)}


@dataclass(frozen=True)
class NxdTrainingState:
    """Weights and moments of a run, to be read box by box."""

    model: LlamaConfig
    dtypes: dict[str, torch.dtype]
    """Of each kind: fp32, but for weights without master weights, which are as the model's files have them."""
    updates: int
    """That the optimizer has made."""
    step: int | None
    """Of the run, where the checkpoint tells."""
    sources: Mapping[str, ShardedWeights[PpTpRank]]

    def read_state(self, kind: str, box: LocalSlice) -> Tensor:
        """A box of a part, from whichever files hold some of it."""
        region = tuple(slice(at, at + size) for at, size in zip(box.offsets, box.sizes, strict=True))
        return self.sources[kind].read(box.tensor_name, region).to(self.dtypes[kind])


def open_nxd_state(path: Path, model: AnyModelConfig, hints: LayoutHints | None = None) -> NxdTrainingState:
    """The state at `path`, a checkpoint with model and optimizer; `hints` are those of open_nxd."""
    weights, found, optimizer = open_nxd(path, model, hints), find_nxd(path), find_optimizer(path)
    assert isinstance(weights.model, LlamaConfig)
    assert found
    if optimizer is None:
        raise UserError(f"{path}: has no optimizer state (no optim directory beside model); its weights can be read")
    shares = {rank: [read_optimizer_shard(file) for file in files] for rank, files in optimizer.files.items()}
    every = [share for held in shares.values() for share in held]
    _check_consistent(every)
    parameters = {rank: _trained_parameters(weights.model, read_rank_file(file)) for rank, file in found.files.items()}
    named = {rank: _name_tensors(held, parameters[rank]) for rank, held in shares.items()}
    stored = [
        (rank, each)
        for rank, held in layout.rank_tensors(weights.model, weights.layout).items()
        for each in held
        if each.name in parameters[rank]
    ]

    def scattered(files: RankFiles) -> ShardedWeights[PpTpRank]:
        return ShardedWeights(weights.model, stored, index_reader(files), lambda rank, name: files[rank][name].dtype)

    kinds = {kind: scattered({rank: held[kind] for rank, held in named.items()}) for kind in every[0].tensors}
    dtypes = dict.fromkeys(kinds, torch.float32)
    if "weights" not in kinds:
        kinds["weights"] = weights
        own = (lazy.dtype for held in parameters.values() for lazy in held.values())
        dtypes["weights"] = reduce(torch.promote_types, own)
    return NxdTrainingState(weights.model, dtypes, every[0].updates, _find_step(found.root), kinds)


def _check_consistent(shares: list[OptimizerShard]) -> None:
    """Every file has the same kinds of tensors, of the same update."""
    first = shares[0]
    for share in shares[1:]:
        if share.tensors.keys() != first.tensors.keys():
            has, lacks = (first, share) if "weights" in first.tensors else (share, first)
            raise UserError(
                f"{lacks.path}: has no {MASTER_WEIGHTS_KEY}, but {has.path.name} has; they are not of one checkpoint"
            )
        if share.updates != first.updates:
            raise UserError(
                f"{share.path}: is of update {share.updates}, {first.path.name} of {first.updates}; "
                "they are not of one checkpoint"
            )


def _trained_parameters(model: LlamaConfig, held: Mapping[str, LazyTensor]) -> dict[str, LazyTensor]:
    """What the optimizer knows of a rank's file. A tied head is no parameter of its own where the embedding is."""
    heads = [names.output for names in NAME_TABLES.values() if model.tie_embeddings and names.embedding in held]
    return {name: lazy for name, lazy in held.items() if not IGNORED_BUFFERS.search(name) and name not in heads}


def _name_tensors(
    shares: Sequence[OptimizerShard], weights: Mapping[str, LazyTensor]
) -> dict[str, dict[str, LazyTensor]]:
    """A rank's tensors of each kind by name, in the first order of parameters that fits."""
    first, misfits = shares[0], []
    for share in shares:
        if len(share.shapes) != len(weights):
            raise UserError(
                f"{share.path}: has {len(share.shapes)} parameters, its model file {len(weights)}; "
                "a run that trains all of the model was expected"
            )
        if share.shapes != first.shapes:
            raise UserError(f"{share.path}: its parameters have other shapes than those of {first.path.name}")
    for order, sort in PARAM_ORDERS.items():
        names = sort(list(weights))
        wrong = next((i for i, name in enumerate(names) if first.shapes[i] != weights[name].shape), None)
        if wrong is not None:
            has, wanted = list(first.shapes[wrong]), list(weights[names[wrong]].shape)
            misfits.append(f"in {order} number {wrong} would be {names[wrong]} {wanted}, but is {has}")
            continue
        merged = {kind: _merge_shards(shares, kind, names) for kind in first.tensors}
        differing = (
            name for name, master in merged.get("weights", {}).items() if not _nearly_equal(master, weights[name])
        )
        if (other := next(differing, None)) is None:
            return merged
        misfits.append(f"in {order} the master weights of {other} are not its weights")
    raise UserError(f"{first.path}: does not fit the model file beside it: {'; '.join(misfits)}")


def _merge_shards(shares: Sequence[OptimizerShard], kind: str, names: list[str]) -> dict[str, LazyTensor]:
    out: dict[str, LazyTensor] = {}
    for number, name in enumerate(names):
        shape = shares[0].shapes[number]
        wanted = (rows_per_file(shape, len(shares)), *shape[1:])
        for share in shares:
            if (has := share.tensors[kind][number].shape) != wanted:
                # NxDT without model.wrap_with_zero saves one rank's rows; nxd_convert_zero_checkpoints keeps only the
                # first rank's master weights.
                raise UserError(
                    f"{share.path}: {MOMENT_KEYS.get(kind, MASTER_WEIGHTS_KEY)} of {name} is {list(has)}, wanted {list(wanted)}, for "
                    f"{list(shape)} shared out to {len(shares)} files; rows are missing, or it is of another checkpoint"
                )
        out[name] = RowShardedTensor([share.tensors[kind][number] for share in shares], shape)
    return out


def _nearly_equal(master: LazyTensor, weights: LazyTensor) -> bool:
    rows, *rest = weights.shape
    some = min(rows, max(1, SAMPLE_ELEMENTS // prod(rest)))
    for start in (0, rows - some):
        region = (slice(start, start + some), *(slice(0, size) for size in rest))
        ours, theirs = master.read(region).float(), weights.read(region).float()
        if not torch.allclose(ours, theirs, rtol=MASTER_RTOL, atol=1e-7, equal_nan=True):
            return False
    return True


def _find_step(root: Path) -> int | None:
    tag = root.parent if root.name == "model" else root
    if named := STEP_IN_TAG.findall(tag.name):
        return int(named[-1])
    for name, keys in STEP_COUNTER_FILES.items():
        with suppress(UserError):  # anything may be in it
            content = open_torch_file(tag / name, allow_stubs=True)
            counts = [content.get(key) for key in keys] if isinstance(content, dict) else []
            if number := next((count for count in counts if type(count) is int), None):
                return number
    return None
