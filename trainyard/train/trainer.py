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
from trainyard.checkpoint.formats.tensor_map import slices_of
from trainyard.checkpoint.io.storage import open_place
from trainyard.checkpoint.registry import open_weights
from trainyard.compile.compile_blocks import Graphs, compile_model, compiler
from trainyard.config.load import dump
from trainyard.config.schema import Config
from trainyard.core.atomic_files import write_whole
from trainyard.core.errors import RunStopped, UserError
from trainyard.data.loading.build import open_sources
from trainyard.data.loading.loader import Loader
from trainyard.kernels.fp8_linear import Fp8
from trainyard.metrics.throughput import Meter
from trainyard.metrics.writers import Writers, new_directory
from trainyard.models.flops import per_sample
from trainyard.models.init import initial
from trainyard.models.sharding import local
from trainyard.parallel import recompute
from trainyard.parallel.layout import Layout
from trainyard.parallel.mesh import Mesh, local_rank, world
from trainyard.parallel.tensor_parallel import Axes, ContextAxis, TensorAxis
from trainyard.train.callbacks import Hook
from trainyard.train.checkpointing.resume import check_fits, continued, load
from trainyard.train.checkpointing.rng_state import restore
from trainyard.train.checkpointing.saver import Saver, Words
from trainyard.train.cross_entropy import make_head
from trainyard.train.evaluate import Metric, evaluate
from trainyard.train.losses import Loss, LossFunction, OwnLoss, loss_of
from trainyard.train.lr_schedule import rate
from trainyard.train.micro_batches import samples
from trainyard.train.optim.gather_full import whole
from trainyard.train.optim.optimizer import Optimizer
from trainyard.train.shutdown import Stop, quiet_garbage_collector
from trainyard.train.step import Forward, Step, StepResult
from trainyard.train.user_functions import import_function


def fp8_blocks(config: Config) -> models.Fp8Blocks | None:
    precision = config.precision
    if precision.kind != "fp8":
        return None
    how = Fp8(precision.scaling, precision.backward)
    return models.Fp8Blocks(how, range(precision.bf16_first, config.model.layers - precision.bf16_last))


def _nothing(blueprint: models.Blueprint, tp: int, rank: int, name: str) -> torch.Tensor:
    """Values of a parameter that are read later."""
    return torch.zeros(blueprint.local_shape(name, tp, rank))


@dataclass
class Summary:
    """How a run ended."""

    directory: Path
    steps: int
    first_loss: float
    loss: float
    seconds: float
    skipped: int
    interrupted: bool
    weights: Path | None
    checkpoint: str | None
    """The newest that this run has completed."""
    evaluation: dict[str, float]


