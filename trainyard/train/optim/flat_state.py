"""The memory of one rank's training state: every parameter in a few flat buffers.

All trained parameters of a rank are views of one buffer, and so are their gradients: clipping, the update and the copy
to the compute dtype are then a few long passes over memory instead of many short ones. fp32 master weights and
optimizer moments are flat too; under ZeRO they and the reduced gradients cover this rank's shard only.

Parameters that are not trained lie in a buffer of their own, in the compute dtype, and have nothing else. Those that
are kept in 4 or 8 bits (`ParamSpec.storage`) have tensors of their own instead, which ZeRO-2 and 3 do not shard: that
would save little, and cost a gather at each use.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor

from trainyard.config.schema import PrecisionSection
from trainyard.families.blueprint import ParamSpec
from trainyard.kernels.frozen_linear import dequantize
from trainyard.models import ParameterValues, TransformerStage
from trainyard.parallel.flat_buffer import FlatBuffer, ParamSpan
from trainyard.parallel.layout import Layout
from trainyard.parallel.rank_context import RankContext
from trainyard.train.optim.stored_weights import StoredMatrix, quantize_weight
from trainyard.train.optim.update_rule import UpdateRule

NAMES_IN_FILES = {"exp_avg": "first", "exp_avg_sq": "second"}
"""Names of state buffers in checkpoints, where they differ."""
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}

Shapes = dict[str, tuple[int, ...]]
"""Local shape of every parameter of a rank, by name."""


class UpdateSpan(NamedTuple):
    """Adjacent elements of a shard that are updated alike, in one pass."""

    elements: slice
    weight_decay: bool
    lr_scale: float


def make_flat_buffer(
    shapes: Shapes, specs: Mapping[str, ParamSpec], layout: Layout, precision: PrecisionSection, rule: UpdateRule
) -> FlatBuffer:
    """The layout of a rank's flat buffers of trained parameters, with gradient buckets of layout.bucket_mib. Under
    ZeRO, the dp x cp ranks that hold the same parameters shard them; under expert parallelism fewer hold the same
    experts.

    Parameters with weight decay come first, then those without, and among them those of one learning rate after the
    other. Parameters that lack a state buffer of the rule (the matrices that Muon orthogonalizes have no second moment)
    come last, so that the buffer ends before them.
    """
    trained = {name: spec for name, spec in specs.items() if spec.trained}
    groups = {name: 0 if spec.weight_decay else 1 for name, spec in trained.items()}
    groups |= {name: 2 for name, spec in trained.items() if missing_state(rule, spec)}
    ordered = sorted(groups, key=lambda name: (groups[name], trained[name].lr_scale))
    bucket = layout.bucket_mib * 2**20 // DTYPES[precision.grad_reduce_dtype].itemsize
    sizes = Counter(groups.values())
    return _sharded_buffer(ordered, shapes, specs, layout, bool(layout.zero), bucket, sizes[0], sizes[1])


def make_frozen_buffer(shapes: Shapes, specs: Mapping[str, ParamSpec], layout: Layout) -> FlatBuffer:
    """The layout of a rank's buffer of parameters that are not trained. ZeRO-2 and 3 shard it, as they shard the
    weights that a rank computes with."""
    names = [name for name, spec in specs.items() if not (spec.trained or spec.storage)]
    return _sharded_buffer(names, shapes, specs, layout, layout.zero >= 2, 0, len(names), 0)


def make_stored_spans(shapes: Shapes, specs: Mapping[str, ParamSpec], layout: Layout) -> FlatBuffer:
    """The parameters that are kept in 4 or 8 bits, in the terms of a flat buffer; no memory is laid out like it."""
    names = [name for name, spec in specs.items() if spec.storage]
    return _sharded_buffer(names, shapes, specs, layout, False, 0, len(names), 0)


def _sharded_buffer(
    names: Sequence[str],
    shapes: Shapes,
    specs: Mapping[str, ParamSpec],
    layout: Layout,
    sharded: bool,
    bucket_elements: int,
    num_decayed: int,
    num_undecayed: int,
) -> FlatBuffer:
    shards = layout.dp * layout.cp if sharded else 1
    experts = [name for name in names if specs[name].experts and layout.ep > 1]
    expert_shards = dict.fromkeys(experts, shards // layout.ep if sharded else 1)
    ordered = [(name, shapes[name]) for name in names]
    return FlatBuffer(ordered, num_decayed, shards, bucket_elements, num_undecayed, expert_shards)


def local_shapes(models: Sequence[TransformerStage]) -> Shapes:
    """Those of a rank's stages; a parameter that two of them share is one parameter."""
    return {name: tuple(parameter.shape) for model in models for name, parameter in model.named_parameters()}


