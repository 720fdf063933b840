"""Places where a user, or the parts of trainyard that watch a run, can step in."""

from pathlib import Path
from typing import Any, Protocol

from torch import nn

from trainyard.config.schema import Config
from trainyard.train.optimizers import Optimizer


class Run(Protocol):
    """What a hook may rely on: the Trainer, seen from a hook."""

    config: Config
    model: nn.Module
    optimizer: Optimizer
    number: int
    """Updates done."""
    directory: Path | None
    last: dict[str, Any]
    """The newest logged record."""

    def evaluate(self) -> dict[str, float]: ...


class Hook:
    """Override what you need; every method may read and change the run."""

    def on_start(self, trainer: Run) -> None:
        """Everything is built; no step has run."""

    def on_step(self, trainer: Run, number: int) -> None:
        """A step was sent to the device; its numbers may not be known yet, and reading them would wait for it."""

    def on_log(self, trainer: Run, record: dict[str, Any]) -> None:
        """A step was logged; `record` is what metrics.jsonl gets."""

    def on_evaluate(self, trainer: Run, record: dict[str, Any]) -> None:
        """An evaluation was made."""

    def on_end(self, trainer: Run) -> None:
        """The run is over, finished or not."""
