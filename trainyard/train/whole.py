"""A whole parameter (or its gradient, or its moments) from the ranks that hold pieces of it."""

import torch
import torch.distributed as dist
from torch import Tensor

from trainyard.models.blueprint import Blueprint, layer
from trainyard.models.slicing import join
from trainyard.parallel.layout import Layout
from trainyard.train.optimizers import Optimizer


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


def holder(blueprint: Blueprint, layout: Layout, name: str) -> int:
    """The pipeline rank that has a parameter (the first one, if two have)."""
    number = layer(name)
    if number is not None:
        return layout.owners[number]
    return layout.holder(len(layout.stages) - 1) if blueprint.row(name).place == "last" else 0
