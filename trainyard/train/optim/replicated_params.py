"""Parameters that several ranks hold: which gradients to sum over which ranks, and how often each counts in a norm.

Data-parallel sums are complete before this module sums the rest, all derived from the blueprint:

- Under sequence parallelism a norm or bias sees only its rank's tokens, so its gradients are summed over
  tensor-parallel ranks. The same holds for kv heads that every rank holds, and always for a norm of heads, of which
  each rank has its own.
- A kv head that some ranks hold gets a gradient from each of them: summed over those ranks.
- A tied embedding exists on the first and the last pipeline rank: summed over the two.
"""

from bisect import bisect_right
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from trainyard.compat import foreach_norm
from trainyard.families.blueprint import Blueprint
from trainyard.parallel.process_group import Group
from trainyard.train.optim.flat_state import FlatState


@dataclass(frozen=True)
class ReplicatedRange:
    """Rows of a parameter in this rank's shard that have the same number of tensor-parallel replicas."""

    name: str
    start: int
    stop: int
    replicas: int
    """Tensor-parallel ranks that hold these rows."""
    replicas_in_any_shard: frozenset[int]
    """The values of `replicas` for the same rows of all shards."""

    def view(self, state: FlatState, buffer: Tensor) -> Tensor:
        return state.shard_view(buffer, self.name)[self.start : self.stop]


class SyncJob(NamedTuple):
    """A sum of some ranges over `group`."""

    group: Group
    ranges: list[ReplicatedRange]
    active: Tensor | None
    """Flag for each range if only some shards have rows to sum, else None. Ranks without rows contribute zeros: they
    would have to wait anyway, and all ranks then run the same graph."""


class ReplicaSync:
    """Sums gradients and computes norms of parameters that are replicated or sharded over ranks."""

    def __init__(self, state: FlatState, blueprint: Blueprint) -> None:
        self.state, self.mesh, self.names = state, state.mesh, state.names
        mesh = self.mesh
        device = state.master_weights.device
        self.ranges = [part for name in self.names for part in self._ranges_of(blueprint, name)]
        kv_replication = mesh.layout.kv_replication

        def sync_group(part: ReplicatedRange, replicas: int) -> Group | None:
            spec = blueprint.spec(part.name)
            if spec.tp_dim is None:
                return mesh.tp if spec.sums_tp_gradient(mesh.layout.sequence_parallel) else None
            return None if replicas == 1 else mesh.kv_replicas if replicas == kv_replication else mesh.tp

        by_group: dict[str, tuple[Group, list[ReplicatedRange]]] = {}
        for part in self.ranges if mesh.tp.size > 1 else ():
            groups = (sync_group(part, replicas) for replicas in part.replicas_in_any_shard)
            for group in {group.name: group for group in groups if group}.values():
                by_group.setdefault(group.name, (group, []))[1].append(part)
        self.jobs: list[SyncJob] = []
        for group, parts in by_group.values():
            always_active = all(
                sync_group(part, replicas) is group for part in parts for replicas in part.replicas_in_any_shard
            )
            active = torch.tensor([sync_group(part, part.replicas) is group for part in parts], device=device)
            self.jobs.append(SyncJob(group, parts, None if always_active else active))
        tied = [part for part in self.ranges if blueprint.spec(part.name).pipeline_stage == "both"]
        if mesh.tied_embedding.size > 1 and tied:
            self.jobs.append(SyncJob(mesh.tied_embedding, tied, None))
        index = {name: number for number, name in enumerate(self.names)}
        self.param_index = torch.tensor([index[part.name] for part in self.ranges], dtype=torch.int32, device=device)
        # Norms add up over the ranks of `norm_group`; what several of them hold counts once.
        self.norm_group = mesh.dp_cp_tp if state.zero_stage or mesh.ep.size > 1 else mesh.tp

        def copies(part: ReplicatedRange) -> int:
            span = state.flat.spans[part.name]
            data_copies = mesh.data_group(span.of_experts).size // span.num_shards
            return part.replicas * (data_copies if self.norm_group is mesh.dp_cp_tp else 1)

        self.replica_weight = torch.tensor([1 / copies(part) for part in self.ranges], device=device)
        on_two_stages = {part.name for part in tied} if mesh.tied_embedding.size > 1 else set()
        self.dedup_weight = torch.tensor([0.5 if name in on_two_stages else 1.0 for name in self.names], device=device)

    def sum_gradients(self, reduced_grads: Tensor) -> None:
        """Sum gradients in place over the ranks that hold the same parameters."""
        for group, ranges, active in self.jobs:
            views = [part.view(self.state, reduced_grads) for part in ranges]
            # The flags are tensors and not part of the graph, which is then the same on all ranks.
            flags = [None] * len(views) if active is None else active.unbind()
            contributions = [
                (view if flag is None else torch.where(flag, view, 0.0)).reshape(-1)
                for view, flag in zip(views, flags, strict=True)
            ]
            sums = group.all_reduce_sum(torch.cat(contributions))
            totals = sums.split_with_sizes([view.numel() for view in views])
            for view, flag, total in zip(views, flags, totals, strict=True):
                total = total.view_as(view)
                view.copy_(total if flag is None else torch.where(flag, total, view))

    def squared_norms(self, buffer: Tensor) -> Tensor:
        """Squared norm of each full parameter (over all ranks of the pipeline stage), in the order of `names`."""
        views = [part.view(self.state, buffer) for part in self.ranges]
        norms = foreach_norm(views) if views else buffer.new_zeros(0, dtype=torch.float32)
        return self.reduce_norms(norms.square())

    def reduce_norms(self, squares: Tensor) -> Tensor:
        """From squared norms of this rank's ranges to those of full parameters: replicas count once, shards add up."""
        total = torch.zeros(len(self.names), device=squares.device).index_add_(
            0, self.param_index, squares * self.replica_weight
        )
        return self.norm_group.all_reduce_sum(total)

    def global_norm(self, squares: Tensor) -> Tensor:
        """The norm over the full model, from the squared norms of this pipeline rank's parameters."""
        return self.mesh.pp.all_reduce_sum((squares * self.dedup_weight).sum()).sqrt()

    def _ranges_of(self, blueprint: Blueprint, name: str) -> list[ReplicatedRange]:
        """This shard's rows, divided wherever a fused tensor starts in any shard: all shards have equal ranges."""
        spec, span = blueprint.spec(name), self.state.flat.spans[name]
        rows = self.state.shard_row_range(name)
        model_shard = self.mesh.model_shard
        replication = blueprint.replication(name, model_shard)
        if spec.tp_dim != 0 or len(set(replication)) == 1:  # the same for all rows
            if not len(rows):
                return []
            return [ReplicatedRange(name, 0, len(rows), replication[0], frozenset(replication[:1]))]
        sizes = [piece.sizes[0] for piece in blueprint.local_slices(name, model_shard)]
        part_starts = list(accumulate(sizes, initial=0))[:-1]

        def replicas_of(row: int) -> int:
            return replication[bisect_right(part_starts, row) - 1]

        boundaries = [*sorted({start % span.shard_rows for start in part_starts} | {0}), span.shard_rows]
        ranges = []
        for start, stop in pairwise(boundaries):
            if start < len(rows):
                same_rows = range(start, span.shape[0], span.shard_rows)
                in_any_shard = frozenset(replicas_of(row) for row in same_rows)
                replicas = replicas_of(rows.start + start)
                ranges.append(ReplicatedRange(name, start, min(stop, len(rows)), replicas, in_any_shard))
        return ranges
