"""The interface of update rules, built in or from outside the package: everything that the rest must know about one.

No torch in here: the configuration reads the keys of the built-in rules.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

from trainyard.core.section import Section

if TYPE_CHECKING:
    from torch import Tensor

    from trainyard.config.schema import PrecisionSection
    from trainyard.families.blueprint import ParamSpec
    from trainyard.parallel.flat_buffer import FlatBuffer
    from trainyard.parallel.layout import Layout

ADAM_STATE = ("exp_avg", "exp_avg_sq")
"""State of Adam: a run may change between rules that have it."""
CHUNK_ELEMENTS = 1 << 24
"""Elements per call of a rule that is not compiled: its temporary tensors have 64 MiB each."""
UPDATE_BYTES_PER_WEIGHT, ROUNDED_UPDATE_BYTES_PER_WEIGHT = 24, 36
"""Temporary bytes per weight of an update by torch operations, without and with stochastic rounding."""


class UpdateMessage(NamedTuple):
    """A collective of an update, besides those of every rule (gradients, norms and weights)."""

    group: Literal["data", "tp", "ep"]
    """Ranks: `data` has those that hold the same values of a parameter."""
    kind: str
    elements: int
    """Elements of the input or of the output, whichever is larger, in the compute dtype."""
    of_experts: bool


@dataclass(frozen=True)
class UpdateShape:
    """What one rank updates, for the memory and the messages that `plan` predicts."""

    layout: "Layout"
    precision: "PrecisionSection"
    flat: "FlatBuffer"
    is_sharded_model: bool
    """ZeRO-2 and 3: weights and gradients are those of fully_shard."""
    has_fused_kernels: bool = False
    """The device updates all weights in one kernel, where the rule has one."""

    @property
    def largest_parameter(self) -> int:
        """Elements of this rank's shard of the largest parameter."""
        return max((span.shard_numel for span in self.flat.spans.values()), default=0)

    @property
    def decayed(self) -> int:
        """Elements of parameters with weight decay that have all state, shards padded to one size."""
        return self.flat.shard_decay_end

    @property
    def undecayed(self) -> int:
        """Elements of those without weight decay."""
        return self.flat.shard_undecayed_end - self.flat.shard_decay_end


class UpdateRule:
    """An optimizer of your own: `optimizer.kind: "my_module:MyRule"`. Keyword arguments of its constructor come from
    optimizer.options.

    `state_names` names its state buffers: fp32, as many elements as the weights, zeros at first, in checkpoints and
    converted to any layout. `exp_avg` and `exp_avg_sq` are those of AdamW, so that a run may change between the two.
    """

    state_names: tuple[str, ...] = ()
    keys: type[Section] | None = None
    """Its own keys, which become the keyword arguments of its constructor: keys of the `optimizer` section for a
    built-in rule, optimizer.options for another one. Names and docstrings are unique among the built-in rules."""
    implementation: str = "trainyard.train.optim.updates.elementwise:ElementwiseUpdate"
    """`module:Class` of the FlatUpdate that is made of (rule, UpdateContext). By default, one that calls `update`."""
    norms_per_parameter: int = 1
    """Norms of each parameter that all ranks sum in a step: at least that of its gradient."""
    passes: int = 1
    """Passes of an update over weights, gradients and state, for the time that `plan` predicts."""
    missing_state: str = ""
    """What the checkpoint of a rule has not, if `state_of` differs between parameters."""

    def update(
        self,
        weight: "Tensor",
        gradient: "Tensor",
        state: "Mapping[str, Tensor]",
        lr: "Tensor",
        weight_decay: float,
        updates: "Tensor",
    ) -> "tuple[Tensor, dict[str, Tensor]]":
        """Return the new weight and the new state by name, and change no argument.

        `weight`, `gradient` and each state are flat fp32 tensors with some elements of the model: any cut is possible,
        so each result may depend on its own element only. A weight of 0 whose gradient and state are 0 must stay 0.
        `gradient` is the mean over the global batch, clipped. `lr` is the learning rate of the step and `updates` the
        number of updates including this one; both are tensors without dimensions. `weight_decay` is 0 for norms and
        biases. Skipped steps, master weights and stochastic rounding are no concern of the rule.
        """
        raise NotImplementedError

    def state_of(self, spec: "ParamSpec") -> tuple[str, ...]:
        """The state buffers of a parameter. Parameters that lack some of `state_names` all lack the same, lie at the
        end of the flat buffers, and have buckets of their own."""
        return self.state_names

    def workspace_bytes(self, shape: UpdateShape) -> int:
        """Temporary memory of an update."""
        if shape.precision.kind == "bf16_sr":  # one parameter after the other
            return ROUNDED_UPDATE_BYTES_PER_WEIGHT * shape.largest_parameter
        return UPDATE_BYTES_PER_WEIGHT * min(CHUNK_ELEMENTS, max(shape.decayed, shape.undecayed))

    def messages(self, shape: UpdateShape) -> Iterator[UpdateMessage]:
        """What ranks exchange during an update."""
        return iter(())
