"""Whether a layout trains the same model as one rank does: initial weights, batches, losses, gradients, new weights.

`record` runs a few steps and brings everything together on rank 0, whole, so that two records can be compared whatever
layouts they come from.
"""

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from trainyard.config.schema import Config
from trainyard.parallel.attention_blocks import natural
from trainyard.parallel.layout import Layout
from trainyard.train.cross_entropy import IGNORED
from trainyard.train.lr_schedule import rate
from trainyard.train.micro_batches import SEQUENCES, context_part
from trainyard.train.optim.gather_full import whole
from trainyard.train.trainer import Trainer

Tensors = dict[str, Tensor]
LOSS, CLOSE = 1e-6, 1e-5
"""Largest relative differences in fp32. Of a tensor: over its largest element."""
FLOOR = 1e-2
"""Of the largest element of all tensors: what smaller tensors are measured against, so that CLOSE of it is what fp32
rounds off. Sums that cancel (the bias of the next-sentence head, where a batch has as many true pairs as false ones)
leave the rounding of what they are made of."""
LOSS_BF16, CLOSE_BF16, FLOOR_BF16 = 5e-3, 0.1, 2e-2
"""The same where bf16 rounds each product differently: of a sum that cancels, little but rounding is left."""


@dataclass
class Record:
    start: Tensors = field(default_factory=dict)
    """Initial weights."""
    batches: list[Tensors] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    gradients: list[Tensors] = field(default_factory=list)
    """Before clipping, for each step."""
    end: Tensors = field(default_factory=dict)
    """Weights after the last step."""


@dataclass(frozen=True)
class Finding:
    """One line of the result."""

    what: str
    worst: float
    """Largest relative difference."""
    where: str
    limit: float

    @property
    def ok(self) -> bool:
        return self.worst <= self.limit


def record(config: Config, steps: int) -> Record:
    """Train `steps` steps. All ranks call this; rank 0 gets the record, the others an empty one."""
    trainer = Trainer(config)
    names, optimizer, leads = list(trainer.blueprint.names()), trainer.optimizer, trainer.mesh.rank == 0
    out = Record()

    def collect(row: Tensor) -> Tensors:
        found = {name: whole(optimizer, trainer.blueprint, row, name) for name in names}
        return {name: value.float().cpu().clone() for name, value in found.items()} if leads else {}

    for model in trainer.models:
        model.train()
    out.start = collect(optimizer.master)
    trainer.step.look = lambda: out.gradients.append(collect(optimizer.sums))
    for number in range(steps):
        batch = trainer.loader.batch(number, trainer.rows)
        out.batches.append(_global_batch(trainer, batch))
        result = trainer.step(batch, number + 1, rate(config, number + 1))
        out.losses.append(float(result.loss))
        out.norms.append(float(result.grad_norm))
    optimizer.settle()
    out.end = collect(optimizer.master)
    return out


def compare(found: Record, wanted: Record, precision: str) -> list[Finding]:
    """How far two records are apart, kind by kind."""
    exact = precision == "fp32"
    loss, close, floor = (LOSS, CLOSE, FLOOR) if exact else (LOSS_BF16, CLOSE_BF16, FLOOR_BF16)
    batches = [_worst(a, b) for a, b in zip(found.batches, wanted.batches, strict=True)]
    gradients = [_worst(a, b, floor) for a, b in zip(found.gradients, wanted.gradients, strict=True)]
    start, end = _worst(found.start, wanted.start), _worst(found.end, wanted.end)
    losses = [abs(a - b) / abs(b) for a, b in zip(found.losses, wanted.losses, strict=True)]
    norms = [abs(a - b) / abs(b) for a, b in zip(found.norms, wanted.norms, strict=True)]
    steps = len(losses)
    return [
        Finding("initial weights", *start, 0.0),
        Finding("batches", *max(batches), 0.0),
        Finding("loss", max(losses), f"step {losses.index(max(losses)) + 1}", loss),
        Finding("gradient norm", max(norms), f"step {norms.index(max(norms)) + 1}", close),
        Finding("gradients", *max(gradients), close),
        Finding(f"weights after {steps} steps", *end, close),
    ]