class Trainer:
    def __init__(
        self,
        config: Config,
        loss: LossFunction | None = None,
        metrics: Mapping[str, Metric] | None = None,
        evaluate: "Callable[[Trainer], Mapping[str, float]] | None" = None,
        hooks: Iterable[Hook] = (),
        weights: models.Values | None = None,
        say: Callable[[str], None] = lambda line: None,
        device: devices.Device | None = None,
        check: Callable[[Config, Layout, devices.Device], None] = lambda config, layout, device: None,
    ) -> None:
        """`loss` and each metric take (output, batch) and give (sum, count); `evaluate` takes the trainer. `device` is
        for rehearsals: a run's is config.device.name. `check` is called when that is ready and nothing is made yet."""
        self.config = config
        self.hooks = list(hooks)
        self.say = say
        _, ranks = world()
        self.layout = Layout.of(config, ranks)
        self.device = device or devices.select(config.device.name)
        self.device.prepare(config.device.deterministic, local_rank(), config.precision.kind, config.device.lnc)
        if config.device.threads:
            torch.set_num_threads(config.device.threads)
        check(config, self.layout, self.device)
        self.mesh = Mesh.join(self.layout, self.device, self.device.order(self.layout.tp, ranks))
        self.directory, resumed = continued(config, self.mesh, self.device, say)
        if resumed:
            check_fits(resumed, config, say)
        compile_ = compiler(config.compile, self.device)
        own = config.train.loss
        function = loss or (import_function(own, "train.loss") if own else None)
        kernels = self.device.kernels(own=config.device.kernels == "fused")
        fp8 = fp8_blocks(config)
        how = fp8.how if fp8 and config.precision.head == "fp8" else None
        head = make_head(kernels, compile_, how, self.device.logits_bytes)
        self.loss: Loss = OwnLoss(function) if function else loss_of(config.model.family, head)
        dotted = config.evaluate.metrics.items()
        self.metrics = {name: import_function(path, f"evaluate.metrics.{name}") for name, path in dotted} | dict(
            metrics or {}
        )
        own_evaluation = config.evaluate.function
        self.evaluation = evaluate or (import_function(own_evaluation, "evaluate.function") if own_evaluation else None)

        train, held_out, shuffle = open_sources(config, say)
        if config.evaluate.every and not held_out and not self.evaluation:
            raise UserError(
                f"evaluate.every={config.evaluate.every}: data.split={config.data.split} holds no sample out"
            )
        self.loader = Loader(train, config.train.global_batch, config.train.seed, shuffle)
        self.held_out = (
            Loader(held_out, config.train.global_batch, config.train.seed, shuffle=False) if held_out else None
        )
        self.blueprint = models.family(config.model).blueprint(config.model)
        say(f"making {self.blueprint.parameters():,} weights")
        tp, sequence = self.mesh.tp, config.layout.sequence_parallel
        context, traced = config.layout.context, self.device.traces_attention
        if traced and context == "ring" and self.layout.cp > 1:
            say("layout.context=ring: on this device keys and values are gathered instead")
        axes = Axes(TensorAxis(tp, sequence), ContextAxis(self.mesh.cp, context, traced))
        self.stages = [
            (stage, models.build(config.model, self.device.handle, axes, stage, kernels, fp8))
            for stage in self.layout.stages_of(self.mesh.place["pp"])
        ]
        self.models = [model for _, model in self.stages]
        """This rank's stages of the pipeline; a single one has the whole model."""
        start = config.checkpoint.resume if config.checkpoint.weights_only else config.checkpoint.start
        if resumed:
            values: models.Values = partial(_nothing, self.blueprint, tp.size, tp.rank)
        elif weights:
            values = local(self.blueprint, weights, tp.size, tp.rank)
        elif start:
            say(f"reading weights from {start}")
            values = slices_of(open_weights(start, config.model).weights, tp.size, tp.rank)
        else:
            values = initial(self.blueprint, config.train.seed, self.device.maker, tp.size, tp.rank)
        self.optimizer = Optimizer(
            self.models, self.blueprint, values, config, self.device, self.mesh, kernels, compile_
        )
        # One fixed order: split (build), shard, recompute, compile. The last two change `forward` alone, so that hooks
        # around a block stay outside.
        packs = (
            kernels.attends
            and config.model.family == "bert"
            and self.layout.pp == self.layout.cp == self.layout.tp == 1
        )
        for model in self.models:
            model.longest = config.data.sequence
            recompute.apply(list(model.layers.children()), config.recompute)
            if compile_ and (asked := self.device.compiling()):
                compile_model(model, asked, config.compile.mode, packs, not self.device.synchronous and tp.size == 1)
        self.graphs = Graphs(self.mesh) if compile_ else None
        self.forward = Forward(self.stages, config, self.device, self.mesh, packs)
        self.step = Step(self.forward, self.loss, self.optimizer, self.device, self.mesh, config.train.seed)
        self.rows = samples(config.train.global_batch, self.layout.dp, self.mesh.place["dp"])
        """Of each global batch, what this rank works on."""
        flops = per_sample(config.model, self.blueprint, config.data.sequence, config.data.predictions)
        self.meter = Meter(config, flops, self.device.peak(self.optimizer.compute), self.layout.world)
        self.number = 0
        """Updates done."""
        self.saver: Saver | None = None
        self.newest: str | None = None
        """Checkpoint that was completed last."""
        self.clock = False
        """Whether rank 0's clock asked for a checkpoint."""
        if resumed:
            say(f"going on from step {resumed.step}: {resumed.place}")
            with resumed:
                load(resumed, self.optimizer, self.blueprint, self.mesh)
                restore(resumed.extra(self.mesh.rank), self.device, self.mesh.rank)
            self.number = resumed.step
        self.stop = Stop()
        self.last: dict[str, Any] = {}
        """The newest logged record."""
        self.stop_agreed = False
        self.last_evaluation: dict[str, float] = {}

    @property
    def model(self) -> models.Stack:
        """The model, or this rank's first stage of it."""
        return self.models[0]

    def run(self) -> Summary:
        """Train to config.train.steps, or until a signal; leave a run directory behind."""
        config = self.config
        leads = self.mesh.rank == 0
        self.directory = self.directory or self.mesh.agree(
            lambda: new_directory(Path(config.log.directory).expanduser(), config.log.name), self.device
        )
        if leads:
            write_whole(self.directory / "config.yaml", dump(config))
        writers = Writers(self.directory, config.log.tensorboard, self.number) if leads else None
        if config.checkpoint.saves:

            def tell(record: dict[str, Any]) -> None:
                self.newest = record["checkpoint"]
                if writers:
                    writers.write(record)
                self._tell("on_checkpoint", record)

            place = open_place(config.checkpoint.directory or self.directory / "checkpoints")
            self.saver = Saver(config, place, self.blueprint, self.optimizer, self.device, self.mesh, tell, self.say)
            self.saver.look_ahead()
        start = time.perf_counter()
        losses: list[float] = []
        weights: Path | None = None
        with self.stop.on_signal(), quiet_garbage_collector():
            try:
                self._tell("on_start")
                for record in self._steps():
                    losses.append(record["loss"])
                    if writers:
                        writers.write(record)
                    self._tell("on_log", record)
                    if evaluation := self._evaluate_now(record):
                        if writers:
                            writers.write(evaluation)
                        self._tell("on_evaluate", evaluation)
                if self.saver:
                    self.saver.finish()
                if config.checkpoint.final:
                    weights = self.directory / "model"
                    save_hf(weights, config.model, self.values, self.optimizer.compute, write=leads)
            finally:
                self.optimizer.settle()
                if writers:
                    writers.close()
                self._tell("on_end")
        return Summary(
            directory=self.directory,
            steps=self.number,
            first_loss=losses[0] if losses else float("nan"),
            loss=losses[-1] if losses else float("nan"),
            seconds=time.perf_counter() - start,
            skipped=int(self.optimizer.skipped[0]),
            interrupted=self.stopping(),
            weights=weights,
            checkpoint=self.newest,
            evaluation=self.last_evaluation,
        )

    def stopping(self) -> bool:
        """Whether a signal asked for the end; the step in progress is finished first. With several ranks: whether one
        of them was asked, as all learned with the last step."""
        return self.stop.asked if self.layout.world == 1 else self.stop_agreed

    def values(self, name: str) -> torch.Tensor:
        """A whole parameter at the best precision held. With several ranks all must ask, in the same order."""
        return whole(self.optimizer, self.blueprint, self.optimizer.master, name)

    def evaluate(self) -> dict[str, float]:
        """The user's own evaluation function, or loss, perplexity and metrics on the held-out samples."""
        if self.evaluation:
            result = self.evaluation(self)
            if not isinstance(result, Mapping):
                raise UserError(
                    f"evaluation function: gave {type(result).__name__}; it gives a mapping of name to number"
                )
            return {str(name): float(value) for name, value in result.items()}
        if self.held_out is None:
            raise UserError("data.validation=0: no samples are held out to evaluate on; nearest: 0.05")
        config = self.config
        return evaluate(
            self.forward,
            self.loss,
            self.metrics,
            self.held_out.once(self.rows),
            self.device,
            self.mesh,
            config.evaluate.batches,
            self._ask_to_stop,
        )

    def _ask_to_stop(self) -> bool:
        """Between evaluation batches: whether any rank was asked to stop."""
        asked = torch.tensor(float(self.stop.asked), device=self.device.handle)
        self.stop_agreed = self.stop_agreed or bool(self.mesh.everyone.max(asked))
        return self.stop_agreed

    def _steps(self) -> Iterator[dict[str, Any]]:
        """Run the steps; yield a record for each that is logged or evaluated at.

        Where the device has a queue, a step is read only after the next one has been sent: it never waits for the host.
        """
        pending: StepResult | None = None
        due = True
        for model in self.models:
            model.train()
        self.meter.start()
        batches = self.loader.ahead(self.number, self.config.train.steps, self.rows, self.forward.prepare)
        while self.number < self.config.train.steps and not self.stopping():
            batch = next(batches)
            words = self.saver.words(self.number + 1) if self.saver else Words()
            says = (float(self.stop.asked), *words)
            result = self.step(batch, self.number + 1, rate(self.config, self.number + 1), says)
            self.device.mark()
            self.number += 1
            self._tell("on_step", self.number)
            due = self._due(self.number)
            if pending is not None:
                self._check(pending)
            pending = result
            if self.device.synchronous or due:
                self._check(result)
                pending = None
            if due:
                yield self._record(result)
                self.meter.start()
            if self.saver and self.saver.due(self.number, self.clock):  # the last step's is `finish`'s to save
                self.clock = False
                self.saver.begin(self.number)
        batches.close()
        if not due:  # a signal came: the last step is logged too
            yield self._record(result)

    def _due(self, number: int) -> bool:
        every = self.config.evaluate.every
        logged = number % self.config.log.every == 0 or number in (1, self.config.train.steps)
        return logged or bool(every and number % every == 0)

    def _check(self, result: StepResult) -> None:
        """Stop after too many skipped steps in a row, naming what was not finite."""
        _, in_a_row, asked, *words = result.control().tolist()
        self.stop_agreed = self.stop_agreed or bool(asked)
        if self.saver:
            said = Words(*words)
            self.clock = self.clock or bool(said.due)
            self.saver.heard(result.number, said)
        if in_a_row >= self.config.train.max_skipped:
            raise RunStopped(
                f"step {result.number}: {in_a_row} steps in a row were not finite and were skipped (train.max_skipped="
                f"{self.config.train.max_skipped}); {self._named(float(result.loss))}; "
                "try a lower optimizer.lr or a longer schedule.warmup"
            )

    def _named(self, loss: float) -> str:
        bad = [name for names in self.mesh.collect(self.optimizer.bad()) for name in names]
        bad = sorted(set(bad), key=bad.index)
        what = f"gradient of {bad[0]}" + (f" and {len(bad) - 1} more" if len(bad) > 1 else "") if bad else "no gradient"
        return f"loss {loss}, not finite: {what}"

    def _record(self, result: StepResult) -> dict[str, Any]:
        total, in_a_row, *_ = result.control().tolist()
        self.optimizer.settle()  # for hooks that look at the weights
        record: dict[str, Any] = {
            "step": result.number,
            "consumed_samples": result.number * self.config.train.global_batch,
            **self.meter.read(result.number),
            "lr": result.lr,
            "global_batch": self.config.train.global_batch,
            "loss": float(result.loss),
            **({f"loss/{name}": float(value) for name, value in result.terms.items()} if len(result.terms) > 1 else {}),
            "grad_norm": float(result.grad_norm),
            "param_norm": float(self.optimizer.weight_norm()),
            "skipped": total,
            "memory_bytes": self.device.memory_peak(),
        }
        if result.number == 1:
            record |= {
                "seconds_from_start": time.time() - psutil.Process().create_time(),
                "device": self.device.describe(),
                "ranks": self.layout.world,
            }
        if self.graphs:
            record |= self.graphs.news()
        if in_a_row:
            record["not_finite"] = self._named(record["loss"])
        self.last = record
        return record

    def _evaluate_now(self, record: dict[str, Any]) -> dict[str, Any] | None:
        every, number = self.config.evaluate.every, record["step"]
        if not every or self.stopping() or (number % every and number != self.config.train.steps):
            return None
        result = self.evaluate()
        self.meter.start()
        if self.stopping():  # cut short: not a number to keep
            return None
        self.last_evaluation = result
        return {"step": number, **{f"evaluate/{name}": value for name, value in self.last_evaluation.items()}}

    def _tell(self, what: str, *arguments: Any) -> None:
        for hook in self.hooks:
            getattr(hook, what)(self, *arguments)
