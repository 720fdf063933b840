"""Connects the model's parameters with the flat state, and exchanges gradients and new weights between ranks."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING

from torch import Tensor, nn

from trainyard.families.blueprint import Blueprint, layer_index
from trainyard.models import TransformerStage, assign_parameters, store_weights
from trainyard.parallel.rank_context import RankContext
from trainyard.parallel.zero1 import GradientReducer, Waiting, WeightGatherer
from trainyard.train.optim.flat_state import FlatState

if TYPE_CHECKING:  # importing torch's fully_shard takes a second, which only ZeRO-2 and 3 should pay
    from trainyard.train.optim.fsdp import FsdpStage


class GradientSync:
    """ZeRO-0 and 1: parameters are views of the flat buffers, gradients are reduced in buckets during backward.
    ZeRO-2 and 3: torch's fully_shard gathers weights and reduces gradients, its shards are views of the flat state.
    Parameters that are not trained are bound as well, and take part in nothing else."""

    def __init__(
        self,
        state: FlatState,
        models: Sequence[TransformerStage],
        context: RankContext,
        fused_wgrad: bool = False,
        waiting: Waiting = nullcontext,
    ) -> None:
        """With `fused_wgrad`, kernels add weight gradients to the gradient buffers directly. `waiting` is entered while
        this rank waits for others."""
        mesh = context.mesh
        self.state = state
        self.gradient_reducer: GradientReducer | None = None
        self.weight_gatherer: WeightGatherer | None = None
        self.parameters: dict[str, nn.Parameter] = {}
        """Trained parameters that are views of the flat weights; empty under FSDP."""
        self.fsdp_stages: list[FsdpStage] = []
        for model in models:
            store_weights(model, state.stored)
        if state.zero_stage >= 2:
            from trainyard.train.optim import fsdp

            self.fsdp_stages = [fsdp.FsdpStage(model, state, context.device) for model in models]
            return
        if mesh.dp_cp.size > 1:
            self.gradient_reducer = GradientReducer(
                state.flat, mesh.data_group, state.gradients, state.reduced_grads, state.reduce_dtype, waiting
            )
        self._bind_parameters(models, context.kernels.wgrad_buffers if fused_wgrad else None)
        if state.zero_stage:
            needed_at = partial(_forward_moments, context.blueprint)
            self.weight_gatherer = WeightGatherer(state.flat, mesh.data_group, state.weights, needed_at, waiting)
            for model in models:
                model.pre_layer_hook = self.weight_gatherer.wait_for

    def zero_grad(self, micro_batches: int = 1) -> None:
        """Start a step in which every parameter gets one gradient per micro batch."""
        self.state.gradients.zero_()
        if self.gradient_reducer:
            self.gradient_reducer.begin_step(micro_batches)

    def reduce_gradients(self) -> None:
        """Complete the sums over data-parallel ranks in `reduced_grads`, after the last backward pass."""
        # A pipeline schedule that splits the backward pass accumulates weight gradients itself, in the weights' dtype,
        # and bypasses the hooks of accumulate_into.
        for name, parameter in self.parameters.items():
            if parameter.grad is not None and parameter.grad.dtype != self.state.gradients.dtype:
                self.state.flat.view(self.state.gradients, name).add_(parameter.grad)
                parameter.grad = None
        for stage in self.fsdp_stages:
            stage.accumulate_gradients()
        if self.gradient_reducer:
            self.gradient_reducer.finish()

    def start_weight_gather(self) -> None:
        """Send this rank's updated shard to the other ranks; the gather overlaps the next forward pass."""
        if self.weight_gatherer:
            self.weight_gatherer.start(self.state.master_weights)
        for stage in self.fsdp_stages:
            stage.sync_uneven_shards()

    def wait_for_weights(self) -> None:
        """Wait until the model's weights are current (other ranks' shards may still be in flight)."""
        if self.weight_gatherer:
            self.weight_gatherer.wait_all()

    def _bind_parameters(self, models: Sequence[TransformerStage], wgrad_buffers: dict[Tensor, Tensor] | None) -> None:
        bound: dict[str, nn.Parameter] = {}
        for model in models:
            # `.data`: weights of later blocks arrive while earlier ones run, which autograd must not see as a
            # modification of a saved tensor. A parameter that two stages share is bound once.
            bound |= assign_parameters(model, lambda name: self.state.compute_view(name).data, bound)
        for name in self.state.frozen_names:
            bound[name].requires_grad_(False)
        for name in self.state.names:
            self.parameters[name] = bound[name]
            on_grad_ready = partial(self.gradient_reducer.on_grad_ready, name) if self.gradient_reducer else None
            gradient = self.state.flat.view(self.state.gradients, name)
            accumulate_into(self.parameters[name], gradient, on_grad_ready)
            if wgrad_buffers is not None:
                wgrad_buffers[self.parameters[name]] = gradient


def _forward_moments(blueprint: Blueprint, name: str) -> tuple[str, ...]:
    """When the forward pass needs a parameter, in the terms of TransformerStage.pre_layer_hook."""
    stage, layer = blueprint.spec(name).pipeline_stage, layer_index(name)
    if layer is not None:
        return (str(layer),)
    return ("first", "last") if stage == "both" else (stage,)


def accumulate_into(parameter: nn.Parameter, gradient: Tensor, on_grad_ready: Callable[[], None] | None) -> None:
    """Make backward add this parameter's gradient to `gradient`, in that dtype, and then call `on_grad_ready`."""
    same_dtype = parameter.dtype == gradient.dtype
    if same_dtype:
        parameter.grad = gradient
        if on_grad_ready is None:
            return

    def accumulate(parameter: Tensor) -> None:
        if not same_dtype and parameter.grad is not None:
            gradient.add_(parameter.grad)
            parameter.grad = None
        if on_grad_ready:
            on_grad_ready()

    parameter.register_post_accumulate_grad_hook(accumulate)  # type: ignore[no-untyped-call]