def single(config: Config) -> Config:
    """The same training on one rank."""
    whole = {"tp": 1, "pp": 1, "vpp": 1, "cp": 1, "zero": 0, "cuts": (), "schedule": "1f1b", "sequence_parallel": False}
    return config.model_copy(update={"layout": config.layout.model_copy(update={**whole, "ranks": None})})


def _worst(found: Tensors, wanted: Tensors, least: float = FLOOR) -> tuple[float, str]:
    """The largest difference of any tensor over its largest element, and which.

    Next to the largest of all tensors a very small one is rounding alone (the gradient of a key's bias is 0 in
    theory): it is measured against `least` times that.
    """
    if found.keys() != wanted.keys():
        return float("inf"), min(found.keys() ^ wanted.keys())
    out = (0.0, "")
    floor = least * max(b.double().abs().max().item() for b in wanted.values() if b.numel())
    for name, b in wanted.items():
        a = found[name]
        if a.shape != b.shape:
            return float("inf"), name
        gap = (a.double() - b.double()).abs().max().item() if a.numel() else 0.0
        if gap != 0:  # NaN included
            size = max(b.double().abs().max().item(), floor)
            relative = gap / size if size else float("inf")
            out = max(out, (relative if relative == relative else float("inf"), name))
    return out


def _global_batch(trainer: Trainer, batch: Tensors) -> Tensors:
    """The batch that all ranks together work on, in order; ranks that should have the same must."""
    layout, mesh = trainer.layout, trainer.mesh
    part = context_part(batch, mesh.cp.size, mesh.cp.rank)
    parts = mesh.collect({name: tensor.numpy() for name, tensor in part.items()})
    if mesh.rank:
        return {}
    rows: list[Tensors] = []
    for dp in range(layout.dp):
        pieces: list[Tensors] = []
        for same in _sharing(layout, dp):
            first = parts[same[0]]
            if any(not np.array_equal(first[name], parts[other][name]) for other in same for name in first):
                return {f"ranks {same} should have the same batch": torch.ones(1)}
            pieces.append({name: torch.from_numpy(array) for name, array in first.items()})
        rows.append({name: _join(pieces, name) for name in part})
    return {name: torch.cat([row[name] for row in rows]) for name in part}


def _sharing(layout: Layout, dp: int) -> list[list[int]]:
    """For each context-parallel place, the ranks that have the same tokens."""
    places = [(rank, layout.place(rank)) for rank in range(layout.world)]
    return [[rank for rank, at in places if at["dp"] == dp and at["cp"] == cp] for cp in range(layout.cp)]


def _join(pieces: list[Tensors], name: str) -> Tensor:
    """Context-parallel parts of one entry, back in order."""
    cp, masked = len(pieces), "places" in pieces[0]
    parts = [piece[name] for piece in pieces]
    if cp == 1 or name == "sample":
        return parts[0]
    if name in SEQUENCES or not masked:
        return natural(torch.stack(parts), 1)
    if name == "places":  # back from numbers within a rank to numbers in the sequence, where a label counts
        chunk = pieces[0]["tokens"].shape[1] // 2
        back = [
            torch.where(part < chunk, part + rank * chunk, part + (2 * cp - 2 - rank) * chunk)
            for rank, part in enumerate(parts)
        ]
        counts = [piece["labels"] != IGNORED for piece in pieces]
        return torch.stack([place * count for place, count in zip(back, counts, strict=True)]).sum(0).int()
    stacked = torch.stack(parts)
    assert ((stacked != IGNORED).sum(0) <= 1).all(), f"{name} counts on several ranks"
    return stacked.amax(0)
