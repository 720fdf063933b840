"""The parts of a run, and their order.

The trainer calls its parts and the user's callbacks as one list, and knows none of them. What a run does besides its
steps is added here: a subclass of `Part`, a function that builds it, and a place in ORDER.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

from trainyard.checkpoint.checkpoint import Checkpoint
from trainyard.checkpoint.weights import BaseWeights
from trainyard.core.world import World
from trainyard.data.loading.fingerprint import Fingerprints
from trainyard.data.loading.loader import BatchSource
from trainyard.metrics.run_directory import RunDirectory
from trainyard.metrics.span_recorder import SpanRecorder
from trainyard.parallel.rank_context import RankContext
from trainyard.remote.storage import open_storage
from trainyard.run.callbacks import Callback, P, Part, TrainerView
from trainyard.run.checkpointing.data_check import fingerprint_data
from trainyard.run.checkpointing.deadline_save import DeadlineSaver
from trainyard.run.checkpointing.in_memory_saver import InMemorySaver
from trainyard.run.checkpointing.rank_agreement import RankAgreement
from trainyard.run.checkpointing.saver import Saver
from trainyard.run.checkpointing.state_writer import StateWriter
from trainyard.run.profiler import StepProfiler
from trainyard.run.records import WeightCheck
from trainyard.run.run_log import RunLog
from trainyard.run.run_spans import RunSpans
from trainyard.run.stragglers import StragglerMonitor
from trainyard.run.text_samples import TextPrompts, TextSamples
from trainyard.train.compile.compile_blocks import CompileCounter
from trainyard.train.micro_batches.runner import MicroBatchRunner
from trainyard.train.step import StepResult


class BuiltTrainer(TrainerView, Protocol):
    """The Trainer as its parts are built from it: everything that a step needs exists."""

    context: RankContext
    world: World
    batch_source: BatchSource
    runner: MicroBatchRunner
    spans: SpanRecorder
    run_directory: RunDirectory
    model_files: dict[str, bytes]
    resumed: Checkpoint | None
    base: BaseWeights | None
    callbacks: list[Callback]
    """While parts are built: those that exist."""
    user_callbacks: list[Callback]
    text_prompts: TextPrompts | None
    stragglers: StragglerMonitor | None
    compiles: bool

    def poll_stop(self) -> bool: ...

    @property
    def parts(self) -> list[Part]: ...

    def part(self, kind: type[P]) -> P | None:
        """The part of this class; None if the run has none."""


class CompileMetrics(Part):
    """Adds the counts of compiled graphs to the records."""

    def __init__(self, counter: CompileCounter) -> None:
        self.counter = counter

    def add_metrics(self, result: StepResult, record: dict[str, Any]) -> None:
        record |= self.counter.new_counts()


class Evaluation(Part):
    """Evaluates every evaluate.every steps and after the last one. All ranks take part."""

    def __init__(self, every: int, last_step: int, spans: SpanRecorder) -> None:
        self.every, self.last_step, self.spans = every, last_step, spans

    def on_log(self, trainer: TrainerView, record: dict[str, Any]) -> None:
        step = record["step"]
        is_due = step % self.every == 0 or step == self.last_step
        if not is_due or trainer.should_stop():
            return
        with self.spans("evaluate"):
            result = trainer.evaluate()
        if trainer.should_stop():  # the evaluation is incomplete
            return
        trainer.last_evaluation = result
        trainer.notify("on_evaluate", {"step": step, **{f"evaluate/{name}": value for name, value in result.items()}})


def _saver(trainer: BuiltTrainer) -> Sequence[Part]:
    config, run, mesh = trainer.config, trainer.run_directory, trainer.context.mesh
    if not config.checkpoint.saving_enabled:
        return ()
    # Only the first rank writes the manifest of a checkpoint; that of a copy in memory is on every host.
    data_files: Fingerprints = fingerprint_data(config.data) if mesh.layout_rank == 0 else {}
    if config.checkpoint.memory_every:
        data_files = mesh.broadcast_object(lambda: data_files, trainer.context.device)
    tensors = trainer.batch_source.rank_tensors
    writer = StateWriter(config, run, trainer.context, trainer.optimizer, data_files, trainer.base, tensors)
    storage = open_storage(config.checkpoint.directory or run.path / "checkpoints")
    return (Saver(writer, storage, partial(trainer.notify, "on_checkpoint"), trainer.spans, trainer.model_files),)


def _in_memory_saver(trainer: BuiltTrainer) -> Sequence[Part]:
    saver = trainer.part(Saver)
    if not saver or not trainer.config.checkpoint.memory_every:
        return ()
    writer = replace(saver.state_writer)  # with buffers of its own: both may copy at the same time
    return (InMemorySaver(saver, writer, trainer.world, trainer.completed_steps),)


def _run_log(trainer: BuiltTrainer) -> Sequence[Part]:
    context = trainer.context
    if context.mesh.layout_rank:
        return ()
    process = {"ranks": trainer.world.size, "device": context.device.describe(), "resumed": trainer.resumed is not None}
    publish_event = partial(trainer.notify, "on_event")
    indices = trainer.batch_source.sample_indices
    return (RunLog(trainer.run_directory, trainer.config, trainer.completed_steps, indices, publish_event, process),)


def _deadline_saver(trainer: BuiltTrainer) -> Sequence[Part]:
    agreement = RankAgreement(trainer.context.mesh.store, trainer.world)
    return (
        DeadlineSaver(
            trainer.config.checkpoint.stop_grace_s,
            trainer.part(Saver),
            trainer.context.device,
            agreement,
            trainer.completed_steps,
            partial(_end_at_deadline, trainer),
        ),
    )


def _end_at_deadline(trainer: BuiltTrainer) -> None:
    """Before the process ends inside a step, in the thread of the deadline saver."""
    for part in reversed(trainer.parts):
        part.end_at_deadline(trainer.completed_steps)
    trainer.notify("on_end")


def _profiler(trainer: BuiltTrainer) -> Sequence[Part]:
    section, path, next_step = trainer.config.profile, trainer.run_directory.path, trainer.completed_steps + 1
    profiler = StepProfiler.create(section, path, trainer.world.rank, trainer.context.device, next_step)
    return (profiler,) if profiler else ()


def _spans(trainer: BuiltTrainer) -> Sequence[Part]:
    config, path = trainer.config, trainer.run_directory.path
    enabled = config.log.spans and trainer.completed_steps < config.train.steps
    return (RunSpans(trainer.spans, path, trainer.context, enabled, config.compile.enabled),)


def _stragglers(trainer: BuiltTrainer) -> Sequence[Part]:
    return (trainer.stragglers,) if trainer.stragglers else ()  # made with the step, whose waits pause its stopwatch


def _compile_counts(trainer: BuiltTrainer) -> Sequence[Part]:
    return (CompileMetrics(CompileCounter(trainer.context.mesh)),) if trainer.compiles else ()


def _evaluation(trainer: BuiltTrainer) -> Sequence[Part]:
    every, last_step = trainer.config.evaluate.every, trainer.config.train.steps
    return (Evaluation(every, last_step, trainer.spans),) if every else ()


def _text_samples(trainer: BuiltTrainer) -> Sequence[Part]:
    if not trainer.text_prompts:
        return ()
    run_log = trainer.part(RunLog)
    prompts, poll_stop = trainer.text_prompts, trainer.poll_stop
    return (TextSamples(prompts, trainer.runner, poll_stop, trainer.spans, run_log),)


ORDER: tuple[Callable[[BuiltTrainer], Sequence[Callback]], ...] = (
    # Savers first: a failed save is reported with a collective, in this order on all ranks; and a run that cannot save
    # is refused before the log of an earlier process is touched. At the end of a step, in reverse order, the copy in
    # memory comes first, and asks whether a checkpoint follows, which replaces it.
    _saver,
    _in_memory_saver,
    # Before the user's callbacks, so that a record is in the log when one of them fails.
    _run_log,
    # Before the deadline saver, which counts an update as started when its gradients are ready: callbacks still see
    # them while the update can be held.
    lambda trainer: trainer.user_callbacks,
    # Around the work of a step: it begins before all else, and its step ends when logging has, before a save starts.
    _deadline_saver,
    # Around the spans, which would otherwise contain the start of a trace and the time to write it.
    _profiler,
    _spans,
    # Last of those that begin a step: the stopwatch sees only this rank's own work.
    _stragglers,
    _compile_counts,
    # After a record is logged: weights that are not finite are neither evaluated nor saved.
    lambda trainer: (WeightCheck(),),
    _evaluation,
    _text_samples,
)
"""Builds each part, or none if the run does without, after everything before it in the list exists."""


def build_parts(trainer: BuiltTrainer) -> ExitStack:
    """Build the callbacks of a run in ORDER, on all ranks together. Returns the context that closes the parts."""
    trainer.callbacks = []
    with ExitStack() as stack:
        for build in ORDER:
            for callback in build(trainer):
                trainer.callbacks.append(callback)
                if isinstance(callback, Part):
                    stack.callback(callback.close)
        return stack.pop_all()
