"""Builds what a step needs from sections of its configuration, one function for each piece.

The order is fixed: build the stages (split over tp and pp), create the optimizer (which shards them over dp), apply
recompute, compile. The last two replace only `forward`, so hooks around a block stay outside.
"""

import inspect
import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from trainyard import compat, devices, models
from trainyard.checkpoint.weights import BaseWeights, WeightSource, local_values
from trainyard.config.data_schema import DataSection
from trainyard.config.registries import OBJECTIVES
from trainyard.config.schema import (
    Config,
    DeviceSection,
    EvaluateSection,
    PrecisionSection,
    RecomputeSection,
    TrainSection,
)
from trainyard.core.errors import UserError
from trainyard.core.user_code import import_function, is_user_path
from trainyard.core.world import World
from trainyard.data.loading.build import TrainValidDatasets
from trainyard.data.loading.dataset import Dataset
from trainyard.data.loading.loader import BatchLoader
from trainyard.formats.peft.adapter import lora_options
from trainyard.formats.registry import start_from_adapter
from trainyard.kernels.fp8_linear import Fp8Options
from trainyard.models.init import initial_values
from trainyard.models.sharding import shard_values
from trainyard.parallel.axes import Axes
from trainyard.parallel.context_parallel import ContextAxis
from trainyard.parallel.expert_parallel import ExpertAxis
from trainyard.parallel.mesh import Mesh
from trainyard.parallel.rank_context import RankContext
from trainyard.parallel.recompute import apply_recompute
from trainyard.parallel.tensor_parallel import TensorAxis
from trainyard.train.compile.compile_blocks import CompileFn, compile_model
from trainyard.train.cross_entropy import make_head_loss
from trainyard.train.decisions import fp8_layer_range
from trainyard.train.evaluate import RESERVED_NAMES, Metric
from trainyard.train.initial_weights import open_initial_weights
from trainyard.train.loss import Loss, LossFunction, UserLoss, make_loss
from trainyard.train.user_functions import check_named_numbers, user_function

GRAPHS_PER_LENGTH = 8
"""Graphs that a function may have for each length of a batch; torch's own limit for all."""
logger = logging.getLogger(__name__)


def build_device(
    section: DeviceSection, precision: PrecisionSection, world: World, device: devices.Device | None = None
) -> devices.Device:
    """The device that the section names (or the given one), prepared for this run."""
    device = device or devices.select(section.name)
    device.prepare(section.deterministic, world, precision.kind, section.lnc)
    if section.threads:
        torch.set_num_threads(section.threads)
    return device


def build_rank_context(
    model: models.ModelConfig, section: DeviceSection, device: devices.Device, mesh: Mesh
) -> RankContext:
    blueprint = models.blueprint_of(model)
    kernels = (
        device.batch_invariant_kernels() if section.batch_invariant else device.kernels(section.kernels == "fused")
    )
    return RankContext(device, mesh, blueprint, kernels)


def build_loss(
    config: Config, user_loss: LossFunction | None, context: RankContext, compile_fn: CompileFn | None
) -> Loss:
    """The user's loss (an argument, or what train.loss names), the objective, or the loss of the model family."""
    train, precision = config.train, config.precision
    named = train.loss or models.family_of(config.model).loss
    function = user_loss or (import_function(named, "train.loss", or_subclass_of=Loss) if is_user_path(named) else None)
    if function and not inspect.isclass(function):
        return UserLoss(function)
    fp8 = fp8_layers(precision, config.model.layers)
    head_recipe = fp8.recipe if fp8 and precision.head_dtype == "fp8" else None
    head_loss = make_head_loss(context.kernels, compile_fn, head_recipe, context.device.kind.max_logits_bytes)
    if train.objective:
        objective = OBJECTIVES.find(train.objective)
        loss: Loss = objective(head_loss, *(getattr(config, section) for section in objective.sections))
        return loss
    loss = make_loss(named, head_loss)
    loss.configure(config.model)
    return loss


def fp8_layers(precision: PrecisionSection, layers: int) -> models.Fp8Layers | None:
    """The layers that multiply in fp8; None unless precision.kind is fp8."""
    if precision.kind != "fp8":
        return None
    options = Fp8Options(precision.fp8_scaling, precision.fp8_backward)
    return models.Fp8Layers(options, fp8_layer_range(precision, layers))


def build_metrics(dotted: Mapping[str, str], metrics: Mapping[str, Metric] | None, loss: Loss) -> dict[str, Metric]:
    """Metrics of evaluate.metrics, which are `dotted` paths, and those given as an argument."""
    for name in {*dotted, *(metrics or {})} & {*RESERVED_NAMES, *loss.term_names}:
        raise UserError(
            f"evaluate.metrics.{name}: the evaluation itself reports {name}; nearest: evaluate.metrics.my_{name}"
        )
    imported = {name: import_function(path, f"evaluate.metrics.{name}") for name, path in dotted.items()}
    return {**imported, **(metrics or {})}


def build_evaluation(
    section: EvaluateSection, evaluate: Callable[[Any], Mapping[str, float]] | None
) -> Callable[[Any], dict[str, float]] | None:
    """The user's evaluation function (an argument, or evaluate.function), with a check of its results."""
    function = user_function(evaluate, section.function, "evaluate.function")
    if function and section.sets:
        raise UserError("evaluate.sets: the evaluation function replaces their evaluation; use only one of them")
    return (lambda trainer: check_named_numbers(function(trainer))) if function else None


