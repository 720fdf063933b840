"""ZeRO-2 and ZeRO-3 through torch's fully_shard: gradients, and with stage 3 weights too, live in shards.

torch gathers weights and sums gradients; the shards' memory stays ours (`Flat`), so that the same optimizer, norms and
checkpoints serve every stage.
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
    """Wrap each block and the model around them, whose parameters have no memory yet."""
    assert group.handle is not None
    with compat.disable_fake_tensors():  # torch finds a rank's place by their values
        mesh = DeviceMesh.from_group(group.handle, device.name)
    policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=reduce_dtype, cast_forward_inputs=False)
    for block in model.get_submodule("layers").children():
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard_after_forward)
    # The head's matrix is used by the loss, after the model is done: the outermost parameters stay until backward.
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)  # sums, never means
            module.set_force_sum_reduction_for_comms(True)
    return mesh


class FsdpState:
    """A sharded model whose shards' weights and gradients lie in memory of ours."""

    def __init__(
        self, parameters: dict[str, nn.Parameter], buffers: dict[str, tuple[Tensor, Tensor]], mesh: DeviceMesh
    ) -> None:
        """`memory` has this rank's weights, which are behind the parameters already, and gradients."""
        self.parameters, self.buffers = parameters, buffers
        self.gradients = {
            name: as_dtensor(gradient, parameters[name].shape, mesh) for name, (_, gradient) in buffers.items()
        }
        for name, parameter in parameters.items():
            parameter.grad = self.gradients[name]

    def accumulate_gradients(self) -> None:
        """After backward: torch adds to our memory unless something has made it forget our gradients (a pipeline
        schedule does, when it starts)."""
        for name, parameter in self.parameters.items():
            mine = self.buffers[name][1]
            found = parameter.grad
            if found is not None and (local := _local_tensor(found)).data_ptr() != mine.data_ptr():
                mine.add_(local)
            parameter.grad = self.gradients[name]

    def sync_uneven_shards(self) -> None:
        """After an update: torch keeps shards of uneven parameters in memory of its own; copy those."""
        for name, parameter in self.parameters.items():
            local, mine = _local_tensor(parameter), self.buffers[name][0]
            if local.data_ptr() != mine.data_ptr():
                local.copy_(mine)


def _local_tensor(tensor: Tensor) -> Tensor:
    return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor.detach()


def as_dtensor(local: Tensor, shape: Sequence[int], mesh: DeviceMesh) -> DTensor:
    """A shard of a tensor of `shape`, as torch describes it."""
    whole = torch.empty(tuple(shape), device="meta")
    return DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=whole.shape, stride=whole.stride())
