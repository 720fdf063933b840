"""Small runs with checkpoints, what they say, and what they leave behind."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.support import configs
from trainyard import Callback, Trainer
from trainyard.checkpoint.io.storage import open_storage
from trainyard.checkpoint.native import checkpoint as native_checkpoint
from trainyard.config.schema import Config
from trainyard.train.callbacks import TrainerView


class RunAtStep(Callback):
    """Does something after a step, before its checkpoint is begun."""

    def __init__(self, actions: dict[int, Callable[[], object]]) -> None:
        self.actions = actions

    def on_step(self, trainer: TrainerView, number: int) -> None:
        self.actions.get(number, lambda: None)()


def checkpoint_config(tmp_path: Path, **checkpoint: Any) -> Config:
    section = {"every": 1, "export_hf": False, **checkpoint}
    return configs.tiny_config(train={"steps": 4}, checkpoint=section, log={"directory": str(tmp_path / "logs")})


def train(config: Config, actions: dict[int, Callable[[], object]] | None = None) -> list[str]:
    """What a run says."""
    said: list[str] = []
    Trainer(config, callbacks=[RunAtStep(actions or {})], say=said.append).run()
    assert all("\n" not in line for line in said)
    return said


def save_failures(said: list[str]) -> list[str]:
    return [line for line in said if line.startswith("checkpoint of step")]


def verified_steps(where: Path | str) -> list[int]:
    """Complete steps, each of them whole."""
    place = open_storage(where)
    found = [step for step in native_checkpoint.list_steps(place) if native_checkpoint.is_committed(place, step)]
    for step in found:
        with native_checkpoint.Checkpoint(place / native_checkpoint.step_directory(step)) as checkpoint:
            checkpoint.verify(checkpoint.files)
    return found
