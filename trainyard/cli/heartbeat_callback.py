"""Tells the launcher of a rank that it makes progress."""

from typing import Any

from trainyard.launch.heartbeat import Heartbeat
from trainyard.run.callbacks import Callback, TrainerView

NOT_TRAINING = -1


class HeartbeatCallback(Callback):
    """A sign of life after every step, and with everything else that a run does between steps."""

    def __init__(self, heartbeat: Heartbeat) -> None:
        self.heartbeat = heartbeat

    def on_step(self, trainer: TrainerView, step: int) -> None:
        self.heartbeat.beat(step)

    def on_evaluation_batch(self, trainer: TrainerView) -> None:
        self.heartbeat.beat(trainer.completed_steps)

    def on_evaluate(self, trainer: TrainerView, record: dict[str, Any]) -> None:
        self.heartbeat.beat(trainer.completed_steps)

    def on_samples(self, trainer: TrainerView, records: list[dict[str, Any]]) -> None:
        self.heartbeat.beat(trainer.completed_steps)

    def on_checkpoint(self, trainer: TrainerView, record: dict[str, Any]) -> None:
        self.heartbeat.beat(trainer.completed_steps)

    def on_last_step(self, trainer: TrainerView) -> None:
        self.heartbeat.beat(NOT_TRAINING)