def build_loaders(
    datasets: TrainValidDatasets,
    validation_sets: Mapping[str, Dataset],
    section: TrainSection,
    data: DataSection,
    evaluate_every: int,
) -> tuple[BatchLoader, dict[str, BatchLoader]]:
    """Loaders of training samples and, by name, of validation samples. Those held out from the training data have the
    name "", and need no evaluation to be loaded. With `evaluate_every` above 0 there must be some."""
    validation = {**({"": datasets.validation} if datasets.validation else {}), **validation_sets}
    if evaluate_every and not validation:
        key = "source" if is_user_path(data.source) else "split"
        reason = f"data.{key}={getattr(data, key)} leaves no validation samples"
        raise UserError(f"evaluate.every={evaluate_every}: {reason}")
    batch, seed = section.global_batch, section.seed
    loaders = {name: BatchLoader(dataset, batch, seed, shuffle=False) for name, dataset in validation.items()}
    return BatchLoader(datasets.train, batch, seed, datasets.needs_shuffle, data.buckets), loaders


def build_stages(
    model: models.ModelConfig, precision: PrecisionSection, context: RankContext, seq_len: int, train: TrainSection
) -> list[models.TransformerStage]:
    """This rank's pipeline stages, without memory for their parameters."""
    device, mesh = context.device, context.mesh
    decomposed, layout = device.kind.decomposes_attention, mesh.layout
    storage = {spec.storage for spec in context.blueprint.specs} - {""}
    if storage and not (device.kind.is_host or device.kind.gpu_operators):
        raise UserError(f"lora.base={min(storage)}: needs a GPU or a CPU, not {device.kind.label}; nearest: null")
    if not (model.has_static_shapes or device.kind.has_grouped_gemm):
        raise UserError("model.capacity_factor=null: this device needs static shapes; nearest: 2.0")
    if decomposed and layout.cp_method == "ring" and layout.cp > 1:
        logger.warning("layout.cp_method=ring: this device gathers keys and values instead")
    if "fp8" in storage and precision.compute_dtype == "fp32" and context.kernels.has_fp8_matmul:
        raise UserError("precision.kind=fp32: lora.base=fp8 multiplies in fp8 and bf16; nearest: bf16")
    axes = Axes(
        TensorAxis(mesh.tp, layout.sequence_parallel),
        ContextAxis(mesh.cp, layout.cp_method, decomposed),
        ExpertAxis(mesh.ep),
    )
    fp8 = fp8_layers(precision, model.layers)
    stages = [
        models.build_model(model, device.torch_device, axes, stage, context.kernels, fp8)
        for stage in layout.stages_on(mesh.coords["pp"])
    ]
    for stage in stages:
        stage.max_seq_len = seq_len
        stage.noise_bound = train.embedding_noise / (seq_len * model.hidden) ** 0.5
        stage.configure_experts(train.global_batch, device.kind.has_grouped_gemm)
    return stages


def initial_parameters(
    model: models.ModelConfig,
    base: BaseWeights | None,
    context: RankContext,
    resuming: bool,
    weights: models.ParameterValues | None,
) -> models.ParameterValues:
    """Where this rank's parameters get their values: the given full weights, a checkpoint of any format, or random
    initialization; zeros for what a checkpoint to resume from has, which is loaded later."""
    blueprint, shard = context.blueprint, context.mesh.model_shard
    if not resuming:
        return _base_values(model, base, context, weights, start_from_adapter)

    def zeros(name: str) -> Tensor:
        return torch.zeros(blueprint.local_shape(name, shard))

    if blueprint.trained_count == blueprint.parameter_count():
        return zeros
    values = _base_values(model, base, context, weights)  # what an adapter has is trained, and in the checkpoint
    return lambda name: zeros(name) if blueprint.is_trained(name) else values(name)


def _base_values(
    model: models.ModelConfig,
    base: BaseWeights | None,
    context: RankContext,
    weights: models.ParameterValues | None,
    adapt: Callable[[WeightSource], WeightSource] = lambda weights: weights,
) -> models.ParameterValues:
    blueprint, mesh = context.blueprint, context.mesh
    shard = mesh.model_shard
    if weights:
        return shard_values(blueprint, weights, shard)
    assert base
    if base.location:
        logger.info("reading weights from %s", base.location)
        opened = open_initial_weights(base.location, model, base.seed, mesh, context.device)
        for note in opened.notes if mesh.layout_rank == 0 else ():
            logger.warning("note: %s", note)
        return local_values(adapt(opened.weights), shard)
    if (options := lora_options(model)) and options.init_from:
        raise UserError(f"lora.init_from={options.init_from}: needs the adapter's model as checkpoint.init_from")
    return initial_values(blueprint, base.seed, context.device.init_device, shard)


def wrap_blocks(
    stages: list[models.TransformerStage],
    recompute: RecomputeSection,
    compile_mode: str,
    context: RankContext,
    compile_fn: CompileFn | None,
    padding_free: bool,
    num_lengths: int = 1,
) -> None:
    """Apply recompute and compilation to the blocks of every stage. Batches have `num_lengths` lengths, each with
    its own graphs."""
    device, mesh = context.device, context.mesh
    options = device.compile_options() if compile_fn else None
    if num_lengths > 1:
        compat.allow_recompiles(GRAPHS_PER_LENGTH * num_lengths)
    for model in stages:
        apply_recompute(model.blocks, recompute, compiled=bool(options))
        if options:
            compile_embedding = not device.synchronous and mesh.tp.size == 1
            compile_model(model, options, compile_mode, padding_free, compile_embedding)
