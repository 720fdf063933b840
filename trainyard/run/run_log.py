"""What rank 0 writes while a run trains: metrics.jsonl, samples.jsonl, rollouts.jsonl, events.jsonl, and the loggers of
log.loggers."""

import logging
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainyard.config.objective_check import trains_on_rollouts
from trainyard.config.schema import Config
from trainyard.core.errors import RunStopped, UserError, one_line
from trainyard.metrics.json_lines import JsonLinesWriter, as_number, repair_json_lines
from trainyard.metrics.loggers.base import EVENTS_FILE, METRICS_FILE, ROLLOUTS_FILE, SAMPLES_FILE, LoggedRun
from trainyard.metrics.loggers.process import LoggerProcess
from trainyard.metrics.run_directory import RunDirectory
from trainyard.run.callbacks import Part, TrainerView
from trainyard.run.loss_spikes import LossSpikeDetector
from trainyard.train.status import HostStatus
from trainyard.train.step import StepResult

CLOSE_TIMEOUT_S = 90.0
"""Seconds that the end of a run waits for its loggers."""
DEADLINE_CLOSE_TIMEOUT_S = 5.0
"""The same, when the scheduler is about to kill the process."""
MAX_ERROR_CHARACTERS = 1000
RERUN_EVENTS = ("loss_spike", "not_finite")
"""Events that a resumed run writes again. The others tell when processes started and ended."""
logger = logging.getLogger(__name__)


