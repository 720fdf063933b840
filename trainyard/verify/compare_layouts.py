"""Whether a layout trains the same model as one rank does: initial weights, batches, losses, gradients, new weights.

`record` runs a few steps and brings everything together on rank 0, whole, so that two records can be compared whatever
layouts they come from.
"""

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from trainyard.config.schema import Config
from trainyard.core.constants import IGNORE_INDEX
from trainyard.parallel.attention_blocks import to_natural_order
from trainyard.parallel.layout import Layout
from trainyard.train.lr_schedule import learning_rate
from trainyard.train.micro_batches import TOKEN_FIELDS, context_parallel_shard
from trainyard.train.optim.gather_full import gather_full_parameter
from trainyard.train.trainer import Trainer

Tensors = dict[str, Tensor]
LOSS_RTOL, TENSOR_RTOL = 1e-6, 1e-5
"""Largest relative differences in fp32. Of a tensor: over its largest element."""
SMALL_TENSOR_FLOOR = 1e-2
"""Of the largest element of all tensors: what smaller tensors are measured against, so that CLOSE of it is what fp32
rounds off. Sums that cancel (the bias of the next-sentence head, where a batch has as many true pairs as false ones)
leave the rounding of what they are made of."""
LOSS_RTOL_BF16, TENSOR_RTOL_BF16, SMALL_TENSOR_FLOOR_BF16 = 5e-3, 0.1, 2e-2
"""The same where bf16 rounds each product differently: of a sum that cancels, little but rounding is left."""


@dataclass
class VerifyRecord:
    initial_weights: Tensors = field(default_factory=dict)
    """Initial weights."""
    batches: list[Tensors] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    gradients: list[Tensors] = field(default_factory=list)
    """Before clipping, for each step."""
    final_weights: Tensors = field(default_factory=dict)
    """Weights after the last step."""


@dataclass(frozen=True)
class VerifyFinding:
    """One line of the result."""

    quantity: str
    max_difference: float
    """Largest relative difference."""
    location: str
    tolerance: float

    @property
    def ok(self) -> bool:
        return self.max_difference <= self.tolerance


def record_training(config: Config, steps: int) -> VerifyRecord:
    """Train `steps` steps. All ranks call this; rank 0 gets the record, the others an empty one."""
    trainer = Trainer(config)
    names, optimizer, leads = (
        list(trainer.blueprint.parameter_names()),
        trainer.optimizer,
        trainer.mesh.layout_rank == 0,
    )
    out = VerifyRecord()

    def collect(row: Tensor) -> Tensors:
        found = {name: gather_full_parameter(optimizer, trainer.blueprint, row, name) for name in names}
        return {name: value.float().cpu().clone() for name, value in found.items()} if leads else {}

    for model in trainer.models:
        model.train()
    out.initial_weights = collect(optimizer.master_weights)
    trainer.train_step.on_gradients_ready = lambda: out.gradients.append(collect(optimizer.reduced_grads))
    for number in range(steps):
        batch = trainer.loader.batch(number, trainer.batch_slice)
        out.batches.append(_global_batch(trainer, batch))
        result = trainer.train_step(batch, number + 1, learning_rate(config, number + 1))
        out.losses.append(float(result.loss))
        out.grad_norms.append(float(result.grad_norm))
    optimizer.wait_for_weights()
    out.final_weights = collect(optimizer.master_weights)
    return out


