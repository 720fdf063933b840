"""The Trainer runs the steps of a configuration, logs, evaluates, saves checkpoints and calls the callbacks.

from trainyard import Trainer, load
Trainer(load("tiny-llama"), loss=my_loss, metrics={"accuracy": accuracy}).run()
"""

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from trainyard import devices, models
from trainyard.checkpoint.formats.hf import save_hf
from trainyard.checkpoint.io.storage import LocalStorage, open_storage
from trainyard.config.load import dump
from trainyard.config.schema import Config
from trainyard.core.atomic_files import atomic_write_text
from trainyard.core.errors import UserError
from trainyard.core.world import World
from trainyard.data.loading.build import validation_sections
from trainyard.metrics.loggers.build import check_loggers
from trainyard.metrics.run_directory import RunDirectory
from trainyard.metrics.span_recorder import SpanRecorder
from trainyard.parallel.layout import Layout
from trainyard.parallel.mesh import Mesh
from trainyard.train import build
from trainyard.train.callbacks import Callback, build_callbacks
from trainyard.train.checkpointing.config_check import check_compatible
from trainyard.train.checkpointing.data_check import check_same_versions
from trainyard.train.checkpointing.deadline_save import DeadlineSaver
from trainyard.train.checkpointing.memory_copies import MemoryCopies
from trainyard.train.checkpointing.rank_agreement import RankAgreement
from trainyard.train.checkpointing.resume import find_resume_point, load_state
from trainyard.train.checkpointing.rng_state import restore_rng_state
from trainyard.train.checkpointing.saver import Saver
from trainyard.train.compile.compile_blocks import CompileCounter, make_compile_fn
from trainyard.train.decisions import packs_batches
from trainyard.train.evaluate import Metric, evaluate
from trainyard.train.loss import LossFunction
from trainyard.train.micro_batches.runner import MicroBatchRunner
from trainyard.train.micro_batches.split import rank_samples
from trainyard.train.model_files import run_model_files
from trainyard.train.optim.gather_full import gather_full_parameter
from trainyard.train.optim.load_rule import load_update_rule
from trainyard.train.optim.lr_schedule import check_schedule, learning_rate
from trainyard.train.optim.optimizer import Optimizer
from trainyard.train.records import RunSummary, check_weights, step_record, too_many_skipped
from trainyard.train.run_log.run_log import RunLog, lacks_samples
from trainyard.train.shutdown import StopSignal, quiet_garbage_collector
from trainyard.train.status import StepStatus
from trainyard.train.step import StepResult, TrainStep
from trainyard.train.stragglers import StragglerMonitor
from trainyard.train.text_samples.generate import continue_prompts
from trainyard.train.text_samples.prompts import TextPrompts
from trainyard.train.timing.profiler import StepProfiler, check_profile_ranks
from trainyard.train.timing.run_spans import recorded_spans
from trainyard.train.user_functions import check_named_numbers, user_function

logger = logging.getLogger(__name__)


