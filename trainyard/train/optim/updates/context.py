"""What the optimizer gives to the implementation of an update rule, and what it calls."""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from trainyard.config.optimizer_schema import OptimizerSection
from trainyard.families.blueprint import Blueprint
from trainyard.kernels.reference import Kernels
from trainyard.parallel.mesh import Mesh
from trainyard.train.compile.compile_blocks import CompileFn
from trainyard.train.optim.flat_state import FlatState
from trainyard.train.optim.replicated_params import ReplicaSync
from trainyard.train.optim.stochastic_rounding import RoundingRange, stochastic_round_to_bf16


class StepScalars(NamedTuple):
    """Inputs of one update besides the state, all on the device."""

    lr: Tensor
    grad_scale: Tensor
    """Factor on gradients: the loss divisor and clipping."""
    correction: Tensor
    """Adam's bias corrections [1 - beta1^t, 1 - beta2^t]."""
    finite: Tensor
    """False where the step must change nothing."""
    update_count: Tensor
    """Updates including this one, for the bias correction of moments."""
    rounding_key: Tensor | None
    """Random key of this step's stochastic rounding; None with fp32 master weights."""

    def at_lr_scale(self, lr_scale: float) -> "StepScalars":
        """The inputs of parameters with this multiple of the learning rate."""
        return self if lr_scale == 1.0 else self._replace(lr=self.lr * lr_scale)

    def packed(self) -> Tensor:
        """The [5] tensor that fused kernels read: lr, grad_scale, the two bias corrections, finite."""
        return torch.cat((torch.stack((self.lr, self.grad_scale)), self.correction, self.finite.float()[None]))


@dataclass(frozen=True)
class UpdateContext:
    """Everything that an update may use to build itself."""

    state: FlatState
    config: OptimizerSection
    blueprint: Blueprint
    mesh: Mesh
    replica_sync: ReplicaSync
    """Norms of parameters that are sharded or replicated over ranks."""
    rounding_ranges: dict[str, list[RoundingRange]]
    """Stochastic rounding of each parameter; empty with fp32 master weights."""
    kernels: Kernels
    compile_fn: CompileFn | None

    def weight_decay(self, name: str) -> float:
        return self.config.weight_decay if self.blueprint.spec(name).weight_decay else 0.0

    def lr_scale(self, name: str) -> float:
        return self.blueprint.spec(name).lr_scale

    def store_weights(self, name: str, value: Tensor, scalars: StepScalars) -> None:
        """Write new fp32 values of this rank's shard to the master weights, with stochastic rounding where they are
        bf16. `value` already equals the old weights where `scalars.finite` is false."""
        if scalars.rounding_key is None:
            self.state.shard_view(self.state.master_weights, name).copy_(value)
            return
        flat_value = value.reshape(-1)
        for rounding in self.rounding_ranges[name]:
            start = rounding.weight.storage_offset() - self.state.flat.spans[name].shard_start
            part = flat_value[start : start + rounding.weight.numel()].view_as(rounding.weight)
            bits = rounding.row_bits(scalars.rounding_key)
            rounded = stochastic_round_to_bf16(part, bits, rounding.site, rounding.column_ids)
            rounding.weight.copy_(torch.where(scalars.finite, rounded, rounding.weight))


class FlatUpdate(Protocol):
    """Updates the master weights and moments of a FlatState from its reduced gradients.

    If the state `copies_weights`, it also updates `weights`. Nothing changes where `scalars.finite` is false.
    """

    def update(self, scalars: StepScalars) -> None: ...