class RunLog(Part):
    """The log of a run on rank 0. Nothing it writes depends on the speed or failure of a logger."""

    def __init__(
        self,
        run_directory: RunDirectory,
        config: Config,
        completed_steps: int,
        sample_indices: Callable[[int], NDArray[np.int64]],
        publish_event: Callable[[dict[str, Any]], None],
        process: Mapping[str, Any],
    ) -> None:
        """A run that resumes after `completed_steps` drops what an earlier process wrote about later steps.
        `sample_indices` takes a step, of which the first is 0, to its samples. `process` is what the start event says
        about this process."""
        directory = run_directory.path
        self.metrics, self.text_samples, self.events, self.rollouts = (
            JsonLinesWriter(directory / name) for name in (METRICS_FILE, SAMPLES_FILE, EVENTS_FILE, ROLLOUTS_FILE)
        )
        self.continues = self.metrics.path.is_file()
        """True if an earlier process has written to the directory."""
        is_current = partial(_is_up_to, completed_steps)
        records = repair_json_lines(self.metrics.path, is_current)
        text_samples = repair_json_lines(self.text_samples.path, is_current)
        repair_json_lines(self.rollouts.path, is_current)
        repair_json_lines(self.events.path, lambda event: event.get("event") not in RERUN_EVENTS or is_current(event))
        self.last_text_sample_step: int = text_samples[-1]["step"] if text_samples else 0
        losses = [as_number(record["loss"]) for record in records if "loss" in record]
        self.spikes = LossSpikeDetector(loss for loss in losses if loss is not None)
        self.watches_loss = not trains_on_rollouts(config)  # whose loss is near 0, whatever the model learns
        self.watched_step = completed_steps
        """The last step whose status was looked at."""
        self.last_step_skipped = False
        self.last_status: HostStatus
        """The status of the step whose record is being made."""
        self.sample_indices, self.publish_event, self.process = sample_indices, publish_event, process
        plain_config = config.model_dump(mode="json")
        self.run = LoggedRun(directory, run_directory.run_id, plain_config, completed_steps, self.continues)
        self.logger_names = config.log.loggers
        self.loggers: LoggerProcess | None = None
        self.active = completed_steps < config.train.steps
        """False for a run that has nothing to do, which leaves its files as they are."""

    def begin_run(self, trainer: TrainerView) -> None:
        if self.active:
            host = {"host": socket.gethostname(), "pid": os.getpid()}
            self._write_event(self.watched_step, "start", **host, **self.process)

    def handle_status(self, step: int, status: HostStatus, logged: bool) -> None:
        if not logged:  # the record of a logged step says more
            self._watch(step, status)

    def add_metrics(self, result: StepResult, record: dict[str, Any]) -> None:
        self.last_status = result.read_status()

    def on_log(self, trainer: TrainerView, record: dict[str, Any]) -> None:
        self._watch(record["step"], self.last_status, record.get("not_finite"))
        self._write(record)

    def on_evaluate(self, trainer: TrainerView, record: dict[str, Any]) -> None:
        self._write(record)

    def on_checkpoint(self, trainer: TrainerView, record: dict[str, Any]) -> None:
        self._write(record)

    def on_samples(self, trainer: TrainerView, records: Sequence[dict[str, Any]]) -> None:
        self.text_samples.write(*records)
        self._submit("log_samples", records[0]["step"], list(records))

    def on_rollouts(self, trainer: TrainerView, records: Sequence[dict[str, Any]]) -> None:
        self.rollouts.write(*records)

    def _write(self, record: dict[str, Any]) -> None:
        """Append a record to metrics.jsonl."""
        stamped = {"step": record["step"], "time": _now(), **record}
        self.metrics.write(stamped)
        self._submit("log", record["step"], stamped)

    def _watch(self, step: int, status: HostStatus, reason: str | None = None) -> None:
        """Look at the status of a step, once, and write an event if its loss is a spike or it was skipped. `reason`
        says why it was skipped."""
        if step <= self.watched_step:
            return
        self.watched_step, self.last_step_skipped = step, bool(status.skipped_in_a_row)
        if self.last_step_skipped:
            self._write_batch_event(step, "not_finite", reason=reason or status.skip_reason())
        elif self.watches_loss and (expected := self.spikes.add(status.loss)) is not None:
            numbers = {"loss": status.loss, "expected": expected, "grad_norm": status.grad_norm}
            self._write_batch_event(step, "loss_spike", **numbers)

    def end_run(self, trainer: TrainerView, error: BaseException | None) -> None:
        """Write how the run ended, and close the files and loggers."""
        step, outcome, details = trainer.completed_steps, "completed", {}
        if isinstance(error, KeyboardInterrupt):
            outcome = "interrupted"
        elif error:
            outcome, details = "failed", {"error": error_text(error)}
        elif trainer.should_stop():
            outcome = "interrupted"
        elif self.last_step_skipped:
            outcome, details = "failed", {"error": f"step {step}: the last step was skipped"}
        with suppress(OSError):  # a full disk, which is perhaps how the run ended
            if self.active:
                self._write_event(step, "end", outcome=outcome, **details)
        self._close(outcome, CLOSE_TIMEOUT_S)

    def end_at_deadline(self, step: int) -> None:
        with suppress(OSError):
            self._write_event(step, "end", outcome="interrupted")
        self._close("interrupted", DEADLINE_CLOSE_TIMEOUT_S)

    def _close(self, outcome: str, timeout_s: float) -> None:
        for file in (self.metrics, self.text_samples, self.events, self.rollouts):
            file.close()
        if self.loggers:
            self.loggers.close(outcome, timeout_s)
            self.loggers = None

    def _write_batch_event(self, step: int, kind: str, **details: Any) -> None:
        self._write_event(step, kind, **details, samples=self.sample_indices(step - 1).tolist())

    def _write_event(self, step: int, kind: str, **details: Any) -> None:
        event = {"step": step, "time": _now(), "event": kind, **details}
        self.events.write(event)
        self._submit("log_event", step, event)
        self.publish_event(event)

    def _submit(self, method: str, *arguments: Any) -> None:
        if not self.logger_names:
            return
        try:
            self.loggers = self.loggers or LoggerProcess(self.logger_names, self.run)
        except OSError as error:
            self.logger_names = ()
            logger.warning("the loggers cannot be started: %s; the run continues without them", error.strerror)
            return
        self.loggers.submit(method, *arguments)


def lacks_text_samples(log: RunLog | None) -> bool:
    """On rank 0: True if the run continues in its directory after a signal that came before the text samples of its
    last step were complete."""
    return log is not None and log.continues and log.last_text_sample_step < log.watched_step


def error_text(error: BaseException) -> str:
    """An error on one line, as the command shows it."""
    kind = "" if isinstance(error, UserError | RunStopped) else f"{type(error).__name__}: "
    return f"{kind}{one_line(error)}"[:MAX_ERROR_CHARACTERS]


def _is_up_to(step: int, record: dict[str, Any]) -> bool:
    return float(record["step"]) <= step


def _now() -> float:
    return round(time.time(), 3)
