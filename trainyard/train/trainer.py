"""The Trainer: builds everything from a Config, runs the steps, tells the hooks.

from trainyard import Trainer, load
Trainer(load("tiny-llama"), loss=my_loss, metrics={"accuracy": accuracy}).run()
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch

from trainyard import devices, models
from trainyard.checkpoint.formats.hf import save_hf
from trainyard.checkpoint.formats.tensor_map import tp_rank_values
from trainyard.checkpoint.io.storage import open_storage
from trainyard.checkpoint.registry import open_weights
from trainyard.compile.compile_blocks import CompileCounter, compile_model, make_compile_fn
from trainyard.config.load import dump
from trainyard.config.schema import Config
from trainyard.core.atomic_files import atomic_write_text
from trainyard.core.errors import RunStopped, UserError
from trainyard.data.loading.build import build_datasets
from trainyard.data.loading.loader import BatchLoader
from trainyard.kernels.fp8_linear import Fp8Options
from trainyard.metrics.throughput import ThroughputMeter
from trainyard.metrics.writers import MetricsWriter, create_run_directory
from trainyard.models.flops import flops_per_sample
from trainyard.models.init import initial_values
from trainyard.models.sharding import shard_values
from trainyard.parallel import recompute
from trainyard.parallel.layout import Layout
from trainyard.parallel.mesh import Mesh, local_rank, world
from trainyard.parallel.tensor_parallel import Axes, ContextAxis, TensorAxis
from trainyard.train.callbacks import Callback
from trainyard.train.checkpointing.resume import check_compatible, find_resume_point, load_state
from trainyard.train.checkpointing.rng_state import restore_rng_state
from trainyard.train.checkpointing.saver import Saver, SaveStatus
from trainyard.train.cross_entropy import make_head_loss
from trainyard.train.decisions import packs_batches
from trainyard.train.evaluate import Metric, evaluate
from trainyard.train.losses import Loss, LossFunction, UserLoss, make_loss
from trainyard.train.lr_schedule import learning_rate
from trainyard.train.micro_batches import rank_samples
from trainyard.train.optim.gather_full import gather_full_parameter
from trainyard.train.optim.optimizer import Optimizer
from trainyard.train.shutdown import StopSignal, quiet_garbage_collector
from trainyard.train.step import MicroBatchRunner, StepResult, TrainStep
from trainyard.train.user_functions import import_function


def fp8_blocks(config: Config) -> models.Fp8Layers | None:
    precision = config.precision
    if precision.kind != "fp8":
        return None
    how = Fp8Options(precision.fp8_scaling, precision.fp8_backward)
    return models.Fp8Layers(how, range(precision.bf16_first_layers, config.model.layers - precision.bf16_last_layers))


def _zeros(blueprint: models.Blueprint, tp: int, rank: int, name: str) -> torch.Tensor:
    """Values of a parameter that are read later."""
    return torch.zeros(blueprint.local_shape(name, tp, rank))


@dataclass
class RunSummary:
    """How a run ended."""

    directory: Path
    steps: int
    first_loss: float
    last_loss: float
    seconds: float
    skipped_steps: int
    interrupted: bool
    exported_weights: Path | None
    last_checkpoint: str | None
    """The newest that this run has completed."""
    evaluation: dict[str, float]


class Trainer:
    def __init__(
        self,
        config: Config,
        loss: LossFunction | None = None,
        metrics: Mapping[str, Metric] | None = None,
        evaluate: "Callable[[Trainer], Mapping[str, float]] | None" = None,
        callbacks: Iterable[Callback] = (),
        weights: models.ParameterValues | None = None,
        say: Callable[[str], None] = lambda line: None,
        device: devices.Device | None = None,
        preflight: Callable[[Config, Layout, devices.Device], None] = lambda config, layout, device: None,
    ) -> None:
        """`loss` and each metric take (output, batch) and give (sum, count); `evaluate` takes the trainer. `device` is
        for rehearsals: a run's is config.device.name. `check` is called when that is ready and nothing is made yet."""
        self.config = config
        self.callbacks = list(callbacks)
        self.say = say
        _, ranks = world()
        self.layout = Layout.from_config(config, ranks)
        self.device = device or devices.select(config.device.name)
        self.device.prepare(config.device.deterministic, local_rank(), config.precision.kind, config.device.lnc)
        if config.device.threads:
            torch.set_num_threads(config.device.threads)
        preflight(config, self.layout, self.device)
        self.mesh = Mesh.create(self.layout, self.device, self.device.rank_order(self.layout.tp, ranks))
        self.directory, resumed = find_resume_point(config, self.mesh, self.device, say)
        if resumed:
            check_compatible(resumed, config, say)
        compile_ = make_compile_fn(config.compile, self.device)
        own = config.train.loss
        function = loss or (import_function(own, "train.loss") if own else None)
        kernels = self.device.kernels(fused=config.device.kernels == "fused")
        fp8 = fp8_blocks(config)
        how = fp8.recipe if fp8 and config.precision.head_dtype == "fp8" else None
        head = make_head_loss(kernels, compile_, how, self.device.max_logits_bytes)
        self.loss_fn: Loss = UserLoss(function) if function else make_loss(config.model.family, head)
        dotted = config.evaluate.metrics.items()
        self.metrics = {name: import_function(path, f"evaluate.metrics.{name}") for name, path in dotted} | dict(
            metrics or {}
        )
        own_evaluation = config.evaluate.function
        self.evaluation_fn = evaluate or (
            import_function(own_evaluation, "evaluate.function") if own_evaluation else None
        )

        train, held_out, shuffle = build_datasets(config, say)
        if config.evaluate.every and not held_out and not self.evaluation_fn:
            raise UserError(
                f"evaluate.every={config.evaluate.every}: data.split={config.data.split} holds no sample out"
            )
        self.loader = BatchLoader(train, config.train.global_batch, config.train.seed, shuffle)
        self.validation_loader = (
            BatchLoader(held_out, config.train.global_batch, config.train.seed, shuffle=False) if held_out else None
        )
        self.blueprint = models.family_of(config.model).blueprint(config.model)
        say(f"making {self.blueprint.parameter_count():,} weights")
        tp, sequence = self.mesh.tp, config.layout.sequence_parallel
        context, traced = config.layout.cp_method, self.device.decomposes_attention
        if traced and context == "ring" and self.layout.cp > 1:
            say("layout.cp_method=ring: on this device keys and values are gathered instead")
        axes = Axes(TensorAxis(tp, sequence), ContextAxis(self.mesh.cp, context, traced))
        self.stages = [
            (stage, models.build_model(config.model, self.device.torch_device, axes, stage, kernels, fp8))
            for stage in self.layout.stages_on(self.mesh.coords["pp"])
        ]
        self.models = [model for _, model in self.stages]
        """This rank's stages of the pipeline; a single one has the whole model."""
        start = config.checkpoint.resume if config.checkpoint.weights_only else config.checkpoint.init_from
        if resumed:
            values: models.ParameterValues = partial(_zeros, self.blueprint, tp.size, tp.rank)
        elif weights:
            values = shard_values(self.blueprint, weights, tp.size, tp.rank)
        elif start:
            say(f"reading weights from {start}")
            values = tp_rank_values(open_weights(start, config.model).weights, tp.size, tp.rank)
        else:
            values = initial_values(self.blueprint, config.train.seed, self.device.init_device, tp.size, tp.rank)
        self.optimizer = Optimizer(
            self.models, self.blueprint, values, config, self.device, self.mesh, kernels, compile_
        )
        # One fixed order: split (build), shard, recompute, compile. The last two change `forward` alone, so that hooks
        # around a block stay outside.
        packs = packs_batches(config, self.layout, kernels.has_varlen_attention)
        for model in self.models:
            model.max_seq_len = config.data.seq_len
            recompute.apply_recompute(list(model.layers.children()), config.recompute)
            if compile_ and (asked := self.device.compile_options()):
                compile_model(model, asked, config.compile.mode, packs, not self.device.synchronous and tp.size == 1)
        self.compile_counter = CompileCounter(self.mesh) if compile_ else None
        self.runner = MicroBatchRunner(self.stages, config, self.device, self.mesh, packs)
        self.train_step = TrainStep(
            self.runner, self.loss_fn, self.optimizer, self.device, self.mesh, config.train.seed
        )
        self.batch_slice = rank_samples(config.train.global_batch, self.layout.dp, self.mesh.coords["dp"])
        """Of each global batch, what this rank works on."""
        flops = flops_per_sample(config.model, self.blueprint, config.data.seq_len, config.data.max_predictions)
        self.throughput = ThroughputMeter(
            config, flops, self.device.peak_throughput(self.optimizer.compute_dtype), self.layout.world_size
        )
        self.completed_steps = 0
        """Updates done."""
        self.saver: Saver | None = None
        self.last_checkpoint: str | None = None
        """Checkpoint that was completed last."""
        self.save_due = False
        """Whether rank 0's clock asked for a checkpoint."""
        if resumed:
            say(f"going on from step {resumed.step}: {resumed.storage}")
            with resumed:
                load_state(resumed, self.optimizer, self.blueprint, self.mesh)
                restore_rng_state(resumed.rank_extras(self.mesh.layout_rank), self.device, self.mesh.layout_rank)
            self.completed_steps = resumed.step
        self.stop_signal = StopSignal()
        self.last_record: dict[str, Any] = {}
        """The newest logged record."""
        self.stop_requested = False
        self.last_evaluation: dict[str, float] = {}

    @property
    def model(self) -> models.TransformerStage:
        """The model, or this rank's first stage of it."""
        return self.models[0]

    def run(self) -> RunSummary:
        """Train to config.train.steps, or until a signal; leave a run directory behind."""
        config = self.config
        leads = self.mesh.layout_rank == 0
        self.directory = self.directory or self.mesh.broadcast_object(
            lambda: create_run_directory(Path(config.log.directory).expanduser(), config.log.name), self.device
        )
        if leads:
            atomic_write_text(self.directory / "config.yaml", dump(config))
        writers = MetricsWriter(self.directory, config.log.tensorboard, self.completed_steps) if leads else None
        if config.checkpoint.saving_enabled:

            def tell(record: dict[str, Any]) -> None:
                self.last_checkpoint = record["checkpoint"]
                if writers:
                    writers.write(record)
                self._notify("on_checkpoint", record)

            place = open_storage(config.checkpoint.directory or self.directory / "checkpoints")
            self.saver = Saver(config, place, self.blueprint, self.optimizer, self.device, self.mesh, tell, self.say)
            self.saver.preflight()
        start = time.perf_counter()
        losses: list[float] = []
        weights: Path | None = None
        with self.stop_signal.handle_signals(), quiet_garbage_collector():
            try:
                self._notify("on_start")
                for record in self._train_steps():
                    losses.append(record["loss"])
                    if writers:
                        writers.write(record)
                    self._notify("on_log", record)
                    if evaluation := self._evaluate_if_due(record):
                        if writers:
                            writers.write(evaluation)
                        self._notify("on_evaluate", evaluation)
                if self.saver:
                    self.saver.finish()
                if config.checkpoint.export_hf:
                    weights = self.directory / "model"
                    save_hf(weights, config.model, self.full_parameter, self.optimizer.compute_dtype, is_writer=leads)
            finally:
                self.optimizer.wait_for_weights()
                if writers:
                    writers.close()
                self._notify("on_end")
        return RunSummary(
            directory=self.directory,
            steps=self.completed_steps,
            first_loss=losses[0] if losses else float("nan"),
            last_loss=losses[-1] if losses else float("nan"),
            seconds=time.perf_counter() - start,
            skipped_steps=int(self.optimizer.skip_counts[0]),
            interrupted=self.should_stop(),
            exported_weights=weights,
            last_checkpoint=self.last_checkpoint,
            evaluation=self.last_evaluation,
        )

    def should_stop(self) -> bool:
        """Whether a signal asked for the end; the step in progress is finished first. With several ranks: whether one
        of them was asked, as all learned with the last step."""
        return self.stop_signal.requested if self.layout.world_size == 1 else self.stop_requested

    def full_parameter(self, name: str) -> torch.Tensor:
        """A whole parameter at the best precision held. With several ranks all must ask, in the same order."""
        return gather_full_parameter(self.optimizer, self.blueprint, self.optimizer.master_weights, name)

    def evaluate(self) -> dict[str, float]:
        """The user's own evaluation function, or loss, perplexity and metrics on the held-out samples."""
        if self.evaluation_fn:
            result = self.evaluation_fn(self)
            if not isinstance(result, Mapping):
                raise UserError(
                    f"evaluation function: gave {type(result).__name__}; it gives a mapping of name to number"
                )
            return {str(name): float(value) for name, value in result.items()}
        if self.validation_loader is None:
            raise UserError("data.validation_fraction=0: no samples are held out to evaluate on; nearest: 0.05")
        config = self.config
        return evaluate(
            self.runner,
            self.loss_fn,
            self.metrics,
            self.validation_loader.one_epoch(self.batch_slice),
            self.device,
            self.mesh,
            config.evaluate.batches,
            self._poll_stop,
        )

    def _poll_stop(self) -> bool:
        """Between evaluation batches: whether any rank was asked to stop."""
        asked = torch.tensor(float(self.stop_signal.requested), device=self.device.torch_device)
        self.stop_requested = self.stop_requested or bool(self.mesh.world.all_reduce_max(asked))
        return self.stop_requested

    def _train_steps(self) -> Iterator[dict[str, Any]]:
        """Run the steps; yield a record for each that is logged or evaluated at.

        Where the device has a queue, a step is read only after the next one has been sent: it never waits for the host.
        """
        pending: StepResult | None = None
        due = True
        for model in self.models:
            model.train()
        self.throughput.start()
        batches = self.loader.prefetch(
            self.completed_steps, self.config.train.steps, self.batch_slice, self.runner.stage_batch
        )
        while self.completed_steps < self.config.train.steps and not self.should_stop():
            batch = next(batches)
            words = self.saver.step_status(self.completed_steps + 1) if self.saver else SaveStatus()
            says = (float(self.stop_signal.requested), *words)
            result = self.train_step(
                batch, self.completed_steps + 1, learning_rate(self.config, self.completed_steps + 1), says
            )
            self.device.flush()
            self.completed_steps += 1
            self._notify("on_step", self.completed_steps)
            due = self._log_due(self.completed_steps)
            if pending is not None:
                self._handle_status(pending)
            pending = result
            if self.device.synchronous or due:
                self._handle_status(result)
                pending = None
            if due:
                yield self._make_record(result)
                self.throughput.start()
            if self.saver and self.saver.save_due(
                self.completed_steps, self.save_due
            ):  # the last step's is `finish`'s to save
                self.save_due = False
                self.saver.begin(self.completed_steps)
        batches.close()
        if not due:  # a signal came: the last step is logged too
            yield self._make_record(result)

    def _log_due(self, step: int) -> bool:
        every = self.config.evaluate.every
        logged = step % self.config.log.every == 0 or step in (1, self.config.train.steps)
        return logged or bool(every and step % every == 0)

    def _handle_status(self, result: StepResult) -> None:
        """Stop after too many skipped steps in a row, naming what was not finite."""
        _, in_a_row, asked, *words = result.status().tolist()
        self.stop_requested = self.stop_requested or bool(asked)
        if self.saver:
            said = SaveStatus(*words)
            self.save_due = self.save_due or bool(said.due)
            self.saver.on_step_status(result.step, said)
        if in_a_row >= self.config.train.max_skipped_steps:
            raise RunStopped(
                f"step {result.step}: {in_a_row} steps in a row were not finite and were skipped (train.max_skipped_steps="
                f"{self.config.train.max_skipped_steps}); {self._describe_nonfinite(float(result.loss))}; "
                "try a lower optimizer.lr or a longer schedule.warmup_steps"
            )

    def _describe_nonfinite(self, loss: float) -> str:
        bad = [name for names in self.mesh.all_gather_object(self.optimizer.nonfinite_names()) for name in names]
        bad = sorted(set(bad), key=bad.index)
        what = f"gradient of {bad[0]}" + (f" and {len(bad) - 1} more" if len(bad) > 1 else "") if bad else "no gradient"
        return f"loss {loss}, not finite: {what}"

    def _make_record(self, result: StepResult) -> dict[str, Any]:
        total, in_a_row, *_ = result.status().tolist()
        self.optimizer.wait_for_weights()  # for hooks that look at the weights
        record: dict[str, Any] = {
            "step": result.step,
            "consumed_samples": result.step * self.config.train.global_batch,
            **self.throughput.read(result.step),
            "lr": result.lr,
            "global_batch": self.config.train.global_batch,
            "loss": float(result.loss),
            **({f"loss/{name}": float(value) for name, value in result.terms.items()} if len(result.terms) > 1 else {}),
            "grad_norm": float(result.grad_norm),
            "param_norm": float(self.optimizer.weight_norm()),
            "skipped": total,
            "memory_bytes": self.device.max_memory_allocated(),
        }
        if result.step == 1:
            record |= {
                "seconds_from_start": time.time() - psutil.Process().create_time(),
                "device": self.device.describe(),
                "ranks": self.layout.world_size,
            }
        if self.compile_counter:
            record |= self.compile_counter.new_counts()
        if in_a_row:
            record["not_finite"] = self._describe_nonfinite(record["loss"])
        self.last_record = record
        return record

    def _evaluate_if_due(self, record: dict[str, Any]) -> dict[str, Any] | None:
        every, number = self.config.evaluate.every, record["step"]
        if not every or self.should_stop() or (number % every and number != self.config.train.steps):
            return None
        result = self.evaluate()
        self.throughput.start()
        if self.should_stop():  # cut short: not a number to keep
            return None
        self.last_evaluation = result
        return {"step": number, **{f"evaluate/{name}": value for name, value in self.last_evaluation.items()}}

    def _notify(self, what: str, *arguments: Any) -> None:
        for hook in self.callbacks:
            getattr(hook, what)(self, *arguments)
