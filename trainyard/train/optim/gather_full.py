"""Assembles full parameters (or their gradients or moments) from the shards of all ranks."""

import torch
import torch.distributed as dist
from torch import Tensor

from trainyard.checkpoint.partition import LocalSlice, owned_slices, pipeline_owner
from trainyard.core.splits import shard_rows
from trainyard.families.blueprint import Blueprint
from trainyard.models.sharding import unshard_tensor
from trainyard.parallel.mesh import SINGLE_RANK, Mesh
from trainyard.train.optim.flat_state import FlatState


def gather_full_parameter(state: FlatState, blueprint: Blueprint, mesh: Mesh, name: str) -> Tensor:
    """The full master weights of one parameter on every rank. All ranks must ask, in the same order of names."""
    owner = pipeline_owner(blueprint, mesh.layout, name)
    if mesh.coords["pp"] == owner:
        span = state.span(name)
        if name in state.stored:
            local = state.weight_shard(name).flatten()
        else:
            local = state.weight_buffer(name)[span.shard_start : span.shard_start + span.shard_numel].detach()
        if span.num_shards > 1:
            local = mesh.data_group(span.of_experts).all_gather(local)
        ep, count = mesh.ep if span.of_experts else SINGLE_RANK, torch.Size(span.shape).numel()
        shards = ep.all_gather(mesh.tp.all_gather(local[:count].view(1, *span.shape)))
        full = unshard_tensor(blueprint, name, shards.unbind(), ep.size)
    else:
        buffer = state.master_weights if blueprint.is_trained(name) else state.frozen_weights
        full = buffer.new_empty(blueprint.spec(name).shape)
    if mesh.pp.size > 1:
        full = full.contiguous()
        dist.broadcast(full, src=mesh.pp.ranks[owner], group=mesh.pp.handle)
    return full


def gather_full_buffer(state: FlatState, blueprint: Blueprint, mesh: Mesh, buffer: Tensor | None) -> dict[str, Tensor]:
    """The trained unfused tensors of the full model in fp32, from a buffer of shard size, or (None) the weights of all
    tensors, with a single all-reduce.

    Every rank writes the slices that it owns into zeros of the full size; the sum is exact because every element has
    one owner.
    """
    starts, size = {}, 0
    included = [name for name in blueprint.parameter_names() if buffer is None or blueprint.is_trained(name)]
    for name in included:
        for piece in blueprint.local_slices(name):
            starts[piece.name] = (size, piece)
            size += piece.numel
    flat = torch.zeros(size, device=state.master_weights.device)
    tensors = {
        name: flat[start : start + piece.numel].view(piece.global_shape) for name, (start, piece) in starts.items()
    }
    for owned in owned_slices(blueprint, mesh.layout, mesh.layout_rank, included):
        shard = state.weight_shard(owned.param) if buffer is None else state.shard_view(buffer, owned.param)
        tensors[owned.name][owned.to_index()] = slice_view(state, mesh, shard.detach(), owned).float()
    if mesh.world.size > 1:
        flat.copy_(mesh.world.all_reduce_sum(flat))
    return tensors


def slice_view(state: FlatState, mesh: Mesh, shard: Tensor, piece: LocalSlice) -> Tensor:
    """A slice that this rank owns, in its shard of a parameter."""
    span = state.span(piece.param)
    if span.num_shards == 1:  # every data-parallel rank holds all rows and owns some of them
        group = mesh.data_group(span.of_experts)
        rows = shard_rows(len(shard), group.size, group.rank)
        shard = shard[rows.start : rows.stop]
    return shard[piece.local_index]
