"""Small runs that save checkpoints: their messages, and the checkpoints they leave."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.support import configs
from tests.support.logs import captured_log
from trainyard import Callback, Trainer
from trainyard.checkpoint import checkpoint as native_checkpoint
from trainyard.config.schema import Config
from trainyard.remote.storage import open_storage
from trainyard.run.callbacks import TrainerView


class RunAtStep(Callback):
    """Calls functions after given steps, before the checkpoint of the step starts."""

    def __init__(self, actions: dict[int, Callable[[], object]]) -> None:
        self.actions = actions

    def on_step(self, trainer: TrainerView, step: int) -> None:
        self.actions.get(step, lambda: None)()


def checkpoint_config(tmp_path: Path, **checkpoint: Any) -> Config:
    section = {"every": 1, "export_hf": False, **checkpoint}
    return configs.tiny_config(train={"steps": 4}, checkpoint=section, log={"directory": str(tmp_path / "logs")})


def run_training(config: Config, callbacks: list[Callback] | None = None) -> tuple[Any, list[str]]:
    """The summary and the messages of a run."""
    messages: list[str] = []
    with captured_log(messages.append):
        summary = Trainer(config, callbacks=callbacks or []).run()
    assert all("\n" not in line for line in messages)
    return summary, messages


def train(config: Config, actions: dict[int, Callable[[], object]] | None = None) -> list[str]:
    """The messages of a run."""
    return run_training(config, [RunAtStep(actions or {})])[1]


def save_failures(messages: list[str]) -> list[str]:
    return [line for line in messages if line.startswith("checkpoint of step")]


def mentions(messages: list[str], path: Path | str) -> list[str]:
    """The messages that name a path, followed by the end of the line, a space or a colon."""
    return [line for line in messages if f"{path} " in line or f"{path}:" in line or line.endswith(str(path))]


def verified_steps(directory: Path | str) -> list[int]:
    """Steps of committed checkpoints, latest first, after a check of all their files."""
    storage = open_storage(directory)
    steps = [step for step in native_checkpoint.list_steps(storage) if native_checkpoint.is_committed(storage, step)]
    for step in steps:
        with native_checkpoint.Checkpoint(storage / native_checkpoint.step_directory(step)) as checkpoint:
            checkpoint.verify(checkpoint.files)
    return steps
