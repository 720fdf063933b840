"""ZeRO-2 and ZeRO-3 through torch's fully_shard: gradients, and with stage 3 also weights, live in shards.

torch gathers weights and reduces gradients; the shards' memory belongs to us (`FlatBuffer`), so that the same
optimizer, norms and checkpoints serve every ZeRO stage.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from trainyard import compat
from trainyard.devices import Device
from trainyard.parallel.process_group import Group


def apply_fsdp(
    model: nn.Module,
    group: Group,
    device: Device,
    compute_dtype: torch.dtype,
    reduce_dtype: torch.dtype,
    reshard_after_forward: bool,
) -> DeviceMesh:
    """Wrap each block and then the model, whose parameters have no memory yet."""
    assert group.handle is not None
    with compat.disable_fake_tensors():  # torch computes a rank's position from tensor values
        mesh = DeviceMesh.from_group(group.handle, device.name)
    policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=reduce_dtype, cast_forward_inputs=False)
    for block in model.get_submodule("layers").children():
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard_after_forward)
    # The loss uses the output projection after the model's forward: the root's parameters stay gathered until backward.
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)  # sum gradients, never average
            module.set_force_sum_reduction_for_comms(True)
    return mesh


class FsdpState:
    """A sharded model whose weight and gradient shards lie in our own buffers."""

    def __init__(
        self, parameters: dict[str, nn.Parameter], buffers: dict[str, tuple[Tensor, Tensor]], mesh: DeviceMesh
    ) -> None:
        """`buffers` holds this rank's (weight, gradient) shards; the parameters already use the weights as memory."""
        self.parameters, self.buffers = parameters, buffers
        self.gradients = {
            name: as_dtensor(gradient, parameters[name].shape, mesh) for name, (_, gradient) in buffers.items()
        }
        for name, parameter in parameters.items():
            parameter.grad = self.gradients[name]

    def accumulate_gradients(self) -> None:
        """Call after backward. torch accumulates into our buffer unless something has replaced `parameter.grad` (a
        pipeline schedule does when it starts); in that case add the replacement here."""
        for name, parameter in self.parameters.items():
            buffer = self.buffers[name][1]
            gradient = parameter.grad
            if gradient is not None and (local := _local_tensor(gradient)).data_ptr() != buffer.data_ptr():
                buffer.add_(local)
            parameter.grad = self.gradients[name]

    def sync_uneven_shards(self) -> None:
        """Call after an update. torch keeps shards of unevenly split parameters in its own memory; copy those."""
        for name, parameter in self.parameters.items():
            local, buffer = _local_tensor(parameter), self.buffers[name][0]
            if local.data_ptr() != buffer.data_ptr():
                local.copy_(buffer)


def _local_tensor(tensor: Tensor) -> Tensor:
    return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor.detach()


def as_dtensor(local: Tensor, shape: Sequence[int], mesh: DeviceMesh) -> DTensor:
    """A DTensor of global `shape` from this rank's shard."""
    full = torch.empty(tuple(shape), device="meta")
    return DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=full.shape, stride=full.stride())
