"""What a run reports: the record of a logged step, which goes to metrics.jsonl, and the summary of the run."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any

import psutil
import torch

from trainyard.core.errors import RunStopped
from trainyard.core.quantities import counted
from trainyard.models import TransformerStage
from trainyard.models.moe import MoeMLP
from trainyard.parallel.mesh import Mesh
from trainyard.parallel.rank_context import RankContext
from trainyard.run.callbacks import Part, TrainerView
from trainyard.train.optim.optimizer import Optimizer
from trainyard.train.step import StepResult


@dataclass
class RunSummary:
    """Outcome of a run."""

    directory: Path
    """The run directory, with config.yaml, metrics.jsonl, events.jsonl and TensorBoard files."""
    steps: int
    first_loss: float | None
    last_loss: float | None
    """None, as first_loss, if the run made no step; NaN if the last step was not finite."""
    seconds: float
    skipped_steps: int
    last_step_skipped: bool
    """True if the last step was not finite, or had no counted label, and changed nothing."""
    interrupted: bool
    """True if a signal ended the run early."""
    exported_weights: Path | None
    """Directory of the final weights in Hugging Face format."""
    last_checkpoint: str | None
    """The last checkpoint that this run committed."""
    evaluation: dict[str, float]
    """The last evaluation."""


def step_record(
    result: StepResult,
    progress: dict[str, Any],
    global_batch: int,
    optimizer: Optimizer,
    context: RankContext,
    models: Sequence[TransformerStage],
    is_first: bool,
) -> dict[str, Any]:
    """The metrics of a step; `progress` are samples, tokens and throughput, `models` the stages if they have experts.
    The first record since the start or a resume names the hardware. Waits for the step. All ranks call this
    together."""
    status, device, mesh = result.read_status(), context.device, context.mesh
    terms = {f"loss/{name}": float(value) for name, value in result.terms.items()}
    record: dict[str, Any] = {
        "step": result.step,
        **progress,
        "lr": result.lr,
        "global_batch": global_batch,
        "loss": float(result.loss),
        **(terms if len(terms) > 1 else {}),
        **{name: float(value) for name, value in result.metrics.items()},
        "grad_norm": float(result.grad_norm),
        "param_norm": float(optimizer.weight_norm()),
        "skipped": status.skipped_total,
        "memory_bytes": device.max_memory_allocated(),
        **(expert_load(models, mesh) if models else {}),
    }
    if is_first:
        record |= {"device": device.describe(), "ranks": mesh.layout.world_size}
    if result.step == 1:
        record["seconds_from_start"] = time.time() - psutil.Process().create_time()
    if status.skipped_in_a_row:
        record["not_finite"] = describe_skipped(result, optimizer, mesh)
    return record


def expert_load(models: Sequence[TransformerStage], mesh: Mesh) -> dict[str, float]:
    """The largest and the smallest share of the tokens that an expert of any layer has had since the last call, where 1
    is an equal share. The model has mixtures of experts. All ranks call this together."""
    layers = [module for model in models for module in model.modules() if isinstance(module, MoeMLP)]
    # A pipeline stage may have no layer with experts; its rank takes part in the all-reduce all the same.
    largest_and_smallest = models[0].tp_rank.new_full((2,), -torch.inf, dtype=torch.float32)
    if layers:
        counts = mesh.dp_cp.all_reduce_sum(torch.stack([layer.pair_counts for layer in layers]))
        load = counts / counts.mean(1, keepdim=True)
        largest_and_smallest = torch.stack((load.max(), -load.min()))
    largest, smallest = mesh.pp.all_reduce_max(largest_and_smallest).tolist()
    for layer in layers:
        layer.pair_counts.zero_()
    return {"expert_load/max": largest, "expert_load/min": -smallest}


def describe_skipped(result: StepResult, optimizer: Optimizer, mesh: Mesh) -> str:
    """Say why a step was skipped, and name its non-finite gradients. All ranks call this together."""
    if not result.label_count > 0:
        return "no label of the batch counts"
    per_rank = mesh.all_gather_object(optimizer.guard.nonfinite_names())
    names = list(dict.fromkeys(name for rank_names in per_rank for name in rank_names))
    culprits = "no gradient"
    if names:
        culprits = f"gradient of {names[0]}" + (f" and {len(names) - 1} more" if len(names) > 1 else "")
    return f"loss {float(result.loss)}, not finite: {culprits}"


def too_many_skipped(result: StepResult, limit: int, optimizer: Optimizer, mesh: Mesh) -> RunStopped:
    """The error that ends a run after `limit` skipped steps in a row."""
    problem, advice = "not finite and skipped", "try a lower optimizer.lr or a longer schedule.warmup_steps"
    if not result.label_count > 0:
        problem, advice = "skipped", "check the labels of the data, or the count that the loss returns"
    in_a_row = result.read_status().skipped_in_a_row
    return RunStopped(
        f"step {result.step}: {counted(in_a_row, 'step')} in a row {'was' if in_a_row == 1 else 'were'} {problem} "
        f"(train.max_skipped_steps={limit}); "
        f"{describe_skipped(result, optimizer, mesh)}; {advice}"
    )


def check_weights(norm: float, step: int) -> None:
    """Raise RunStopped if the norm of all weights is not finite: such weights are neither saved nor exported."""
    if not isfinite(norm):
        raise RunStopped(
            f"step {step}: the weights are not finite (their norm is {norm}) and are neither saved nor exported; "
            "try a lower optimizer.lr or a longer schedule.warmup_steps"
        )


class WeightCheck(Part):
    """Ends a run whose weights are not finite, before a logged step is evaluated, used for text samples and saved."""

    def on_log(self, trainer: TrainerView, record: dict[str, Any]) -> None:
        check_weights(record["param_norm"], record["step"])