class Trainer:
    """One rank of a training run."""

    def __init__(
        self,
        config: Config,
        loss: LossFunction | None = None,
        metrics: Mapping[str, Metric] | None = None,
        evaluate: "Callable[[Trainer], Mapping[str, float]] | None" = None,
        callbacks: Iterable[Callback] = (),
        weights: models.ParameterValues | None = None,
        device: devices.Device | None = None,
        preflight: Callable[[Config, Layout, devices.Device], None] = lambda config, layout, device: None,
        world: World | None = None,
        run_directory: Path | None = None,
    ) -> None:
        """`loss` and each metric take (output, batch) and return (sum, count); `evaluate` takes the trainer and returns
        named numbers. `weights` gives the full initial parameters. `device` replaces the one of config.device.name, for
        dry runs. `preflight` is called when the device is ready and before any memory is allocated. `world` defaults
        to that of the environment. `run_directory` is an existing one to train in, from its latest checkpoint."""
        self.config = config
        self.callbacks = build_callbacks(callbacks, config.train.callbacks)
        check_schedule(config)
        load_update_rule(config.optimizer)  # reports a mistake before anything is built
        self.world = world = world or World.from_environment()
        self.layout = layout = Layout.from_config(config, world.size)
        check_profile_ranks(config.profile, world.size)
        self.device = device = build.build_device(config, world, device)
        preflight(config, layout, device)
        self.mesh = mesh = Mesh.create(layout, device, world, device.rank_order(layout.tp, world.size))
        if config.log.loggers:
            mesh.broadcast_object(partial(check_loggers, config.log.loggers), device)
        self.run_directory, resumed, self.lost_run = find_resume_point(config, mesh, device, run_directory)
        self.directory = self.run_directory.path if self.run_directory else None
        self.resumed = resumed
        """The checkpoint that the run continues."""
        if resumed:
            check_compatible(resumed, config, mesh, device)
        self.text_prompts = TextPrompts(config, mesh, device, resumed) if config.samples.every else None
        compile_fn = make_compile_fn(config.compile, device, world.local_rank)
        kernels = device.kernels(fused=config.device.kernels == "fused")
        self.loss_fn = build.build_loss(config, loss, kernels, compile_fn, device)
        self.metrics = build.build_metrics(config, metrics, self.loss_fn)
        self.evaluation_fn = user_function(evaluate, config.evaluate.function, "evaluate.function")
        needs_validation = bool(config.evaluate.every) and not self.evaluation_fn
        if self.evaluation_fn and config.evaluate.sets:
            raise UserError("evaluate.sets: the evaluation function replaces their evaluation; use only one of them")
        self.loader, self.validation_loaders = build.build_loaders(config, needs_validation)
        """`validation_loaders` by name; "" are the samples held out from the training data."""
        for data in (config.data, *(validation_sections(config).values() if needs_validation else ())):
            check_same_versions(data, mesh)
        self.blueprint = models.family_of(config.model).blueprint(config.model)
        logger.info("initializing %s weights", f"{self.blueprint.parameter_count():,}")
        self.models = build.build_stages(config, mesh, device, kernels)
        """This rank's pipeline stages; without a pipeline, the full model alone."""
        values = build.initial_parameters(config, self.blueprint, mesh, device, resumed is not None, weights)
        self.stragglers = StragglerMonitor.create(mesh, device, config.layout.zero)
        stopwatch = self.stragglers.stopwatch if self.stragglers else None
        self.spans = SpanRecorder()
        waiting = self.spans.waiting(stopwatch, world.size)
        self.optimizer = Optimizer(
            self.models, self.blueprint, values, config, device, mesh, kernels, compile_fn, waiting
        )
        padding_free = packs_batches(config, layout, kernels.has_varlen_attention)
        build.wrap_blocks(config, self.models, device, mesh, compile_fn, padding_free)
        self.compile_counter = CompileCounter(mesh) if compile_fn else None
        self.runner = MicroBatchRunner(self.models, config, device, mesh, padding_free, self.spans)
        self.train_step = TrainStep(
            self.runner, self.loss_fn, self.optimizer, config.train.seed, self._on_gradients_ready, stopwatch, waiting
        )
        self.batch_slice = rank_samples(config.train.global_batch, layout.dp, mesh.coords["dp"])
        """This rank's samples of each global batch."""
        self.throughput = build.build_throughput_meter(
            config, self.blueprint, device, self.optimizer.state.compute_dtype, layout.world_size
        )
        self.completed_steps = 0
        self.saver: Saver | None = None
        self.memory_copies: MemoryCopies | None = None
        self.deadline_saver: DeadlineSaver | None = None
        self.run_log: RunLog | None = None
        self.profiler: StepProfiler | None = None
        self.last_checkpoint: str | None = None
        """The last committed checkpoint of this run."""
        self.stop_signal = StopSignal()
        self.stop_requested = False
        """True once any rank was asked to stop, known to all ranks."""
        self.last_record: dict[str, Any] = {}
        """The last logged record."""
        self.last_evaluation: dict[str, float] = {}
        if resumed:
            logger.info("resuming from step %s: %s", resumed.step, resumed.storage)
            with resumed:
                load_state(resumed, self.optimizer, self.blueprint, mesh)
                restore_rng_state(resumed.rank_extras(mesh.layout_rank), device, mesh.layout_rank)
            self.completed_steps = resumed.step

    @property
    def model(self) -> models.TransformerStage:
        """The full model, or this rank's first pipeline stage."""
        return self.models[0]

    def run(self) -> RunSummary:
        """Train until config.train.steps or a signal, and write the run directory."""
        log = self.config.log
        if self.config.checkpoint.export_hf:  # before anything is written
            build.check_export(self.config)
        create = partial(RunDirectory.create, Path(log.directory).expanduser(), log.name, self.lost_run)
        run_directory = self.run_directory or self.mesh.broadcast_object(create, self.device)
        self.directory = run_directory.path
        with run_directory:
            try:
                return self._run_in(run_directory)
            finally:
                if self.saver:
                    self.saver.close()

    def _run_in(self, run_directory: RunDirectory) -> RunSummary:
        config, directory = self.config, run_directory.path
        is_leader = self.mesh.layout_rank == 0
        model_files = run_model_files(config, self.resumed) if is_leader else {}
        if is_leader:
            atomic_write_text(directory / "config.yaml", dump(config))
            on_event = partial(self._notify, "on_event")
            self.run_log = RunLog(run_directory, config, self.completed_steps, self.loader, on_event)
        if config.checkpoint.saving_enabled:
            storage = open_storage(config.checkpoint.directory or directory / "checkpoints")
            if config.checkpoint.directory and isinstance(storage, LocalStorage):
                self.mesh.broadcast_object(partial(run_directory.lock_checkpoints, storage.path), self.device)
            state = (self.blueprint, self.optimizer, self.device, self.mesh)
            self.saver = Saver(config, storage, *state, run_directory, self._on_saved, model_files)
            self.saver.preflight()
            if config.checkpoint.memory_every:
                self.memory_copies = MemoryCopies(
                    config, run_directory.run_id, *state, self.world, self.saver.metadata, self.completed_steps
                )
        self.profiler = StepProfiler.create(
            config.profile, directory, self.world.rank, self.device, self.completed_steps + 1
        )
        start = time.perf_counter()
        losses: list[float] = []
        exported: Path | None = None
        error: BaseException | None = None
        agreement = RankAgreement(self.mesh.store, self.world)
        self.deadline_saver = DeadlineSaver(
            config.checkpoint.stop_grace_s, self.saver, self.device, agreement, self.completed_steps, self._on_deadline
        )
        spans = recorded_spans(self.spans, config, directory, self.mesh, self.device, self.completed_steps)
        with self.stop_signal.handle_signals(), self.deadline_saver, spans, quiet_garbage_collector():
            try:
                self._notify("on_start")
                if self.run_log:
                    self.run_log.start(self.layout.world_size, self.device.describe(), self.resumed is not None)
                if self.text_prompts and self.mesh.broadcast_object(partial(lacks_samples, self.run_log), self.device):
                    self._sample_if_due(self.completed_steps)
                for record in self._train_steps():
                    losses.append(record["loss"])
                    self._publish("on_log", record)
                    check_weights(record["param_norm"], record["step"])  # before the step is saved
                    if evaluation := self._evaluate_if_due(record):
                        self._publish("on_evaluate", evaluation)
                    self._sample_if_due(record["step"])
                self.deadline_saver.stop()
                self._notify("on_last_step")
                with self.spans("save"):
                    if self.saver:
                        self.saver.finish()
                    if self.memory_copies:
                        self.memory_copies.finish()
                if config.checkpoint.export_hf:
                    check_weights(float(self.optimizer.weight_norm()), self.completed_steps)
                    exported = directory / "model"
                    dtype = self.optimizer.state.compute_dtype
                    save_hf(exported, config.model, self.full_parameter, dtype, is_leader, model_files)
            except BaseException as problem:
                error = problem
                raise
            finally:
                self.optimizer.wait_for_weights()
                if self.profiler:
                    self.profiler.close()
                if self.run_log:
                    self.run_log.end(self.completed_steps, error, self.should_stop())
                self._notify("on_end")
        return RunSummary(
            directory=directory,
            steps=self.completed_steps,
            first_loss=losses[0] if losses else None,
            last_loss=losses[-1] if losses else None,
            seconds=time.perf_counter() - start,
            skipped_steps=int(self.optimizer.guard.skip_counts[0]),
            last_step_skipped=bool(self.optimizer.guard.skip_counts[1]),
            interrupted=self.should_stop(),
            exported_weights=exported,
            last_checkpoint=self.last_checkpoint,
            evaluation=self.last_evaluation,
        )

    def should_stop(self) -> bool:
        """True if a signal asked for the end of the run; the step in progress is finished first. With several ranks,
        true if any of them was asked, as all learned with the last step."""
        return self.stop_signal.requested if self.layout.world_size == 1 else self.stop_requested

    def full_parameter(self, name: str) -> torch.Tensor:
        """A full parameter in the highest precision available. All ranks must ask, in the same order."""
        return gather_full_parameter(self.optimizer.state, self.blueprint, self.mesh, name)

    def evaluate(self) -> dict[str, float]:
        """Run the user's evaluation function, or compute loss, perplexity and metrics on the validation samples.
        Results of one of evaluate.sets are called NAME/loss and so on."""
        if self.evaluation_fn:
            return check_named_numbers(self.evaluation_fn(self))
        if not self.validation_loaders:
            raise UserError("data.validation_fraction=0: there are no validation samples to evaluate on; nearest: 0.05")
        results: dict[str, float] = {}
        for name, loader in self.validation_loaders.items():
            batches, limit = loader.one_epoch(self.batch_slice), self.config.evaluate.batches
            totals = evaluate(self.runner, self.loss_fn, self.metrics, batches, limit, self._poll_stop)
            results |= {f"{name}/{key}" if name else key: value for key, value in totals.means().items()}
        return results

    def _poll_stop(self) -> bool:
        """Between evaluation batches and tokens of samples: True if any rank was asked to stop."""
        self._notify("on_evaluation_batch")
        requested = torch.tensor(float(self.stop_signal.requested), device=self.device.torch_device)
        self.stop_requested = self.stop_requested or bool(self.mesh.world.all_reduce_max(requested))
        return self.stop_requested

    def _train_steps(self) -> Iterator[dict[str, Any]]:
        """Run the steps and yield a record for each that is logged, evaluated or sampled from.

        On devices with a queue, the results of a step are read only after the next step is queued, so the device never
        waits for the host.
        """
        unread: StepResult | None = None
        log_due = True
        for model in self.models:
            model.train()
        self.throughput.start(self.completed_steps)
        steps, first_step = self.config.train.steps, self.completed_steps + 1
        batches = self.loader.prefetch(self.completed_steps, steps, self.batch_slice, self.runner.stage_batch)
        while self.completed_steps < steps and not self.should_stop():
            if self.deadline_saver:
                self.deadline_saver.gate.begin_step()
            step = self.completed_steps + 1
            log_due = self._log_due(step)
            if self.profiler:
                self.profiler.begin_step(step)
            self.spans.begin_step(step, sampled=log_due)
            if self.stragglers and log_due and step > first_step:  # the first step compiles
                self.stragglers.start(step)
            with self.spans("data wait"):
                batch = next(batches)
            status = self.saver.step_status(step) if self.saver else StepStatus()
            status = self.memory_copies.add_status(step, status) if self.memory_copies else status
            status = status._replace(stop_requested=float(self.stop_signal.requested))
            result = self.train_step(batch, step, learning_rate(self.config, step), status)
            self.device.flush()
            self.completed_steps = step
            self._notify("on_step", step)
            if unread is not None:
                self._handle_status(unread)
            unread = result
            if self.device.synchronous or log_due:
                self._handle_status(result, log_due)
                unread = None
            self.spans.end_step()
            if self.profiler:
                self.profiler.end_step(step)
            if log_due:
                yield self._make_record(result)
                self.throughput.start(self.completed_steps)
            if self.deadline_saver:
                self.deadline_saver.end_step(step)
            if self.saver and self.saver.save_due(step):  # Saver.finish saves the last step
                with self.spans("save"):
                    self.saver.begin(step)
            elif self.memory_copies and self.memory_copies.due(step):
                with self.spans("save"):
                    self.memory_copies.begin(step)
        batches.close()
        if not log_due:  # a signal ended the run: log the last step too
            yield self._make_record(result)

    def _log_due(self, step: int) -> bool:
        intervals = (self.config.log.every, self.config.evaluate.every, self.config.samples.every)
        return step in (1, self.config.train.steps) or any(every and step % every == 0 for every in intervals)

    def _handle_status(self, result: StepResult, log_due: bool = False) -> None:
        """Act on the reduced status of a step. Raises RunStopped after too many skipped steps in a row."""
        status = result.read_status()
        self.stop_requested = self.stop_requested or bool(status.flags.stop_requested)
        if self.saver:
            self.saver.on_step_status(result.step, status.flags)
        if self.memory_copies:
            self.memory_copies.on_step_status(result.step, status.flags)
        too_many = status.skipped_in_a_row >= self.config.train.max_skipped_steps
        if self.run_log and (too_many or not log_due):  # the record of a logged step says more
            self.run_log.watch(result.step, status)
        if too_many:
            raise too_many_skipped(result, self.config, self.optimizer, self.mesh)

    def _make_record(self, result: StepResult) -> dict[str, Any]:
        """The metrics of a logged step."""
        status = result.read_status()  # waits for the step, which the throughput includes
        self.optimizer.wait_for_weights()  # callbacks may read the weights
        rates = self.throughput.read(result.step)
        with self.spans("log"):
            is_first = not self.last_record
            record = step_record(
                result, rates, self.config, self.optimizer, self.device, self.mesh, self.models, is_first
            )
        self.spans.place_device_spans(self.device.synchronize)
        if self.stragglers:
            record |= self.stragglers.metrics(result.step)
        if self.compile_counter:
            record |= self.compile_counter.new_counts()
        self.last_record = record
        if self.run_log:
            self.run_log.watch(result.step, status, record.get("not_finite"))
        return record

    def _evaluate_if_due(self, record: dict[str, Any]) -> dict[str, Any] | None:
        every, step = self.config.evaluate.every, record["step"]
        if not every or self.should_stop() or (step % every and step != self.config.train.steps):
            return None
        with self.spans("evaluate"):
            result = self.evaluate()
        self.throughput.start(self.completed_steps)
        if self.should_stop():  # the evaluation is incomplete
            return None
        self.last_evaluation = result
        return {"step": step, **{f"evaluate/{name}": value for name, value in result.items()}}

    def _sample_if_due(self, step: int) -> None:
        every, prompts = self.config.samples.every, self.text_prompts
        if not prompts or self.should_stop() or (step % every and step != self.config.train.steps):
            return
        with self.spans("samples"):
            new_tokens = continue_prompts(self.runner, self.config, prompts.tokens, prompts.end_id, self._poll_stop)
        self.throughput.start(self.completed_steps)
        if new_tokens is None:  # a signal; the resumed run samples again
            return
        records = self.mesh.broadcast_object(partial(prompts.records, step, new_tokens), self.device)
        if self.run_log:
            self.run_log.write_samples(records)
        self._notify("on_samples", records)

    def _on_gradients_ready(self) -> None:
        self._notify("on_gradients_ready")
        if self.deadline_saver:
            self.deadline_saver.gate.begin_update(self.completed_steps + 1)

    def _on_deadline(self) -> None:
        """Before the process ends inside a step."""
        self.spans.close()
        if self.run_log:
            self.run_log.end_at_deadline(self.completed_steps)
        if self.saver:
            self.saver.close()
        self._notify("on_end")

    def _on_saved(self, record: dict[str, Any]) -> None:
        self.last_checkpoint = record["checkpoint"]
        self._publish("on_checkpoint", record)

    def _publish(self, event: str, record: dict[str, Any]) -> None:
        if self.run_log:
            self.run_log.write(record)
        self._notify(event, record)

    def _notify(self, event: str, *arguments: Any) -> None:
        for callback in self.callbacks:
            getattr(callback, event)(self, *arguments)
