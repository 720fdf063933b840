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

from trainyard.checkpoint.formats.hf import BUFFERS
from trainyard.checkpoint.formats.nxd import layout
from trainyard.checkpoint.formats.nxd.files import find_nxd, open_nxd, read_state
from trainyard.checkpoint.formats.nxd.infer_layout import Hints
from trainyard.checkpoint.formats.nxd.layout import Rank
from trainyard.checkpoint.formats.nxd.names import STYLES
from trainyard.checkpoint.formats.nxd.optimizer_files import (
    MASTERS,
    MOMENTS,
    Rows,
    Share,
    find_optimizer,
    read_share,
    rows_of_each,
)
from trainyard.checkpoint.formats.nxd.validate import Files, reader
from trainyard.checkpoint.formats.tensor_map import Scattered
from trainyard.checkpoint.io.torch_file import Lazy, open_pickle
from trainyard.checkpoint.native.partition import Box
from trainyard.config.model_schema import LlamaModel
from trainyard.core.errors import UserError
from trainyard.models import AnyModel

__all__ = ["NxdState", "find_optimizer", "open_nxd_state"]

NO_DECAY = re.compile("bias|norm")
ORDERS: dict[str, Callable[[list[str]], list[str]]] = {
    "the model's order": lambda names: names,
    "the order of decay and no decay": lambda names: sorted(names, key=lambda name: bool(NO_DECAY.search(name))),
}
# A master weight may be a bf16 step away from the weight: Trainium can round at random, and with XLA_DOWNCAST_BF16 what
# is saved as fp32 was bf16 on the device. (What is saved as fp64 was fp32 there.)
NEAR = torch.finfo(torch.bfloat16).eps
SAMPLE = 4096
"""Elements that are compared at each end of a parameter."""
STEP = re.compile(r"step[_=](\d+)")
COUNTERS = {"user_content.pt": ("total_steps", "global_step"), "scheduler.pt": ("last_epoch",)}


@dataclass(frozen=True)
class NxdState:
    """Weights and moments of a run, to be read box by box."""

    model: LlamaModel
    dtypes: dict[str, torch.dtype]
    """Of each kind: fp32, but for weights without master weights, which are as the model's files have them."""
    updates: int
    """That the optimizer has made."""
    step: int | None
    """Of the run, where the checkpoint tells."""
    kinds: Mapping[str, Scattered[Rank]]

    def tensor(self, kind: str, box: Box) -> Tensor:
        """A box of a part, from whichever files hold some of it."""
        region = tuple(slice(at, at + size) for at, size in zip(box.offsets, box.sizes, strict=True))
        return self.kinds[kind].read(box.part, region).to(self.dtypes[kind])


def open_nxd_state(path: Path, model: AnyModel, hints: Hints | None = None) -> NxdState:
    """The state at `path`, a checkpoint with model and optimizer; `hints` are those of open_nxd."""
    weights, found, optimizer = open_nxd(path, model, hints), find_nxd(path), find_optimizer(path)
    assert isinstance(weights.model, LlamaModel)
    assert found
    if optimizer is None:
        raise UserError(f"{path}: has no optimizer state (no optim directory beside model); its weights can be read")
    shares = {rank: [read_share(file) for file in files] for rank, files in optimizer.files.items()}
    every = [share for held in shares.values() for share in held]
    _check_alike(every)
    parameters = {rank: _parameters(weights.model, read_state(file)) for rank, file in found.files.items()}
    named = {rank: _named(held, parameters[rank]) for rank, held in shares.items()}
    stored = [
        (rank, each)
        for rank, held in layout.stored(weights.model, weights.layout).items()
        for each in held
        if each.name in parameters[rank]
    ]

    def scattered(files: Files) -> Scattered[Rank]:
        return Scattered(weights.model, stored, reader(files), lambda rank, name: files[rank][name].dtype)

    kinds = {kind: scattered({rank: held[kind] for rank, held in named.items()}) for kind in every[0].tensors}
    dtypes = dict.fromkeys(kinds, torch.float32)
    if "weights" not in kinds:
        kinds["weights"] = weights
        own = (lazy.dtype for held in parameters.values() for lazy in held.values())
        dtypes["weights"] = reduce(torch.promote_types, own)
    return NxdState(weights.model, dtypes, every[0].updates, _step(found.root), kinds)


