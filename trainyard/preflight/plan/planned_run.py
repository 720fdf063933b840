"""The run that a plan predicts: what memory, messages and time follow from, on one layout and one kind of device."""

from collections.abc import Sequence
from math import ceil

from trainyard.config.objective_check import trains_on_rollouts
from trainyard.config.optimizer_schema import OptimizerSection
from trainyard.config.registries import OBJECTIVES
from trainyard.config.schema import Config
from trainyard.core.constants import DTYPE_BYTES
from trainyard.core.user_code import is_user_path
from trainyard.devices.kind import DeviceKind
from trainyard.inference.build_engine import cache_bytes
from trainyard.models import family_of
from trainyard.parallel.flat_buffer import FlatBuffer
from trainyard.parallel.layout import Layout
from trainyard.preflight.plan.rank_parameters import LocalParam, first_alike, shapes_and_specs
from trainyard.preflight.plan.trace.stage_run import MicroBatchShape, TracedStage
from trainyard.train.decisions import fp8_layer_range, fuses_wgrad, packs_batches
from trainyard.train.micro_batches.split import PACKED_LENGTH_MULTIPLE
from trainyard.train.objective import Objective, Preparation
from trainyard.train.optim.flat_state import make_flat_buffer, make_frozen_buffer
from trainyard.train.optim.load_rule import load_update_rule
from trainyard.train.optim.stored_weights import stored_bytes
from trainyard.train.optim.update_rule import UpdateRule, UpdateShape


class PlannedRun:
    """Sizes and decisions that all parts of a plan share. A run makes the decisions by the same functions."""

    def __init__(self, config: Config, layout: Layout, device: DeviceKind) -> None:
        self.layout, self.device, self.model = layout, device, config.model
        self.train, self.data, self.precision = config.train, config.data, config.precision
        self.recompute, self.compiled = config.recompute, config.compile.enabled
        self.family, self.rule = family_of(config.model), _planned_rule(config.optimizer)
        self.shards = layout.dp * layout.cp
        """Ranks that hold the same weights outside experts."""
        self.zero, self.cp_method, self.pipeline_schedule = layout.zero, layout.cp_method, layout.pipeline_schedule
        self.sequence_parallel = layout.sequence_parallel and layout.tp > 1
        self.fp8_layers = fp8_layer_range(config.precision, config.model.layers)
        self.alike = first_alike(config.model, self.fp8_layers)
        """For each layer the first one that computes alike, under the precision of the run."""
        self.fused_kernels = device.fused_kernels and config.device.kernels == "fused"
        """Triton kernels are used."""
        self.fused_wgrad = fuses_wgrad(layout, config.precision, self.fused_kernels, config.compile.enabled)
        self.packed_batch = packs_batches(config.model, layout, self.fused_kernels)
        """Padding is removed from samples."""
        self.objective = _planned_objective(config)
        """None: the loss of the family, or the user's."""
        self.preparation = self.objective.preparation() if self.objective else Preparation()
        self.rollout_cache = _rollout_cache(config, layout)
        """Bytes of the keys and values of the completions that a rank writes at a time."""
        samples, seq_len = config.train.micro_batch, config.data.seq_len // layout.cp
        self.tokens = samples * seq_len
        """Tokens of a micro batch on one context-parallel rank, with padding."""
        tokens = self.tokens
        if self.packed_batch and config.data.source == "synthetic":
            # The data decide how much padding there is: synthetic samples are half to all full, less 3 special tokens.
            room = seq_len - 3
            mean = 3 + (room // 2 + room) / 2
            tokens = ceil(samples * mean / PACKED_LENGTH_MULTIPLE) * PACKED_LENGTH_MULTIPLE
        document_ids = config.data.separates_documents and not self.family.has_padding
        packed_tokens = tokens if self.packed_batch else None
        self.micro_batch = MicroBatchShape(samples, seq_len, packed_tokens, config.data.max_predictions, document_ids)
        local_tokens = tokens // (layout.tp if self.sequence_parallel else 1)
        self.local_hidden_bytes = local_tokens * config.model.hidden * DTYPE_BYTES[config.precision.compute_dtype]
        """Bytes of the activations between attention and MLP."""

    def traced_stage(self, layers: Sequence[int], is_first: bool = True, is_last: bool = True) -> TracedStage:
        """A stage with these layers."""
        layout = self.layout
        return TracedStage(
            self.model, tuple(layers), self.micro_batch, layout.tp, layout.cp, layout.ep, self.cp_method,
            self.sequence_parallel, self.recompute, self.compiled, self.precision, self.fp8_layers, self.device,
            self.fused_kernels, self.fused_wgrad, is_first, is_last,
        )  # fmt: skip

    def flat_buffer(self, params: dict[str, LocalParam]) -> FlatBuffer:
        """The flat buffer that the run lays out for those of `params`, which `local_params` returned, that are
        trained."""
        return make_flat_buffer(*shapes_and_specs(params), self.layout, self.precision, self.rule)

    def frozen_buffer(self, params: dict[str, LocalParam]) -> FlatBuffer:
        """The buffer of all others."""
        return make_frozen_buffer(*shapes_and_specs(params), self.layout)

    def stored_bytes(self, params: dict[str, LocalParam]) -> int:
        """Bytes of those that are kept in 4 or 8 bits."""
        scaling = self.precision.fp8_scaling
        return sum(stored_bytes(param.spec, param.shape, scaling) for param in params.values() if param.spec.storage)

    def update_shape(self, flat: FlatBuffer) -> UpdateShape:
        return UpdateShape(self.layout, self.precision, flat, self.zero >= 2, self.fused_kernels)


def _planned_rule(optimizer: OptimizerSection) -> UpdateRule:
    """The update rule that a plan counts: AdamW in the place of the user's, whose code a plan does not import."""
    user_rule = is_user_path(optimizer.kind)
    return load_update_rule(optimizer.model_copy(update={"kind": "adamw"}) if user_rule else optimizer)


def _planned_objective(config: Config) -> Objective | None:
    name = config.train.objective
    if not name or is_user_path(name):
        return None
    kind: type[Objective] = OBJECTIVES.find(name)
    return kind(None, *(getattr(config, section) for section in kind.sections))


def _rollout_cache(config: Config, layout: Layout) -> int:
    if not trains_on_rollouts(config):
        return 0
    itemsize = DTYPE_BYTES[config.precision.compute_dtype]
    slots = min(ceil(config.train.global_batch * config.rollout.updates / layout.dp), config.rollout.max_batch)
    is_invariant = config.device.batch_invariant
    return cache_bytes(config.model, layout.tp, slots, config.data.seq_len, itemsize, is_invariant)
