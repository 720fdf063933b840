"""The optimizer of one rank: flat state, gradient synchronization, an update rule, and a guard that skips steps whose
loss or gradient norm is not finite. The decision to skip is made on the device, without asking the host."""

from collections.abc import Callable

import torch
from torch import Tensor

from trainyard.config.optimizer_schema import OptimizerSection
from trainyard.core.counter_rng import key32
from trainyard.core.user_code import load_object
from trainyard.parallel.rank_context import RankContext
from trainyard.train.compile.compile_blocks import CompileFn
from trainyard.train.optim.flat_state import FlatState
from trainyard.train.optim.gradient_sync import GradientSync
from trainyard.train.optim.replicated_params import ReplicaSync
from trainyard.train.optim.step_guard import StepGuard
from trainyard.train.optim.stochastic_rounding import rounding_ranges
from trainyard.train.optim.updates.context import FlatUpdate, StepScalars, UpdateContext
from trainyard.train.optim.updates.load_balance import LoadBalance


class Optimizer:
    """Owns a rank's training state and updates it once per step."""

    def __init__(
        self,
        state: FlatState,
        sync: GradientSync,
        context: RankContext,
        section: OptimizerSection,
        seed: int,
        compile_fn: CompileFn | None = None,
    ) -> None:
        """`seed` is that of stochastic rounding."""
        self.state, self.sync, self.seed = state, sync, seed
        self.betas = (section.beta1, section.beta2)
        blueprint, mesh = context.blueprint, context.mesh
        self.replica_sync = ReplicaSync(state, blueprint)
        self.guard = StepGuard(state.names, section.max_grad_norm, context.device.torch_device)
        ranges = {name: rounding_ranges(state, blueprint, mesh.model_shard, name) for name in state.names}
        update_context = UpdateContext(
            state, section, blueprint, mesh, self.replica_sync, ranges, context.kernels, compile_fn
        )
        implementation = load_object(state.rule.implementation, "a class (rule, context)")
        self.update: FlatUpdate = implementation(state.rule, update_context)
        self.load_balance = LoadBalance(update_context)
        self._update_fences: list[Callable[[], None]] = []

    def zero_grad(self, micro_batches: int = 1) -> None:
        """Start a step in which every parameter gets one gradient per micro batch."""
        self.sync.zero_grad(micro_batches)

    def reduce_gradients(self) -> None:
        """Complete the sums over all ranks in `state.reduced_grads`, after the last backward pass."""
        self.sync.reduce_gradients()
        self.replica_sync.sum_gradients(self.state.reduced_grads)

    def wait_for_weights(self) -> None:
        """Wait until the model's weights are current (other ranks' shards may still be in flight)."""
        self.sync.wait_for_weights()

    def publish_weights(self) -> None:
        """Bring master weights that were set from outside to where the model computes with them."""
        if self.state.copies_weights:
            self.state.weights.copy_(self.state.master_weights)
        self.sync.start_weight_gather()
        self.sync.wait_for_weights()

    def fence_next_update(self, fence: Callable[[], None]) -> None:
        """Call `fence` once before the next update, which then may not overtake a copy of the state in progress."""
        self._update_fences.append(fence)

    def wait_for_copies(self) -> None:
        """Wait until the weights are current, and copies of the state in progress no longer read them."""
        self.wait_for_weights()
        while self._update_fences:
            self._update_fences.pop()()

    def weight_norm(self) -> Tensor:
        """The 2-norm of all trained weights of the full model."""
        return self.replica_sync.global_norm(self.replica_sync.squared_norms(self.state.master_weights))

    @torch.no_grad()
    def step(self, lr: Tensor, grad_scale: Tensor, loss: Tensor, step: int) -> Tensor:
        """Update the weights from the reduced gradients times `grad_scale`, clipped. Returns the norm before clipping.
        `step` seeds stochastic rounding."""
        self.wait_for_copies()
        loads = self.load_balance.take_loads()
        squared_norms = self.replica_sync.squared_norms(self.state.reduced_grads)
        norm = self.replica_sync.global_norm(squared_norms) * grad_scale
        finite = self.guard.check(squared_norms, norm, loss)
        rounding_key = None
        if self.state.stochastic_rounding:
            rounding_key = torch.tensor(key32(self.seed, "rounding", step), dtype=torch.int32).to(lr.device)
        grad_scale, count = self.guard.clip(norm, grad_scale), self.guard.update_count
        # Above 0 also if the first step is skipped.
        correction = torch.stack([1 - beta**count for beta in self.betas]).clamp(min=1e-30)
        scalars = StepScalars(lr, grad_scale, correction, finite, count, rounding_key)
        self.update.update(scalars)
        self.load_balance.update(loads, scalars)
        self.sync.start_weight_gather()
        return norm