def _check_alike(shares: list[Share]) -> None:
    """Every file has the same kinds of tensors, of the same update."""
    first = shares[0]
    for share in shares[1:]:
        if share.tensors.keys() != first.tensors.keys():
            has, lacks = (first, share) if "weights" in first.tensors else (share, first)
            raise UserError(f"{lacks.path}: has no {MASTERS}, but {has.path.name} has; they are not of one checkpoint")
        if share.updates != first.updates:
            raise UserError(
                f"{share.path}: is of update {share.updates}, {first.path.name} of {first.updates}; "
                "they are not of one checkpoint"
            )


def _parameters(model: LlamaModel, held: Mapping[str, Lazy]) -> dict[str, Lazy]:
    """What the optimizer knows of a rank's file. A tied head is no parameter of its own where the embedding is."""
    heads = [names.output for names in STYLES.values() if model.tied and names.embedding in held]
    return {name: lazy for name, lazy in held.items() if not BUFFERS.search(name) and name not in heads}


def _named(shares: Sequence[Share], weights: Mapping[str, Lazy]) -> dict[str, dict[str, Lazy]]:
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
    for order, sort in ORDERS.items():
        names = sort(list(weights))
        wrong = next((i for i, name in enumerate(names) if first.shapes[i] != weights[name].shape), None)
        if wrong is not None:
            has, wanted = list(first.shapes[wrong]), list(weights[names[wrong]].shape)
            misfits.append(f"in {order} number {wrong} would be {names[wrong]} {wanted}, but is {has}")
            continue
        merged = {kind: _merged(shares, kind, names) for kind in first.tensors}
        differing = (name for name, master in merged.get("weights", {}).items() if not _near(master, weights[name]))
        if (other := next(differing, None)) is None:
            return merged
        misfits.append(f"in {order} the master weights of {other} are not its weights")
    raise UserError(f"{first.path}: does not fit the model file beside it: {'; '.join(misfits)}")


def _merged(shares: Sequence[Share], kind: str, names: list[str]) -> dict[str, Lazy]:
    out: dict[str, Lazy] = {}
    for number, name in enumerate(names):
        shape = shares[0].shapes[number]
        wanted = (rows_of_each(shape, len(shares)), *shape[1:])
        for share in shares:
            if (has := share.tensors[kind][number].shape) != wanted:
                # NxDT without model.wrap_with_zero saves one rank's rows; nxd_convert_zero_checkpoints keeps only the
                # first rank's master weights.
                raise UserError(
                    f"{share.path}: {MOMENTS.get(kind, MASTERS)} of {name} is {list(has)}, wanted {list(wanted)}, for "
                    f"{list(shape)} shared out to {len(shares)} files; rows are missing, or it is of another checkpoint"
                )
        out[name] = Rows([share.tensors[kind][number] for share in shares], shape)
    return out


def _near(master: Lazy, weights: Lazy) -> bool:
    rows, *rest = weights.shape
    some = min(rows, max(1, SAMPLE // prod(rest)))
    for start in (0, rows - some):
        region = (slice(start, start + some), *(slice(0, size) for size in rest))
        ours, theirs = master.read(region).float(), weights.read(region).float()
        if not torch.allclose(ours, theirs, rtol=NEAR, atol=1e-7, equal_nan=True):
            return False
    return True


def _step(root: Path) -> int | None:
    tag = root.parent if root.name == "model" else root
    if named := STEP.findall(tag.name):
        return int(named[-1])
    for name, keys in COUNTERS.items():
        with suppress(UserError):  # anything may be in it
            content = open_pickle(tag / name, inert=True)
            counts = [content.get(key) for key in keys] if isinstance(content, dict) else []
            if number := next((count for count in counts if type(count) is int), None):
                return number
    return None
