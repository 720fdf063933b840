"""Everything that a step needs, built from a configuration on one rank.

Dry runs, audits and comparisons of layouts use it as a run does: the trainer adds nothing to a step.
"""

import logging
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from trainyard import devices, models
from trainyard.config.schema import Config
from trainyard.core.quantities import counted
from trainyard.core.world import World
from trainyard.data.loading.build import build_datasets, build_validation_sets, grow_vocab, validation_sections
from trainyard.data.loading.loader import BatchSource
from trainyard.devices.base import PeakThroughput
from trainyard.families.flops import flops_per_sample
from trainyard.metrics.loggers.build import check_loggers
from trainyard.metrics.run_directory import RunDirectory
from trainyard.metrics.span_recorder import SpanRecorder
from trainyard.metrics.throughput import ThroughputMeter
from trainyard.parallel.layout import Layout
from trainyard.parallel.mesh import Mesh
from trainyard.run.callbacks import Callback, P, Part, build_callbacks
from trainyard.run.checkpointing.config_check import check_compatible
from trainyard.run.checkpointing.data_check import check_same_versions
from trainyard.run.checkpointing.resume import find_base, find_resume_point, restore
from trainyard.run.profiler import check_profile_ranks
from trainyard.run.shutdown import StopSignal
from trainyard.run.stragglers import StragglerMonitor
from trainyard.run.text_samples import TextPrompts, prompt_tokenizer
from trainyard.train import build
from trainyard.train.compile.compile_blocks import make_compile_fn
from trainyard.train.decisions import fuses_wgrad, packs_batches
from trainyard.train.evaluate import Metric
from trainyard.train.loss import LossFunction
from trainyard.train.micro_batches.runner import MicroBatchOptions, MicroBatchRunner
from trainyard.train.micro_batches.split import rank_samples
from trainyard.train.objective import Objective
from trainyard.train.optim.flat_state import FlatState, local_shapes
from trainyard.train.optim.gradient_sync import GradientSync
from trainyard.train.optim.load_rule import load_update_rule
from trainyard.train.optim.lr_schedule import learning_rate
from trainyard.train.optim.optimizer import Optimizer
from trainyard.train.step import TrainStep

logger = logging.getLogger(__name__)


