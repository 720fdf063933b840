"""Configuration of a resumed run: what must be that of the checkpoint, and what may change with a note."""

import logging
from typing import Any

from trainyard.checkpoint.checkpoint import Checkpoint
from trainyard.config.optimizer_schema import OptimizerSection
from trainyard.config.registries import UPDATE_RULES
from trainyard.config.schema import Config
from trainyard.core.errors import UserError
from trainyard.core.user_code import is_user_path
from trainyard.devices import Device
from trainyard.families.model_config import first_model_difference
from trainyard.parallel.mesh import Mesh
from trainyard.run.checkpointing.data_check import check_data
from trainyard.train.optim.flat_state import state_kinds
from trainyard.train.optim.load_rule import load_update_rule
from trainyard.train.optim.lr_schedule import learning_rate

COMPARED_SECTIONS = ("model", "data", "train", "preference", "optimizer", "schedule", "precision")
"""Config sections whose changes since the checkpoint are logged."""
UNREPORTED_KEYS = ("model.fuse_qkv", "model.fuse_gate_up", "train.micro_batch", "data.cache")
"""Keys that may change without a note: they change no result, except for rounding."""
FREE_KEYS = (*UNREPORTED_KEYS, "train.steps")
"""Keys that do not tell one run from another."""
logger = logging.getLogger(__name__)


def expected_kinds(optimizer: OptimizerSection) -> tuple[str, ...]:
    """The kinds of state that the optimizer of a run resumes from."""
    return state_kinds(load_update_rule(optimizer).state_names)


def check_compatible(checkpoint: Checkpoint, config: Config, mesh: Mesh, device: Device) -> None:
    """Raise UserError if the run cannot resume from this checkpoint; log other differences of the configuration."""
    check_data(checkpoint, config.data, config.checkpoint.accept_changed_data, mesh, device)
    if difference := first_model_difference(checkpoint.config.model, config.model):
        key, saved, current = difference
        nearest = f"; nearest: {saved}, or checkpoint.weights_only=true" if key in config.model.context_keys else ""
        raise UserError(f"model.{key}={current}: the checkpoint {checkpoint.storage} has {saved}{nearest}")
    if missing := [kind for kind in expected_kinds(config.optimizer) if kind not in checkpoint.dtypes]:
        before, now = checkpoint.config.optimizer.kind, config.optimizer.kind
        raise UserError(
            f"optimizer.kind={now}: the checkpoint of optimizer.kind={before} has no state {missing[0]}; "
            f"nearest: {before}, or checkpoint.weights_only=true"
        )
    changes = [] if checkpoint.manifest.get("converted") else changed_keys(checkpoint.config, config)
    for key, saved, current in changes:
        if key == "train.global_batch":
            raise UserError(
                f"{key}={current}: the checkpoint counts samples in batches of {saved}; nearest: {saved}, or "
                "checkpoint.weights_only=true"
            )
        if key == "optimizer.kind" and not is_user_path(saved) and (missing := UPDATE_RULES.find(saved).missing_state):
            raise UserError(
                f"{key}={current}: the checkpoint has no {missing}; nearest: {saved}, or checkpoint.weights_only=true"
            )
        if key not in UNREPORTED_KEYS:
            logger.warning("note: %s was %s when the checkpoint was written, and is %s", key, saved, current)
    if checkpoint.step > config.train.steps:
        raise UserError(f"train.steps={config.train.steps}: the checkpoint is already at step {checkpoint.step}")
    if changes and checkpoint.step < config.train.steps:
        _compare_schedules(checkpoint.config, config, checkpoint.step)


def changed_keys(saved: Config, current: Config) -> list[tuple[str, Any, Any]]:
    """(key, saved value, current value) of every difference in COMPARED_SECTIONS."""
    changes = []
    for section in COMPARED_SECTIONS:
        old, new = (getattr(config, section).model_dump(mode="json") for config in (saved, current))
        keys = [*old, *(key for key in new if key not in old)]
        changes += [(f"{section}.{key}", old.get(key), new.get(key)) for key in keys if old.get(key) != new.get(key)]
    return changes


def _compare_schedules(saved: Config, current: Config, step: int) -> None:
    """Log the learning rates around `step`, the last one of the checkpoint, if those that follow have changed."""
    try:
        last, planned = learning_rate(saved, step), learning_rate(saved, step + 1)
    except UserError:  # the user's function of the checkpoint is not here
        return
    first = learning_rate(current, step + 1)
    if first != planned:
        logger.warning(
            "note: the learning rate was %.3e at step %s, and is %.3e at step %s; without these changes, %.3e",
            last,
            step,
            first,
            step + 1,
            planned,
        )
