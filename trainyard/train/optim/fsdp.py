"""ZeRO-2 and ZeRO-3 through torch's fully_shard: gradients, and with stage 3 also weights, live in shards.

torch gathers weights and reduces gradients; the shards' memory is the flat state's, so that the same update rules,
norms and checkpoints serve every ZeRO stage.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from trainyard import compat
from trainyard.devices import Device
from trainyard.models import TransformerStage, assign_parameters
from trainyard.parallel.process_group import Group
from trainyard.train.optim.flat_state import FlatState


class FsdpStage:
    """A stage sharded by torch, with its weight and gradient shards in the flat state."""

    def __init__(self, model: TransformerStage, state: FlatState, device: Device) -> None:
        """Wrap each block and then the model, whose parameters have no memory yet, and give them their memory."""
        shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
        experts = {parameter for name, parameter in model.named_parameters() if state.span(name).of_experts}
        meshes = {
            of_experts: _device_mesh(state.mesh.data_group(of_experts), device) for of_experts in {False, bool(experts)}
        }
        policy = MixedPrecisionPolicy(state.compute_dtype, state.reduce_dtype, cast_forward_inputs=False)
        options: dict[str, Any] = {"mesh": meshes[False], "mp_policy": policy}
        if experts:
            options["shard_placement_fn"] = compat.placement_on_other_mesh(experts, meshes[True])
        for block in model.blocks:
            fully_shard(block, reshard_after_forward=state.zero_stage == 3, **options)
        # The loss uses the output projection after the model's forward: the root's parameters stay gathered until
        # backward.
        fully_shard(model, reshard_after_forward=False, **options)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)  # sum gradients, never average
                module.set_force_sum_reduction_for_comms(True)

        def as_dtensor(local: Tensor, name: str) -> DTensor:
            return _as_dtensor(local, shapes[name], meshes[state.span(name).of_experts])

        # Weights that are not trained have the compute dtype, others are fp32: torch wants one dtype only of those that
        # have gradients.
        bound = assign_parameters(model, lambda name: as_dtensor(state.weight_shard(name), name))
        for name in shapes.keys() - state.flat.spans.keys():
            bound[name].requires_grad_(False)
        self.parameters = {name: parameter for name, parameter in bound.items() if parameter.requires_grad}
        self.weights, self.grad_buffers = (
            {name: state.shard_view(buffer, name) for name in self.parameters}
            for buffer in (state.master_weights, state.reduced_grads)
        )
        self.gradients = {name: as_dtensor(gradient, name) for name, gradient in self.grad_buffers.items()}
        for name, parameter in self.parameters.items():
            parameter.grad = self.gradients[name]

    def accumulate_gradients(self) -> None:
        """Call after backward. torch accumulates into our buffer unless something has replaced `parameter.grad` (a
        pipeline schedule does when it starts); in that case add the replacement here."""
        for name, parameter in self.parameters.items():
            buffer, gradient = self.grad_buffers[name], parameter.grad
            if gradient is not None and (local := _local_tensor(gradient)).data_ptr() != buffer.data_ptr():
                buffer.add_(local)
            parameter.grad = self.gradients[name]

    def sync_uneven_shards(self) -> None:
        """Call after an update. torch keeps shards of unevenly split parameters in its own memory; copy those."""
        for name, parameter in self.parameters.items():
            local, buffer = _local_tensor(parameter), self.weights[name]
            if local.data_ptr() != buffer.data_ptr():
                local.copy_(buffer)


def _device_mesh(group: Group, device: Device) -> DeviceMesh:
    assert group.handle is not None
    with compat.disable_fake_tensors():  # torch computes a rank's position from tensor values
        return DeviceMesh.from_group(group.handle, device.name)


def _local_tensor(tensor: Tensor) -> Tensor:
    return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor.detach()


def _as_dtensor(local: Tensor, shape: Sequence[int], mesh: DeviceMesh) -> DTensor:
    """A DTensor of global `shape` from this rank's shard."""
    full = torch.empty(tuple(shape), device="meta")
    return DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=full.shape, stride=full.stride())
