"""Parameters that several ranks hold: whose gradients must be summed, and how often each counts in a norm.

Data-parallel sums are over when this begins. What is left, all read from the blueprint:

- Under sequence parallelism a norm or bias sees only its rank's tokens: summed over tensor-parallel ranks. So are kv
  heads that every rank holds.
- A kv head that some ranks hold gets a gradient from each of them: summed over those ranks.
- A tied embedding lives on the first and on the last pipeline rank: summed over the two.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from trainyard.compat import foreach_norm
from trainyard.models.blueprint import Blueprint
from trainyard.parallel.flat import Flat
from trainyard.parallel.groups import Group
from trainyard.parallel.mesh import Mesh


@dataclass(frozen=True)
class Stretch:
    """Some rows of a parameter in this rank's shard, and how many tensor-parallel ranks hold the same."""

    name: str
    first: int
    end: int
    holders: int

    def of(self, shard: Tensor) -> Tensor:
        return shard[self.first : self.end]


class Shares:
    def __init__(
        self, flat: Flat, blueprint: Blueprint, mesh: Mesh, shard: int, sequence: bool, device: torch.device
    ) -> None:
        """`shard` is which shard of `flat` this rank has."""
        self.flat, self.mesh, self.number = flat, mesh, shard
        self.names = list(flat.spans)
        self.stretches = [part for name in self.names for part in self._stretches(blueprint, name)]
        tp, copies = mesh.tp.size, mesh.layout.copies

        def summed(part: Stretch) -> Group | None:
            row = blueprint.row(part.name)
            if row.split is None:
                return mesh.tp if sequence and not row.repeated else None
            return None if part.holders == 1 else mesh.copies if part.holders == copies else mesh.tp

        jobs: dict[str, tuple[Group, list[Stretch]]] = {}
        for part in self.stretches:
            if tp > 1 and (group := summed(part)):
                jobs.setdefault(group.name, (group, []))[1].append(part)
        tied = [part for part in self.stretches if blueprint.row(part.name).place == "both"]
        if mesh.tied.size > 1 and tied:
            jobs["tied"] = (mesh.tied, tied)
        self.jobs = list(jobs.values())
        index = {name: number for number, name in enumerate(self.names)}
        self.index = torch.tensor([index[part.name] for part in self.stretches], dtype=torch.int64, device=device)
        self.weight = torch.tensor([1 / part.holders for part in self.stretches], device=device)
        twice = {part.name for part in tied} if mesh.tied.size > 1 else set()
        self.once = torch.tensor([0.5 if name in twice else 1.0 for name in self.names], device=device)

    def sum(self, sums: Tensor) -> None:
        """Sum gradients in place over the ranks that hold the same parameters."""
        for group, parts in self.jobs:
            views = [part.of(self.flat.shard(sums, part.name, self.number)) for part in parts]
            packed = group.sum(torch.cat([view.reshape(-1) for view in views]))
            start = 0
            for view in views:
                view.copy_(packed[start : start + view.numel()].view_as(view))
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
        row, mine = blueprint.row(name), self.flat.rows(name, self.number)
        tp, rank = self.mesh.tp.size, self.mesh.tp.rank
        holders = blueprint.holders(name, tp)
        if row.split != 0 or not row.parts:  # the same for all rows
            return [Stretch(name, 0, len(mine), holders[0])] if len(mine) else []
        out, start = [], 0
        for held, count in zip(blueprint.slices(name, tp, rank), holders, strict=True):
            first, end = max(start, mine.start), min(start + held.stop - held.start, mine.stop)
            if first < end:
                out.append(Stretch(name, first - mine.start, end - mine.start, count))
            start += held.stop - held.start
        return out