def compare_records(found: VerifyRecord, wanted: VerifyRecord, precision: str) -> list[VerifyFinding]:
    """How far two records are apart, kind by kind."""
    exact = precision == "fp32"
    loss, close, floor = (
        (LOSS_RTOL, TENSOR_RTOL, SMALL_TENSOR_FLOOR)
        if exact
        else (LOSS_RTOL_BF16, TENSOR_RTOL_BF16, SMALL_TENSOR_FLOOR_BF16)
    )
    batches = [_max_difference(a, b) for a, b in zip(found.batches, wanted.batches, strict=True)]
    gradients = [_max_difference(a, b, floor) for a, b in zip(found.gradients, wanted.gradients, strict=True)]
    start, end = (
        _max_difference(found.initial_weights, wanted.initial_weights),
        _max_difference(found.final_weights, wanted.final_weights),
    )
    losses = [abs(a - b) / abs(b) for a, b in zip(found.losses, wanted.losses, strict=True)]
    norms = [abs(a - b) / abs(b) for a, b in zip(found.grad_norms, wanted.grad_norms, strict=True)]
    steps = len(losses)
    return [
        VerifyFinding("initial weights", *start, 0.0),
        VerifyFinding("batches", *max(batches), 0.0),
        VerifyFinding("loss", max(losses), f"step {losses.index(max(losses)) + 1}", loss),
        VerifyFinding("gradient norm", max(norms), f"step {norms.index(max(norms)) + 1}", close),
        VerifyFinding("gradients", *max(gradients), close),
        VerifyFinding(f"weights after {steps} steps", *end, close),
    ]


def single_rank_config(config: Config) -> Config:
    """The same training on one rank."""
    whole = {
        "tp": 1,
        "pp": 1,
        "vpp": 1,
        "cp": 1,
        "zero": 0,
        "pipeline_cuts": (),
        "pipeline_schedule": "1f1b",
        "sequence_parallel": False,
    }
    return config.model_copy(update={"layout": config.layout.model_copy(update={**whole, "ranks": None})})


def _max_difference(found: Tensors, wanted: Tensors, least: float = SMALL_TENSOR_FLOOR) -> tuple[float, str]:
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
    part = context_parallel_shard(batch, mesh.cp.size, mesh.cp.rank)
    parts = mesh.all_gather_object({name: tensor.numpy() for name, tensor in part.items()})
    if mesh.layout_rank:
        return {}
    rows: list[Tensors] = []
    for dp in range(layout.dp):
        pieces: list[Tensors] = []
        for same in _ranks_sharing_tokens(layout, dp):
            first = parts[same[0]]
            if any(not np.array_equal(first[name], parts[other][name]) for other in same for name in first):
                return {f"ranks {same} should have the same batch": torch.ones(1)}
            pieces.append({name: torch.from_numpy(array) for name, array in first.items()})
        rows.append({name: _join_context_shards(pieces, name) for name in part})
    return {name: torch.cat([row[name] for row in rows]) for name in part}


def _ranks_sharing_tokens(layout: Layout, dp: int) -> list[list[int]]:
    """For each context-parallel place, the ranks that have the same tokens."""
    places = [(rank, layout.coords(rank)) for rank in range(layout.world_size)]
    return [[rank for rank, at in places if at["dp"] == dp and at["cp"] == cp] for cp in range(layout.cp)]


def _join_context_shards(pieces: list[Tensors], name: str) -> Tensor:
    """Context-parallel parts of one entry, back in order."""
    cp, masked = len(pieces), "masked_positions" in pieces[0]
    parts = [piece[name] for piece in pieces]
    if cp == 1 or name == "sample_ids":
        return parts[0]
    if name in TOKEN_FIELDS or not masked:
        return to_natural_order(torch.stack(parts), 1)
    if name == "masked_positions":  # back from numbers within a rank to numbers in the sequence, where a label counts
        chunk = pieces[0]["tokens"].shape[1] // 2
        back = [
            torch.where(part < chunk, part + rank * chunk, part + (2 * cp - 2 - rank) * chunk)
            for rank, part in enumerate(parts)
        ]
        counts = [piece["labels"] != IGNORE_INDEX for piece in pieces]
        return torch.stack([place * count for place, count in zip(back, counts, strict=True)]).sum(0).int()
    stacked = torch.stack(parts)
    assert ((stacked != IGNORE_INDEX).sum(0) <= 1).all(), f"{name} counts on several ranks"
    return stacked.amax(0)
