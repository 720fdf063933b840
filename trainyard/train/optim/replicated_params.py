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
from trainyard.parallel.flat_buffer import Flat
from trainyard.parallel.mesh import Mesh
from trainyard.parallel.process_group import Group


@dataclass(frozen=True)
class Stretch:
    """Some rows of a parameter in this rank's shard, and how many tensor-parallel ranks hold the same."""

    name: str
    first: int
    end: int
    holders: int
    elsewhere: frozenset[int]
    """What `holders` is for these rows of any shard."""

    def of(self, shard: Tensor) -> Tensor:
        return shard[self.first : self.end]


class Job(NamedTuple):
    """A sum over `group` of some stretches."""

    group: Group
    parts: list[Stretch]
    mine: Tensor | None
    """Where only some shards have rows to sum: whether each stretch of this one does. All take part all the same, with
    zeros: ranks then have one graph, and those that have nothing to say would only wait."""


class Shares:
    def __init__(
        self, flat: Flat, blueprint: Blueprint, mesh: Mesh, shard: int, sequence: bool, device: torch.device
    ) -> None:
        """`shard` is which shard of `flat` this rank has."""
        self.flat, self.mesh, self.number = flat, mesh, shard
        self.names = list(flat.spans)
        self.stretches = [part for name in self.names for part in self._stretches(blueprint, name)]
        tp, copies = mesh.tp.size, mesh.layout.copies

        def summed(part: Stretch, holders: int) -> Group | None:
            row = blueprint.row(part.name)
            if row.split is None:
                return mesh.tp if sequence and not row.repeated else None
            return None if holders == 1 else mesh.copies if holders == copies else mesh.tp

        found: dict[str, tuple[Group, list[Stretch]]] = {}
        for part in self.stretches if tp > 1 else ():
            for group in {group.name: group for each in part.elsewhere if (group := summed(part, each))}.values():
                found.setdefault(group.name, (group, []))[1].append(part)
        self.jobs: list[Job] = []
        for group, parts in found.values():
            everywhere = all(summed(part, each) is group for part in parts for each in part.elsewhere)
            mine = torch.tensor([summed(part, part.holders) is group for part in parts], device=device)
            self.jobs.append(Job(group, parts, None if everywhere else mine))
        tied = [part for part in self.stretches if blueprint.row(part.name).place == "both"]
        if mesh.tied.size > 1 and tied:
            self.jobs.append(Job(mesh.tied, tied, None))
        index = {name: number for number, name in enumerate(self.names)}
        self.index = torch.tensor([index[part.name] for part in self.stretches], dtype=torch.int32, device=device)
        self.weight = torch.tensor([1 / part.holders for part in self.stretches], device=device)
        twice = {part.name for part in tied} if mesh.tied.size > 1 else set()
        self.once = torch.tensor([0.5 if name in twice else 1.0 for name in self.names], device=device)

    def sum(self, sums: Tensor) -> None:
        """Sum gradients in place over the ranks that hold the same parameters."""
        for group, parts, mine in self.jobs:
            views = [part.of(self.flat.shard(sums, part.name, self.number)) for part in parts]
            # Which of them are this rank's to sum is a tensor, not part of the graph.
            flags = [None] * len(views) if mine is None else mine.unbind()
            said = [
                (view if flag is None else torch.where(flag, view, 0.0)).reshape(-1)
                for view, flag in zip(views, flags, strict=True)
            ]
            packed = group.sum(torch.cat(said))
            start = 0
            for view, flag in zip(views, flags, strict=True):
                total = packed[start : start + view.numel()].view_as(view)
                view.copy_(total if flag is None else torch.where(flag, total, view))
                start += view.numel()

    def squares(self, row: Tensor) -> Tensor:
        """Squared norm of each whole parameter (all its shards on all ranks of the stage), in the order of names."""
        views = [part.of(self.flat.shard(row, part.name, self.number)) for part in self.stretches]
        norms = foreach_norm(views) if views else row.new_zeros(0, dtype=torch.float32)
        return self.together(norms.square())

    def together(self, squares: Tensor) -> Tensor:
        """From this rank's stretches to whole parameters: copies count once, shards and splits add up."""
        total = torch.zeros(len(self.names), device=squares.device).index_add_(0, self.index, squares * self.weight)
        return (self.mesh.stage if self.flat.shards > 1 else self.mesh.tp).sum(total)

    def norm(self, squares: Tensor) -> Tensor:
        """The norm over the whole model, from the squared norms of this pipeline rank's parameters."""
        return self.mesh.pp.sum((squares * self.once).sum()).sqrt()

    def _stretches(self, blueprint: Blueprint, name: str) -> list[Stretch]:
        """This shard's rows, cut wherever a part begins in any shard: so all shards have the same pieces."""
        row, mine, span = blueprint.row(name), self.flat.rows(name, self.number), self.flat.spans[name]
        tp, rank = self.mesh.tp.size, self.mesh.tp.rank
        holders = blueprint.holders(name, tp)
        if row.split != 0 or not row.parts:  # the same for all rows
            return [Stretch(name, 0, len(mine), holders[0], frozenset(holders[:1]))] if len(mine) else []
        sizes = [held.stop - held.start for held in blueprint.slices(name, tp, rank)]
        starts = list(accumulate(sizes, initial=0))[:-1]

        def holders_of(row: int) -> int:
            return holders[bisect_right(starts, row) - 1]

        cuts = [*sorted({start % span.rows for start in starts} | {0}), span.rows]
        out = []
        for first, end in pairwise(cuts):
            shards = range(first, span.shape[0], span.rows)
            if first < len(mine):
                elsewhere = frozenset(holders_of(each) for each in shards)
                here = holders_of(mine.start + first)
                out.append(Stretch(name, first, min(end, len(mine)), here, elsewhere))
        return out