def missing_state(rule: UpdateRule, spec: ParamSpec) -> set[str]:
    """State buffers of a rule that a parameter lacks."""
    return set(rule.state_names) - set(rule.state_of(spec))


def state_kinds(state_names: Sequence[str]) -> tuple[str, ...]:
    """The kinds of state in the checkpoints of an update rule with these state buffers."""
    return ("weights", *(NAMES_IN_FILES.get(name, name) for name in state_names))


class FlatState:
    """Weights, gradients and optimizer state of one rank, and where each parameter lies in them."""

    def __init__(self, shapes: Shapes, context: RankContext, precision: PrecisionSection, rule: UpdateRule) -> None:
        self.rule = rule
        self.mesh, device = context.mesh, context.device.torch_device
        self.zero_stage = self.mesh.layout.zero
        specs = {name: context.blueprint.spec(name) for name in shapes}
        self.flat = make_flat_buffer(shapes, specs, self.mesh.layout, precision, rule)
        self.names = list(self.flat.spans)
        """The trained parameters."""
        self.frozen_flat = make_frozen_buffer(shapes, specs, self.mesh.layout)
        self.frozen_names = list(self.frozen_flat.spans)
        self.stored_flat = make_stored_spans(shapes, specs, self.mesh.layout)
        self.stored: dict[str, StoredMatrix] = {}
        """Parameters that are kept in 4 or 8 bits, from `load_values` on."""
        self._quantize = partial(quantize_weight, context.blueprint, mesh=self.mesh, fp8_scaling=precision.fp8_scaling)
        self.stochastic_rounding = precision.kind == "bf16_sr"
        self.compute_dtype = DTYPES[precision.compute_dtype]
        self.reduce_dtype = DTYPES[precision.grad_reduce_dtype]
        grad_dtype = DTYPES[precision.grad_accum_dtype]
        master_dtype = torch.bfloat16 if self.stochastic_rounding else torch.float32

        def zeros(size: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(size, dtype=dtype, device=device)

        size, shard_size = self.flat.size, self.flat.shard_size
        trained = {name: specs[name] for name in self.names}
        self.update_spans = [*_update_spans(self.flat, trained)]
        """All elements of a shard, for rules that work element by element."""
        self.partial = set[str]().union(*(missing_state(rule, spec) for spec in trained.values()))
        """State buffers that the last parameters lack."""
        sizes = dict.fromkeys(self.partial, self.flat.shard_undecayed_end)
        self.buffers = {name: zeros(sizes.get(name, shard_size), torch.float32) for name in rule.state_names}
        """State of the update rule by name."""
        frozen_size = self.frozen_flat.size if self.zero_stage < 2 else self.frozen_flat.shard_size
        self.frozen_weights = zeros(frozen_size, self.compute_dtype)
        """Weights that are not trained: all that this rank computes with, or its shard of them under ZeRO-2 and 3."""
        if self.zero_stage < 2:
            self.weights = zeros(size, self.compute_dtype)
            """What the model computes with, as far as it is trained."""
            shared = not self.zero_stage and master_dtype == self.compute_dtype
            self.master_weights = self.weights if shared else zeros(shard_size, master_dtype)
            self.gradients = zeros(size, grad_dtype)
            """Sum over this rank's micro batches."""
            self.reduced_grads = zeros(shard_size, grad_dtype) if self.zero_stage else self.gradients
            """Sum over all ranks."""
        else:  # FSDP keeps the full weights and gradients
            self.master_weights = self.weights = zeros(shard_size, master_dtype)
            self.gradients = self.reduced_grads = zeros(shard_size, master_dtype)

    @property
    def exp_avg(self) -> Tensor:
        """First moment, or Muon's momentum."""
        return self.buffers["exp_avg"]

    @property
    def exp_avg_sq(self) -> Tensor:
        """Second moment; parameters that Muon updates have none."""
        return self.buffers["exp_avg_sq"]

    @property
    def copies_weights(self) -> bool:
        """True if an update must copy the master weights to `weights` on this rank (no ZeRO, different dtypes)."""
        return self.zero_stage == 0 and self.weights is not self.master_weights

    def shard_view(self, buffer: Tensor, name: str) -> Tensor:
        """This rank's shard of a parameter (without ZeRO, all of it) in a buffer of shard size."""
        return self._flat_of(name).shard_view(buffer, name, self._shard_index(name))

    def shard_row_range(self, name: str) -> range:
        """The rows of a parameter in this rank's shard."""
        return self._flat_of(name).shard_row_range(name, self._shard_index(name))

    def span(self, name: str) -> ParamSpan:
        """Where any parameter lies, in the buffers of trained ones or in that of the others."""
        return self._flat_of(name).spans[name]

    def compute_view(self, name: str) -> Tensor:
        """A parameter as the model computes with it; under ZeRO-2 and 3 this rank's shard of it."""
        if self.zero_stage >= 2:
            return self.weight_shard(name)
        flat = self._flat_of(name)
        return flat.view(self.weights if flat is self.flat else self.frozen_weights, name)

    def weight_shard(self, name: str) -> Tensor:
        """This rank's shard of the weights of a parameter, the master weights if it is trained; a copy of the values
        that a stored one stands for."""
        if name in self.stored:
            return dequantize(self.stored[name], self.compute_dtype)
        return self.shard_view(self.weight_buffer(name), name)

    def weight_buffer(self, name: str) -> Tensor:
        """The buffer of `weight_shard`."""
        return self.master_weights if name in self.flat.spans else self.frozen_weights

    def _flat_of(self, name: str) -> FlatBuffer:
        flats = (self.flat, self.frozen_flat, self.stored_flat)
        return next(flat for flat in flats if name in flat.spans)

    def _shard_index(self, name: str) -> int:
        span = self.span(name)
        return self.mesh.data_group(span.of_experts).rank if span.num_shards > 1 else 0

    def has(self, name: str, state: str) -> bool:
        """True if a parameter has a value in this state buffer, named as in checkpoints or not."""
        is_partial = state in self.partial or any(NAMES_IN_FILES.get(partial) == state for partial in self.partial)
        return not is_partial or self.flat.spans[name].shard_start < self.flat.shard_undecayed_end

    def saved_buffers(self) -> dict[str, Tensor]:
        """Master weights and state buffers by their kind in checkpoints."""
        return dict(zip(state_kinds([*self.buffers]), (self.master_weights, *self.buffers.values()), strict=True))

    def load_values(self, values: ParameterValues) -> None:
        """Set the weights and master weights from the values of local parameters."""
        for name in (*self.names, *self.frozen_names):
            value = values(name)
            rows = self.shard_row_range(name)
            self.weight_shard(name).copy_(value[rows.start : rows.stop])
            if self.zero_stage < 2:
                self.compute_view(name).copy_(value)
        for name in self.stored_flat.spans:  # one after the other: no other weight exists in full meanwhile
            weight = values(name).to(self.frozen_weights.device, self.compute_dtype)
            self.stored[name] = self._quantize(name, weight)


def _update_spans(flat: FlatBuffer, specs: Mapping[str, ParamSpec]) -> Iterator[UpdateSpan]:
    """One span for each run of parameters with the same weight decay and learning rate. The elements that end a shard
    after its last parameter belong to none of them."""
    spans = list(flat.spans.values())
    ends = [*(span.shard_start for span in spans[1:]), flat.shard_size]

    def kind(index: int) -> tuple[bool, bool, float]:
        spec = specs[spans[index].name]
        return spans[index].shard_start >= flat.shard_undecayed_end, spec.weight_decay, spec.lr_scale

    for (_, weight_decay, lr_scale), group in groupby(range(len(spans)), kind):
        members = list(group)
        yield UpdateSpan(slice(spans[members[0]].shard_start, ends[members[-1]]), weight_decay, lr_scale)