class TrainSetup:
    """One rank before its first step: model, optimizer and data, and the state of the run."""

    def __init__(
        self,
        config: Config,
        loss: LossFunction | None = None,
        metrics: Mapping[str, Metric] | None = None,
        evaluate: Callable[[Any], Mapping[str, float]] | None = None,
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
        self.config = config = grow_vocab(config)
        self.user_callbacks = build_callbacks(callbacks, config.train.callbacks)
        self.callbacks: list[Callback] = self.user_callbacks
        """In the order in which they are called; `run` adds the parts."""
        self.world = world = world or World.from_environment()
        for step in (1, config.train.steps):
            learning_rate(config, step)  # a mistake of the user's schedule shows before anything is built
        rule = load_update_rule(config.optimizer)
        check_profile_ranks(config.profile, world.size)
        self.layout = layout = Layout.from_config(config, world.size)
        self.device = device = build.build_device(config.device, config.precision, world, device)
        preflight(config, layout, device)
        self.mesh = mesh = Mesh.create(layout, device, world, device.rank_order(layout.tp, world.size))
        if config.log.loggers:
            mesh.broadcast_object(partial(check_loggers, config.log.loggers), device)
        self.continued_run, self.resumed, self.lost_run = find_resume_point(config, mesh, device, run_directory)
        """`resumed` is the checkpoint that the run continues."""
        self.directory = self.continued_run.path if self.continued_run else None
        if self.resumed:
            check_compatible(self.resumed, config, mesh, device)
        self.text_prompts: TextPrompts | None = None
        weights_from, samples = config.checkpoint.weights_from, config.samples
        if samples.every:
            make_tokenizer = partial(prompt_tokenizer, samples, config.data, config.model, weights_from, self.resumed)
            self.text_prompts = TextPrompts(samples.prompts, config.data.seq_len, make_tokenizer, mesh, device)
        compile_fn = make_compile_fn(config.compile, device, world.local_rank)
        self.compiles = compile_fn is not None
        self.context = context = build.build_rank_context(config.model, config.device, device, mesh)
        self.blueprint = context.blueprint
        self.loss_fn = build.build_loss(config, loss, context, compile_fn)
        self.metrics = build.build_metrics(config.evaluate.metrics, metrics, self.loss_fn)
        self.evaluation_fn = build.build_evaluation(config.evaluate, evaluate)
        evaluate_every = 0 if self.evaluation_fn else config.evaluate.every
        validation_sets = build_validation_sets(config) if evaluate_every else {}
        self.loader, self.validation_loaders = build.build_loaders(
            build_datasets(config), validation_sets, config.train, config.data, evaluate_every
        )
        """`validation_loaders` by name; "" are the samples held out from the training data."""
        self.batch_source: BatchSource = self.loader
        """Makes the batches of the steps."""
        sets = validation_sections(config.data, config.evaluate.sets) if evaluate_every else {}
        for data in (config.data, *sets.values()):
            check_same_versions(data, mesh)
        logger.info("initializing %s weights", f"{self.blueprint.parameter_count():,}")
        self.models = build.build_stages(config.model, config.precision, context, config.data.seq_len, config.train)
        """This rank's pipeline stages; without a pipeline, the full model alone."""
        resuming = self.resumed is not None
        self.base = None
        """Where the weights of step 0 are, or those that a resumed run does not train; None: `weights`."""
        if not weights:
            self.base = find_base(config.model, weights_from, config.train.seed, self.resumed, mesh, device)
        values = build.initial_parameters(config.model, self.base, context, resuming, weights)
        self.stragglers = StragglerMonitor.create(mesh, device, config.layout.zero)
        stopwatch = self.stragglers.stopwatch if self.stragglers else None
        self.spans = SpanRecorder()
        waiting = self.spans.waiting(stopwatch, world.size)
        state = FlatState(local_shapes(self.models), context, config.precision, rule)
        state.load_values(values)
        fused_wgrad = fuses_wgrad(layout, config.precision, context.kernels.fused_wgrad, self.compiles)
        sync = GradientSync(state, self.models, context, fused_wgrad, waiting)
        self.optimizer = Optimizer(state, sync, context, config.optimizer, config.train.seed, compile_fn)
        padding_free = packs_batches(config.model, layout, context.kernels.has_varlen_attention)
        num_lengths = len(config.data.seq_lens)
        build.wrap_blocks(
            self.models, config.recompute, config.compile.mode, context, compile_fn, padding_free, num_lengths
        )
        micro_batches = MicroBatchOptions(
            config.train.micro_batch,
            config.data.seq_len,
            config.model.hidden,
            state.compute_dtype,
            padding_free,
            config.compile.cuda_graphs,
            config.device.attention,
        )
        self.runner = MicroBatchRunner(self.models, context, micro_batches, self.spans)
        if isinstance(self.loss_fn, Objective):
            self.runner.add_reference = self.loss_fn.stand_in  # a run has its own numbers when it starts
        on_gradients_ready = partial(self.notify, "on_gradients_ready")
        self.train_step = TrainStep(
            self.runner, self.loss_fn, self.optimizer, config.train.seed, on_gradients_ready, stopwatch, waiting
        )
        self.batch_slice = rank_samples(config.train.global_batch, layout.dp, mesh.coords["dp"])
        """This rank's samples of each global batch."""
        self.throughput = self._throughput_meter(device.peak_throughput(state.compute_dtype))
        self.run_directory: RunDirectory
        self.model_files: dict[str, bytes] = {}
        """On the first rank, the files of the tokenizer."""
        self.last_checkpoint: str | None = None
        self.stop_signal = StopSignal()
        self.stop_requested = False
        """True once any rank was asked to stop, known to all ranks."""
        self.last_record: dict[str, Any] = {}
        self.losses: list[float] = []
        """Of the logged steps."""
        self.last_evaluation: dict[str, float] = {}
        self.completed_steps = restore(self.resumed, self.optimizer, context) if self.resumed else 0

    def _throughput_meter(self, peak: PeakThroughput | None) -> ThroughputMeter:
        """Counts the tokens of every step. With data.buckets, the log tells their lengths, each of which is a graph."""
        data, batch = self.config.data, self.config.train.global_batch
        flops = {
            length: flops_per_sample(self.config.model, self.blueprint, length, data.max_predictions)
            for length in data.seq_lens
        }
        if not data.buckets:
            return ThroughputMeter(batch, lambda first, end: {data.seq_len: end - first}, flops, peak, self.world.size)
        steps = -(-len(self.loader.dataset) // batch)
        counts = self.loader.count_steps(0, steps)
        lengths = ", ".join(f"{length} tokens ({counts.get(length, 0)})" for length in data.buckets)
        graphs = counted(len(data.buckets), "graph")
        logger.info(
            "%s, for samples of %s; in brackets, how many of %s of the first epoch",
            graphs,
            lengths,
            counted(steps, "step"),
        )
        return ThroughputMeter(batch, self.loader.count_steps, flops, peak, self.world.size)

    @property
    def model(self) -> models.TransformerStage:
        """The full model, or this rank's first pipeline stage."""
        return self.models[0]

    @property
    def parts(self) -> list[Part]:
        return [callback for callback in self.callbacks if isinstance(callback, Part)]

    def part(self, kind: type[P]) -> P | None:
        """The part of this class; None if the run has none."""
        return next((part for part in self.parts if isinstance(part, kind)), None)

    def notify(self, event: str, *arguments: Any) -> None:
        """Call the method `event` of every callback, in their order."""
        for callback in self.callbacks:
            getattr(callback, event)(self, *arguments)
