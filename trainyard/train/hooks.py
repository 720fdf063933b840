"""Places where a user, or the parts of trainyard that watch a run, can step in."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainyard.train.loop import Trainer


class Hook:
    """Override what you need; every method may read and change the trainer."""

    def on_start(self, trainer: "Trainer") -> None:
        """Everything is built; no step has run."""

    def on_step(self, trainer: "Trainer", number: int) -> None:
        """A step was sent to the device; its numbers may not be known yet, and reading them would wait for it."""

    def on_log(self, trainer: "Trainer", record: dict[str, Any]) -> None:
        """A step was logged; `record` is what metrics.jsonl gets."""

    def on_evaluate(self, trainer: "Trainer", record: dict[str, Any]) -> None:
        """An evaluation was made."""

    def on_end(self, trainer: "Trainer") -> None:
        """The run is over, finished or not."""
