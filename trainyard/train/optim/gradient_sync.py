"""Connects the model's parameters with the flat state, and exchanges gradients and new weights between ranks."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from trainyard.config.schema import Config
from trainyard.devices import Device
from trainyard.models import TransformerStage, assign_parameters
from trainyard.models.blueprint import Blueprint, layer_index
from trainyard.parallel.mesh import Mesh
from trainyard.parallel.zero1 import GradientReducer, WeightGatherer
from trainyard.train.optim.flat_state import DTYPES, FlatState, Shapes
from trainyard.train.optim.replicated_params import ReplicaSync

if TYPE_CHECKING:  # importing torch's fully_shard takes a second, which only ZeRO-2 and 3 should pay
    from trainyard.train.optim.fsdp import FsdpState

WgradBuffers = dict[Tensor, Tensor]
"""Gradient buffer of each parameter, for kernels that accumulate weight gradients directly."""


class GradientSync:
    """ZeRO-0 and 1: parameters are views of the flat buffers, gradients are reduced in buckets during backward.
    ZeRO-2 and 3: torch's fully_shard gathers weights and reduces gradients, its shards are views of the flat state."""

    def __init__(
        self,
        state: FlatState,
        models: Sequence[TransformerStage],
        blueprint: Blueprint,
        config: Config,
        device: Device,
        mesh: Mesh,
        replica_sync: ReplicaSync,
        wgrad_buffers: WgradBuffers | None,
    ) -> None:
        """`wgrad_buffers`, if given, is filled with every parameter's gradient buffer."""
        self.state, self.mesh, self.replica_sync = state, mesh, replica_sync
        self.gradient_reducer: GradientReducer | None = None
        self.weight_gatherer: WeightGatherer | None = None
        self.parameters: dict[str, nn.Parameter] = {}
        """Parameters that are views of the flat weights; empty under FSDP."""
        self.fsdp_states: list[FsdpState] = []
        reduce_dtype = DTYPES[config.precision.grad_reduce_dtype]
        if state.zero_stage >= 2:
            self._apply_fsdp(models, device, reduce_dtype)
            return
        if mesh.dp_cp.size > 1:
            self.gradient_reducer = GradientReducer(
                state.flat, mesh.dp_cp, state.gradients, state.reduced_grads, reduce_dtype
            )
        self._bind_parameters(models, wgrad_buffers)
        if state.zero_stage:
            needed_at = partial(_forward_moments, blueprint)
            self.weight_gatherer = WeightGatherer(state.flat, mesh.dp_cp, state.weights, needed_at)
            for model in models:
                model.pre_layer_hook = self.weight_gatherer.wait_for

    def zero_grad(self, micro_batches: int = 1) -> None:
        """Start a step in which every parameter gets one gradient per micro batch."""
        self.state.gradients.zero_()
        if self.gradient_reducer:
            self.gradient_reducer.begin_step(micro_batches)

    def reduce_gradients(self) -> None:
        """Complete the sums over all ranks in `reduced_grads`, after the last backward pass."""
        # A pipeline schedule that splits the backward pass accumulates weight gradients itself, in the weights' dtype,
        # and bypasses the hooks of accumulate_into.
        for name, parameter in self.parameters.items():
            if parameter.grad is not None and parameter.grad.dtype != self.state.gradients.dtype:
                self.state.flat.view(self.state.gradients, name).add_(parameter.grad)
                parameter.grad = None
        for fsdp_state in self.fsdp_states:
            fsdp_state.accumulate_gradients()
        if self.gradient_reducer:
            self.gradient_reducer.finish()
        self.replica_sync.sum_gradients(self.state.reduced_grads)

    def start_weight_gather(self) -> None:
        """Send this rank's updated shard to the other ranks; the gather overlaps the next forward pass."""
        if self.weight_gatherer:
            self.weight_gatherer.start(self.state.master_weights)
        for fsdp_state in self.fsdp_states:
            fsdp_state.sync_uneven_shards()

    def wait_for_weights(self) -> None:
        """Wait until the model's weights are current (other ranks' shards may still be in flight)."""
        if self.weight_gatherer:
            self.weight_gatherer.wait_all()

    def _bind_parameters(self, models: Sequence[TransformerStage], wgrad_buffers: WgradBuffers | None) -> None:
        state = self.state
        for model in models:
            # `.data`: weights of later blocks arrive while earlier ones run, which autograd must not see as a
            # modification of a saved tensor. A parameter that two stages share is bound once.
            self.parameters |= assign_parameters(
                model, lambda name: state.flat.view(state.weights, name).data, self.parameters
            )
        for name in state.names:
            on_grad_ready = partial(self.gradient_reducer.on_grad_ready, name) if self.gradient_reducer else None
            gradient = state.flat.view(state.gradients, name)
            accumulate_into(self.parameters[name], gradient, on_grad_ready)
            if wgrad_buffers is not None:
                wgrad_buffers[self.parameters[name]] = gradient

    def _apply_fsdp(self, models: Sequence[TransformerStage], device: Device, reduce_dtype: torch.dtype) -> None:
        from trainyard.train.optim import fsdp

        state = self.state
        for model in models:
            shapes: Shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
            device_mesh = fsdp.apply_fsdp(
                model, self.mesh.dp_cp, device, state.compute_dtype, reduce_dtype, state.zero_stage == 3
            )

            def shard(name: str, shapes: Shapes = shapes, device_mesh: DeviceMesh = device_mesh) -> Tensor:
                return fsdp.as_dtensor(state.shard_view(state.master_weights, name), shapes[name], device_mesh)

            parameters = assign_parameters(model, shard)
            memory = {
                name: (state.shard_view(state.master_weights, name), state.shard_view(state.reduced_grads, name))
                for name in parameters
            }
            self.fsdp_states.append(fsdp.FsdpState(parameters, memory, device_mesh))


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
