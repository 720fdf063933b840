"""Ranks that sum among themselves although the device takes no group of just them: within a larger group that it takes.

Every rank of the larger group adds a table with a row for each of the smaller ones, zeros but for its own. That is as
many times the bytes as there are rows: for what is summed once a step (kv heads that several ranks hold), not more.
"""

from dataclasses import dataclass, field
from typing import Self

import torch
from torch import Tensor

from trainyard.parallel.process_group import Group


@dataclass(frozen=True)
class NestedGroup(Group):
    parent: Group = field(default_factory=Group)
    subgroup_index: Tensor = field(default_factory=lambda: torch.zeros(1, dtype=torch.int32))
    """Which row is this rank's; a tensor, so that the graph does not depend on the rank."""

    @classmethod
    def contiguous(cls, parent: Group, subgroup_size: int, device: torch.device) -> Self:
        """This rank and its `count` - 1 neighbours in the larger group, which is cut into such."""
        row, place = divmod(parent.rank, subgroup_size)
        ranks = parent.ranks[row * subgroup_size : (row + 1) * subgroup_size]
        number = torch.tensor([row], dtype=torch.int32, device=device)
        return cls(ranks, place, f"{parent.name}/{subgroup_size}", parent=parent, subgroup_index=number)

    def all_reduce_sum(self, x: Tensor) -> Tensor:
        rows = torch.arange(self.parent.size // self.size, dtype=torch.int32, device=x.device)
        table = torch.where((rows == self.subgroup_index)[:, None], x.reshape(1, -1), 0.0)
        return self.parent.all_reduce_sum(table).index_select(0, self.subgroup_index).view_as(x)
