"""Small runs with checkpoints, what they say, and what they leave behind."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.support import configs
from trainyard import Hook, Trainer
from trainyard.checkpoint.io.storage import open_place
from trainyard.checkpoint.native import checkpoint as native_checkpoint
from trainyard.config.schema import Config
from trainyard.train.callbacks import Run


class At(Hook):
    """Does something after a step, before its checkpoint is begun."""

    def __init__(self, actions: dict[int, Callable[[], object]]) -> None:
        self.actions = actions

    def on_step(self, trainer: Run, number: int) -> None:
        self.actions.get(number, lambda: None)()


def configure(tmp_path: Path, **checkpoint: Any) -> Config:
    section = {"every": 1, "final": False, **checkpoint}
    return configs.config(train={"steps": 4}, checkpoint=section, log={"directory": str(tmp_path / "logs")})


def train(config: Config, actions: dict[int, Callable[[], object]] | None = None) -> list[str]:
    """What a run says."""
    said: list[str] = []
    Trainer(config, hooks=[At(actions or {})], say=said.append).run()
    assert all("\n" not in line for line in said)
    return said


def failures(said: list[str]) -> list[str]:
    return [line for line in said if line.startswith("checkpoint of step")]


def complete(where: Path | str) -> list[int]:
    """Complete steps, each of them whole."""
    place = open_place(where)
    found = [step for step in native_checkpoint.steps_in(place) if native_checkpoint.is_complete(place, step)]
    for step in found:
        with native_checkpoint.Checkpoint(place / native_checkpoint.directory_name(step)) as checkpoint:
            checkpoint.check(checkpoint.files)
    return found
