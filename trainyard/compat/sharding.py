"""Parameters of one module that FSDP shards over different ranks (torch 2.13 and 2.14)."""

from collections.abc import Callable, Collection
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from trainyard.core.errors import UserError


def placement_on_other_mesh(parameters: Collection[nn.Parameter], mesh: DeviceMesh) -> Callable[[nn.Parameter], Any]:
    """A `shard_placement_fn` of fully_shard that shards these parameters by rows over `mesh`, and others as usual."""
    from torch.distributed.fsdp._fully_shard import _fsdp_common as fsdp

    if not hasattr(fsdp, "ShardPlacementResult"):
        raise UserError("layout.ep with layout.zero above 1: needs torch 2.13 or newer; nearest: layout.zero=1")
    placement = fsdp.ShardPlacementResult(None, fsdp.FSDPMeshInfo(mesh, shard_mesh_dim=0))
    return lambda parameter: placement if parameter in parameters else None
