"""Compares the training of a layout with that of one rank: initial weights, batches, losses, gradients, new weights.

`record_training` runs a few steps and gathers everything unsharded on rank 0, so that records of any two layouts can be
compared.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainyard.config.layout_schema import LayoutSection
from trainyard.config.schema import Config
from trainyard.core.batch import Batch, batch_tensors
from trainyard.core.constants import IGNORE_INDEX
from trainyard.core.quantities import counted
from trainyard.parallel.attention_blocks import to_natural_order
from trainyard.parallel.layout import Layout
from trainyard.run.callbacks import Callback
from trainyard.run.trainer import Trainer
from trainyard.train.micro_batches.split import SAMPLE_FIELDS, TOKEN_FIELDS, context_parallel_shard
from trainyard.train.optim.gather_full import gather_full_buffer
from trainyard.train.optim.lr_schedule import learning_rate

Tensors = dict[str, Tensor]
FP32_TOLERANCES, BF16_TOLERANCES = (1e-6, 1e-5, 1e-2), (5e-3, 0.1, 2e-2)
"""Relative tolerance of the loss, and of a tensor relative to its largest element; and the floor: a tensor smaller than
this fraction of the largest element of all tensors is compared relative to that floor. Sums that cancel (the bias of
the next-sentence head if a batch has as many true pairs as false ones) contain rounding of their terms only. In bf16
every GEMM rounds differently."""


@dataclass
class VerifyRecord:
    """Everything that two trainings are compared by, unsharded. Tensors are in fp32, by unfused name."""

    initial_weights: Tensors = field(default_factory=dict)
    batches: list[Tensors] = field(default_factory=list)
    """The global batch of each step."""
    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    gradients: list[Tensors] = field(default_factory=list)
    """Of each step, before clipping."""
    final_weights: Tensors = field(default_factory=dict)


@dataclass(frozen=True)
class VerifyFinding:
    """Largest difference of one quantity between two records."""

    quantity: str
    max_difference: float
    """Relative."""
    location: str
    """The tensor or step with the largest difference."""
    tolerance: float

    @property
    def ok(self) -> bool:
        return self.max_difference <= self.tolerance


def record_training(
    config: Config, steps: int, prepare: Callable[[Trainer], None] = lambda trainer: None
) -> VerifyRecord:
    """Train `steps` steps. All ranks call this; rank 0 gets the record, the tensors of the others are empty. `prepare`
    is called before the first."""
    record = VerifyRecord()

    class GradientRecorder(Callback):
        def on_gradients_ready(self, trainer: Any) -> None:
            record.gradients.append(_gather(trainer, trainer.optimizer.state.reduced_grads))

    trainer = Trainer(config, callbacks=[GradientRecorder()])
    prepare(trainer)
    for model in trainer.models:
        model.train()
    record.initial_weights = _gather(trainer, None)
    for step in range(1, steps + 1):
        batch = trainer.loader.batch(step - 1, trainer.batch_slice)
        record.batches.append(_global_batch(trainer, batch))
        result = trainer.train_step(batch, step, learning_rate(config, step))
        record.losses.append(float(result.loss))
        record.grad_norms.append(float(result.grad_norm))
    trainer.optimizer.wait_for_weights()
    record.final_weights = _gather(trainer, None)
    return record


def _gather(trainer: Trainer, buffer: Tensor | None) -> Tensors:
    """The full tensors of a state buffer, or (None) all weights, on rank 0; nothing on other ranks."""
    tensors = gather_full_buffer(trainer.optimizer.state, trainer.blueprint, trainer.mesh, buffer)
    return {name: tensor.cpu() for name, tensor in tensors.items()} if trainer.mesh.layout_rank == 0 else {}


def compare_records(record: VerifyRecord, reference: VerifyRecord, precision: str) -> list[VerifyFinding]:
    """One finding for each kind of quantity."""
    loss_rtol, rtol, floor = FP32_TOLERANCES if precision == "fp32" else BF16_TOLERANCES
    initial = _max_difference(record.initial_weights, reference.initial_weights)
    final = _max_difference(record.final_weights, reference.final_weights)
    batches = [_max_difference(a, b) for a, b in zip(record.batches, reference.batches, strict=True)]
    gradients = [_max_difference(a, b, floor) for a, b in zip(record.gradients, reference.gradients, strict=True)]
    losses = [_difference(a, b) for a, b in zip(record.losses, reference.losses, strict=True)]
    norms = [_difference(a, b) for a, b in zip(record.grad_norms, reference.grad_norms, strict=True)]
    return [
        VerifyFinding("initial weights", *initial, 0.0),
        VerifyFinding("batches", *max(batches), 0.0),
        VerifyFinding("loss", max(losses), f"step {losses.index(max(losses)) + 1}", loss_rtol),
        VerifyFinding("gradient norm", max(norms), f"step {norms.index(max(norms)) + 1}", rtol),
        VerifyFinding("gradients", *max(gradients), rtol),
        VerifyFinding(f"weights after {counted(len(losses), 'step')}", *final, rtol),
    ]


def _difference(value: float, reference: float) -> float:
    """Relative to the reference; 0 if they are equal, since both may be 0."""
    return 0.0 if value == reference else abs(value - reference) / max(abs(reference), sys.float_info.min)


def single_rank_config(config: Config) -> Config:
    """The configuration of the same training on one rank."""
    return config.model_copy(update={"layout": LayoutSection(bucket_mib=config.layout.bucket_mib)})


def _max_difference(tensors: Tensors, reference: Tensors, floor: float = FP32_TOLERANCES[2]) -> tuple[float, str]:
    """The largest difference of any tensor relative to its largest element, and the name of that tensor.

    A tensor that is very small next to the largest one contains only rounding errors (the gradient of a key's bias is
    0 in theory), so it is compared relative to `floor` times the largest element of all tensors.
    """
    if tensors.keys() != reference.keys():
        return float("inf"), min(tensors.keys() ^ reference.keys())
    worst = (0.0, "")
    min_scale = floor * max(b.double().abs().max().item() for b in reference.values() if b.numel())
    for name, b in reference.items():
        a = tensors[name]
        if a.shape != b.shape:
            return float("inf"), name
        difference = (a.double() - b.double()).abs().max().item() if a.numel() else 0.0
        if difference != 0:  # true for NaN
            scale = max(b.double().abs().max().item(), min_scale)
            relative = difference / scale if scale else float("inf")
            worst = max(worst, (relative if relative == relative else float("inf"), name))
    return worst


def _global_batch(trainer: Trainer, batch: Batch) -> Tensors:
    """The batch of all ranks together in order. Also checks that ranks which must have the same samples do."""
    layout, mesh = trainer.layout, trainer.mesh
    shard = batch_tensors(context_parallel_shard(batch, mesh.cp.size, mesh.cp.rank))
    shards = mesh.all_gather_object({name: tensor.numpy() for name, tensor in shard.items()})
    if mesh.layout_rank:
        return {}
    per_dp: list[Tensors] = []
    for dp in range(layout.dp):
        cp_shards: list[Tensors] = []
        for ranks in _ranks_sharing_tokens(layout, dp):
            first = shards[ranks[0]]
            if any(not np.array_equal(first[name], shards[other][name]) for other in ranks for name in first):
                return {f"ranks {ranks} should have the same batch": torch.ones(1)}
            cp_shards.append({name: torch.from_numpy(array) for name, array in first.items()})
        per_dp.append({name: _join_context_shards(cp_shards, name) for name in shard})
    return {name: torch.cat([tensors[name] for tensors in per_dp]) for name in shard}


def _ranks_sharing_tokens(layout: Layout, dp: int) -> list[list[int]]:
    """For each context-parallel coordinate, the ranks that have the same tokens."""
    coords = [(rank, layout.coords(rank)) for rank in range(layout.world_size)]
    return [[rank for rank, at in coords if at["dp"] == dp and at["cp"] == cp] for cp in range(layout.cp)]


def _join_context_shards(shards: list[Tensors], name: str) -> Tensor:
    """One field of a batch from its context-parallel shards, in sequence order."""
    cp, is_masked_lm = len(shards), "masked_positions" in shards[0]
    parts = [shard[name] for shard in shards]
    if cp == 1 or name in SAMPLE_FIELDS:
        return parts[0]
    if name in TOKEN_FIELDS or not is_masked_lm:
        return to_natural_order(torch.stack(parts), 1)
    if name == "masked_positions":  # from positions within a rank to positions in the sequence, where labels count
        chunk = shards[0]["tokens"].shape[1] // 2
        positions = [
            torch.where(part < chunk, part + rank * chunk, part + (2 * cp - 2 - rank) * chunk)
            for rank, part in enumerate(parts)
        ]
        counts = [shard["labels"] != IGNORE_INDEX for shard in shards]
        return torch.stack([at * count for at, count in zip(positions, counts, strict=True)]).sum(0).int()
    stacked = torch.stack(parts)
    assert ((stacked != IGNORE_INDEX).sum(0) <= 1).all(), f"{name} counts on several ranks"
    return stacked.amax(0)
