"""What a run reports: the record of a logged step, which goes to metrics.jsonl, and the summary of the run."""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from trainyard.config.schema import Config
from trainyard.devices import Device
from trainyard.parallel.mesh import Mesh
from trainyard.train.optim.optimizer import Optimizer
from trainyard.train.step import StepResult


@dataclass
class RunSummary:
    """Outcome of a run."""

    directory: Path
    """The run directory, with config.yaml, metrics.jsonl and TensorBoard files."""
    steps: int
    first_loss: float
    last_loss: float
    """NaN, as first_loss, if the run made no step."""
    seconds: float
    skipped_steps: int
    interrupted: bool
    """True if a signal ended the run early."""
    exported_weights: Path | None
    """Directory of the final weights in Hugging Face format."""
    last_checkpoint: str | None
    """The last checkpoint that this run committed."""
    evaluation: dict[str, float]
    """The last evaluation."""


def step_record(
    result: StepResult, rates: dict[str, Any], config: Config, optimizer: Optimizer, device: Device, mesh: Mesh
) -> dict[str, Any]:
    """The metrics of a step; `rates` are its throughput. Waits for the step. All ranks call this together."""
    skipped_total, skipped_in_a_row, _ = result.read_status()
    terms = {f"loss/{name}": float(value) for name, value in result.terms.items()}
    record: dict[str, Any] = {
        "step": result.step,
        "consumed_samples": result.step * config.train.global_batch,
        **rates,
        "lr": result.lr,
        "global_batch": config.train.global_batch,
        "loss": float(result.loss),
        **(terms if len(terms) > 1 else {}),
        "grad_norm": float(result.grad_norm),
        "param_norm": float(optimizer.weight_norm()),
        "skipped": skipped_total,
        "memory_bytes": device.max_memory_allocated(),
    }
    if result.step == 1:
        record |= {
            "seconds_from_start": time.time() - psutil.Process().create_time(),
            "device": device.describe(),
            "ranks": mesh.layout.world_size,
        }
    if skipped_in_a_row:
        record["not_finite"] = describe_nonfinite(optimizer, mesh, record["loss"])
    return record


def describe_nonfinite(optimizer: Optimizer, mesh: Mesh, loss: float) -> str:
    """Name the gradients that were not finite at the last skipped step. All ranks call this together."""
    per_rank = mesh.all_gather_object(optimizer.guard.nonfinite_names())
    names = list(dict.fromkeys(name for rank_names in per_rank for name in rank_names))
    culprits = "no gradient"
    if names:
        culprits = f"gradient of {names[0]}" + (f" and {len(names) - 1} more" if len(names) > 1 else "")
    return f"loss {loss}, not finite: {culprits}"
