"""Callbacks: how user code, and the parts of the trainer, take part in a run."""

from collections.abc import Iterable, Sequence
from inspect import signature
from pathlib import Path
from typing import Any, Protocol, TypeVar

from trainyard.config.schema import Config
from trainyard.core.errors import UserError
from trainyard.core.user_code import check_call, describe_object, import_subclass, make_instance, nearest_name
from trainyard.models import TransformerStage
from trainyard.train.optim.optimizer import Optimizer
from trainyard.train.status import HostStatus, StepStatus
from trainyard.train.step import StepResult


class TrainerView(Protocol):
    """The Trainer as callbacks see it."""

    config: Config
    models: list[TransformerStage]
    """This rank's pipeline stages; without a pipeline, the full model alone."""
    optimizer: Optimizer
    completed_steps: int
    directory: Path | None
    """The run directory; None before `run`."""
    last_record: dict[str, Any]
    """The last logged record."""
    last_evaluation: dict[str, float]
    last_checkpoint: str | None
    """The last committed checkpoint of this run."""

    def evaluate(self) -> dict[str, float]: ...

    def should_stop(self) -> bool: ...

    def notify(self, event: str, *arguments: Any) -> None:
        """Call the method `event` of every callback."""


class Callback:
    """Base class with empty methods. Every method may read and change the run."""

    def on_start(self, trainer: TrainerView) -> None:
        """The run starts: everything is built, no step has run."""

    def on_gradients_ready(self, trainer: TrainerView) -> None:
        """`trainer.optimizer.state.reduced_grads` holds the gradients of all ranks; the update has not run."""

    def on_step(self, trainer: TrainerView, step: int) -> None:
        """A step is queued on the device. Reading its results would wait for it. Under ZeRO-1 new weights may still be
        in flight: `trainer.optimizer.wait_for_weights()` waits for them."""

    def on_log(self, trainer: TrainerView, record: dict[str, Any]) -> None:
        """A step is logged; `record` goes to metrics.jsonl."""

    def on_evaluation_batch(self, trainer: TrainerView) -> None:
        """A batch of an evaluation, or the next token of text samples, follows."""

    def on_evaluate(self, trainer: TrainerView, record: dict[str, Any]) -> None:
        """An evaluation is complete; `record` goes to metrics.jsonl."""

    def on_samples(self, trainer: TrainerView, records: list[dict[str, Any]]) -> None:
        """The model has continued the prompts of samples.prompts; these text samples go to samples.jsonl."""

    def on_rollouts(self, trainer: TrainerView, records: list[dict[str, Any]]) -> None:
        """The model has written completions that the next steps train on (train.objective=grpo or rloo); those of one
        prompt go to rollouts.jsonl."""

    def on_event(self, trainer: TrainerView, event: dict[str, Any]) -> None:
        """On rank 0: the run starts or ends, a loss spikes or a step is skipped; `event` goes to events.jsonl."""

    def on_checkpoint(self, trainer: TrainerView, record: dict[str, Any]) -> None:
        """A checkpoint is committed. `record` has its path, its bytes, how long it took and how long steps waited."""

    def on_last_step(self, trainer: TrainerView) -> None:
        """All steps have run, or a signal ended them; the last checkpoint and the export follow."""

    def on_end(self, trainer: TrainerView) -> None:
        """The run is over, completed or not."""


class Part(Callback):
    """A part of the trainer: a callback that also works inside the steps, and that owns threads and files.

    parts.py has the order of the parts. What begins is called in this order, and what ends in the reverse order, as
    contexts nest: `end_step`, `complete_step`, `end_run`, `end_at_deadline` and `close`.
    """

    def open(self) -> None:
        """Signals are handled now. Start threads and open files, which `close` ends in every case."""

    def begin_run(self, trainer: TrainerView) -> None:
        """Every callback has had its `on_start`; the first step follows."""

    def begin_step(self, step: int, logged: bool) -> None:
        """The host begins `step`, which has a record if `logged`."""

    def add_status(self, step: int, status: StepStatus) -> StepStatus:
        """Add this rank's flags to those that are all-reduced with `step`."""
        return status

    def handle_status(self, step: int, status: HostStatus, logged: bool) -> None:
        """Act on the status of `step`, which all ranks have. On a device with a queue it is read one step late. Unless
        `logged`, no record of the step follows."""

    def end_step(self, step: int) -> None:
        """The host has queued all work of `step`; it is logged after this."""

    def add_metrics(self, result: StepResult, record: dict[str, Any]) -> None:
        """Add metrics to the record of a step, which is complete on the device. All ranks call this together."""

    def complete_step(self, step: int) -> None:
        """`step` is logged, and the evaluation and text samples that follow it are complete. Saves start here."""

    def finish(self) -> None:
        """The last step is complete: save it, and wait for what is in progress. All ranks call this together."""

    def end_run(self, trainer: TrainerView, error: BaseException | None) -> None:
        """The run ends, with `error` if it failed."""

    def end_at_deadline(self, step: int) -> None:
        """The process ends inside the step after `step`, which another thread runs: close the files of the run."""

    def close(self) -> None:
        """Release what the part holds, also if `open` or another part failed."""


P = TypeVar("P", bound=Part)
METHODS = {
    name: tuple(signature(method).parameters)[1:] for name, method in vars(Callback).items() if name.startswith("on_")
}
"""Arguments of each method of a callback."""


def build_callbacks(objects: Iterable[object], paths: Sequence[str]) -> list[Callback]:
    """The given callbacks, followed by those that train.callbacks names. Raises UserError for one that would not be
    called as its author expects."""
    key = "train.callbacks"
    callbacks: list[Callback] = []
    for callback in objects:
        if not isinstance(callback, Callback):
            found = describe_object(callback)
            raise UserError(f"callbacks: expected an object of a subclass of trainyard.Callback, found {found}")
        _check_methods(callback, type(callback).__name__)
        callbacks.append(callback)
    for path in paths:
        callbacks.append(make_instance(import_subclass(path, key, Callback), path, key))
        _check_methods(callbacks[-1], f"{key}={path}: {type(callbacks[-1]).__name__}")
    return callbacks


def _check_methods(callback: Callback, label: str) -> None:
    """Raise UserError for a method `on_...` that the base class does not have, or that cannot take its arguments."""
    for name in (name for name in dir(callback) if name.startswith("on_")):
        if name not in METHODS:
            hint = nearest_name(name, METHODS) or f"; one of {', '.join(METHODS)}"
            raise UserError(f"{label}.{name}: no method of trainyard.Callback, so nothing calls it{hint}")
        method = getattr(callback, name)
        if not callable(method):
            raise UserError(f"{label}.{name}: expected a method, found {describe_object(method)}")
        check_call(method, METHODS[name], f"{label}.{name}")
