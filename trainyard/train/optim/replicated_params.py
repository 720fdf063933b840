"""Parameters that several ranks hold: whose gradients must be summed, and how often each counts in a norm.

Data-parallel sums are over when this begins. What is left, all read from the blueprint:

- Under sequence parallelism a norm or bias sees only its rank's tokens: summed over tensor-parallel ranks. So are kv
  heads that every rank holds.
- A kv head that some ranks hold gets a gradient from each of them: summed over those ranks.
- A tied embedding lives on the first and on the last pipeline rank: summed over the two.
"""

from bisect import bisect_right
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from trainyard.compat import foreach_norm
from trainyard.models.blueprint import Blueprint
from trainyard.parallel.flat_buffer import FlatBuffer
from trainyard.parallel.mesh import Mesh
from trainyard.parallel.process_group import Group


@dataclass(frozen=True)
class ReplicatedRange:
    """Some rows of a parameter in this rank's shard, and how many tensor-parallel ranks hold the same."""

    name: str
    start: int
    stop: int
    replicas: int
    replicas_in_any_shard: frozenset[int]
    """What `holders` is for these rows of any shard."""

    def view(self, shard: Tensor) -> Tensor:
        return shard[self.start : self.stop]


class SyncJob(NamedTuple):
    """A sum over `group` of some stretches."""

    group: Group
    ranges: list[ReplicatedRange]
    active: Tensor | None
    """Where only some shards have rows to sum: whether each stretch of this one does. All take part all the same, with
    zeros: ranks then have one graph, and those that have nothing to say would only wait."""


class ReplicaSync:
    def __init__(
        self,
        flat: FlatBuffer,
        blueprint: Blueprint,
        mesh: Mesh,
        shard_index: int,
        sequence_parallel: bool,
        device: torch.device,
    ) -> None:
        """`shard` is which shard of `flat` this rank has."""
        self.flat, self.mesh, self.shard_index = flat, mesh, shard_index
        self.names = list(flat.spans)
        self.ranges = [part for name in self.names for part in self._ranges_of(blueprint, name)]
        tp, copies = mesh.tp.size, mesh.layout.kv_replication

        def summed(part: ReplicatedRange, holders: int) -> Group | None:
            row = blueprint.spec(part.name)
            if row.tp_dim is None:
                return mesh.tp if sequence_parallel and not row.replicated_compute else None
            return None if holders == 1 else mesh.kv_replicas if holders == copies else mesh.tp

        found: dict[str, tuple[Group, list[ReplicatedRange]]] = {}
        for part in self.ranges if tp > 1 else ():
            for group in {
                group.name: group for each in part.replicas_in_any_shard if (group := summed(part, each))
            }.values():
                found.setdefault(group.name, (group, []))[1].append(part)
        self.jobs: list[SyncJob] = []
        for group, parts in found.values():
            everywhere = all(summed(part, each) is group for part in parts for each in part.replicas_in_any_shard)
            mine = torch.tensor([summed(part, part.replicas) is group for part in parts], device=device)
            self.jobs.append(SyncJob(group, parts, None if everywhere else mine))
        tied = [part for part in self.ranges if blueprint.spec(part.name).pipeline_stage == "both"]
        if mesh.tied_embedding.size > 1 and tied:
            self.jobs.append(SyncJob(mesh.tied_embedding, tied, None))
        index = {name: number for number, name in enumerate(self.names)}
        self.param_index = torch.tensor([index[part.name] for part in self.ranges], dtype=torch.int32, device=device)
        self.replica_weight = torch.tensor([1 / part.replicas for part in self.ranges], device=device)
        twice = {part.name for part in tied} if mesh.tied_embedding.size > 1 else set()
        self.dedup_weight = torch.tensor([0.5 if name in twice else 1.0 for name in self.names], device=device)

    def sum_gradients(self, reduced_grads: Tensor) -> None:
        """Sum gradients in place over the ranks that hold the same parameters."""
        for group, parts, mine in self.jobs:
            views = [part.view(self.flat.shard_view(reduced_grads, part.name, self.shard_index)) for part in parts]
            # Which of them are this rank's to sum is a tensor, not part of the graph.
            flags = [None] * len(views) if mine is None else mine.unbind()
            said = [
                (view if flag is None else torch.where(flag, view, 0.0)).reshape(-1)
                for view, flag in zip(views, flags, strict=True)
            ]
            packed = group.all_reduce_sum(torch.cat(said))
            start = 0
            for view, flag in zip(views, flags, strict=True):
                total = packed[start : start + view.numel()].view_as(view)
                view.copy_(total if flag is None else torch.where(flag, total, view))
                start += view.numel()

    def squared_norms(self, buffer: Tensor) -> Tensor:
        """Squared norm of each whole parameter (all its shards on all ranks of the stage), in the order of names."""
        views = [part.view(self.flat.shard_view(buffer, part.name, self.shard_index)) for part in self.ranges]
        norms = foreach_norm(views) if views else buffer.new_zeros(0, dtype=torch.float32)
        return self.reduce_norms(norms.square())

    def reduce_norms(self, squares: Tensor) -> Tensor:
        """From this rank's stretches to whole parameters: copies count once, shards and splits add up."""
        total = torch.zeros(len(self.names), device=squares.device).index_add_(
            0, self.param_index, squares * self.replica_weight
        )
        return (self.mesh.dp_cp_tp if self.flat.num_shards > 1 else self.mesh.tp).all_reduce_sum(total)

    def global_norm(self, squares: Tensor) -> Tensor:
        """The norm over the whole model, from the squared norms of this pipeline rank's parameters."""
        return self.mesh.pp.all_reduce_sum((squares * self.dedup_weight).sum()).sqrt()

    def _ranges_of(self, blueprint: Blueprint, name: str) -> list[ReplicatedRange]:
        """This shard's rows, cut wherever a part begins in any shard: so all shards have the same pieces."""
        row, mine, span = blueprint.spec(name), self.flat.shard_row_range(name, self.shard_index), self.flat.spans[name]
        tp, rank = self.mesh.tp.size, self.mesh.tp.rank
        holders = blueprint.replication(name, tp)
        if row.tp_dim != 0 or not row.fused_parts:  # the same for all rows
            return [ReplicatedRange(name, 0, len(mine), holders[0], frozenset(holders[:1]))] if len(mine) else []
        sizes = [held.sizes[0] for held in blueprint.tp_slices(name, tp, rank)]
        starts = list(accumulate(sizes, initial=0))[:-1]

        def holders_of(row: int) -> int:
            return holders[bisect_right(starts, row) - 1]

        cuts = [*sorted({start % span.shard_rows for start in starts} | {0}), span.shard_rows]
        out = []
        for first, end in pairwise(cuts):
            shards = range(first, span.shape[0], span.shard_rows)
            if first < len(mine):
                elsewhere = frozenset(holders_of(each) for each in shards)
                here = holders_of(mine.start + first)
                out.append(ReplicatedRange(name, first, min(end, len(mine)), here, elsewhere))
        return out
