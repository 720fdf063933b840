"""Places where a user, or the parts of trainyard that watch a run, can step in."""

from pathlib import Path
from typing import Any, Protocol

from trainyard.config.schema import Config
from trainyard.models import TransformerStage
from trainyard.train.optim.optimizer import Optimizer


class TrainerView(Protocol):
    """What a hook may rely on: the Trainer, seen from a hook."""

    config: Config
    models: list[TransformerStage]
    """This rank's stages of the pipeline; a single one has the whole model."""
    optimizer: Optimizer
    completed_steps: int
    """Updates done."""
    directory: Path | None
    last_record: dict[str, Any]
    """The newest logged record."""

    def evaluate(self) -> dict[str, float]: ...


class Callback:
    """Override what you need; every method may read and change the run."""

    def on_start(self, trainer: TrainerView) -> None:
        """Everything is built; no step has run."""

    def on_step(self, trainer: TrainerView, step: int) -> None:
        """A step was sent to the device; its numbers may not be known yet, and reading them would wait for it. Under
        ZeRO-1 new weights may still be on their way: `trainer.optimizer.settle()` waits for them."""

    def on_log(self, trainer: TrainerView, record: dict[str, Any]) -> None:
        """A step was logged; `record` is what metrics.jsonl gets."""

    def on_evaluate(self, trainer: TrainerView, record: dict[str, Any]) -> None:
        """An evaluation was made."""

    def on_checkpoint(self, trainer: TrainerView, record: dict[str, Any]) -> None:
        """A checkpoint is complete: where it is, its bytes, how long it took, and how long the steps waited for it."""

    def on_end(self, trainer: TrainerView) -> None:
        """The run is over, finished or not."""
