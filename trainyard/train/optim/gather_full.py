"""A whole parameter (or its gradient, or its moments) from the ranks that hold pieces of it."""

import torch
import torch.distributed as dist
from torch import Tensor

from trainyard.checkpoint.native.partition import holder
from trainyard.models.blueprint import Blueprint
from trainyard.models.sharding import join
from trainyard.train.optim.optimizer import Optimizer


def whole(optimizer: Optimizer, blueprint: Blueprint, row: Tensor, name: str) -> Tensor:
    """`row` is the optimizer's master, first, second or sums. Every rank must ask, in the same order of names."""
    mesh, flat = optimizer.mesh, optimizer.flat
    owner = holder(blueprint, mesh.layout, name)
    if mesh.place["pp"] == owner:
        span = flat.spans[name]
        local = row[span.at : span.at + span.chunk].detach()
        if flat.shards > 1:
            local = mesh.data.gather(local)
        count = torch.Size(span.shape).numel()
        shares = mesh.tp.gather(local[:count].view(1, *span.shape))
        out = join(blueprint, name, shares.unbind())
    else:
        out = row.new_empty(blueprint.row(name).shape)
    if mesh.pp.size > 1:
        out = out.contiguous()
        dist.broadcast(out, src=mesh.pp.ranks[owner], group=mesh.pp.handle)
    return out
