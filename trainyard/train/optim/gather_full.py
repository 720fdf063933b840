"""A whole parameter (or its gradient, or its moments) from the ranks that hold pieces of it."""

import torch
import torch.distributed as dist
from torch import Tensor

from trainyard.checkpoint.native.partition import pipeline_owner
from trainyard.models.blueprint import Blueprint
from trainyard.models.sharding import unshard_tensor
from trainyard.train.optim.optimizer import Optimizer


def gather_full_parameter(optimizer: Optimizer, blueprint: Blueprint, buffer: Tensor, name: str) -> Tensor:
    """`row` is the optimizer's master, first, second or sums. Every rank must ask, in the same order of names."""
    mesh, flat = optimizer.mesh, optimizer.flat
    owner = pipeline_owner(blueprint, mesh.layout, name)
    if mesh.coords["pp"] == owner:
        span = flat.spans[name]
        local = buffer[span.shard_start : span.shard_start + span.shard_numel].detach()
        if flat.num_shards > 1:
            local = mesh.dp_cp.all_gather(local)
        count = torch.Size(span.shape).numel()
        shares = mesh.tp.all_gather(local[:count].view(1, *span.shape))
        out = unshard_tensor(blueprint, name, shares.unbind())
    else:
        out = buffer.new_empty(blueprint.spec(name).shape)
    if mesh.pp.size > 1:
        out = out.contiguous()
        dist.broadcast(out, src=mesh.pp.ranks[owner], group=mesh.pp.handle)
    return out
