"""Process groups as one rank sees them, with the collectives that we use. On a single rank each is the identity.

`start_*` methods return a tensor that `wait` makes readable, so that the caller decides what overlaps.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Self

import torch
import torch.distributed as dist
from torch import Tensor

from trainyard import compat
from trainyard.devices.base import DeviceCollectives

wait = compat.wait


@dataclass(frozen=True)
class Group:
    """A group of ranks; by default this rank alone."""

    ranks: tuple[int, ...] = (0,)
    """Global ranks, in the order of the group."""
    rank: int = 0
    """Index of this rank in the group."""
    name: str = ""
    handle: dist.ProcessGroup | None = None
    device_collectives: DeviceCollectives | None = None
    """The device's own collectives, if torch's functional collectives do not work on it."""

    @property
    def size(self) -> int:
        return len(self.ranks)

    def all_reduce_sum(self, x: Tensor) -> Tensor:
        return x if self.size == 1 else wait(self._all_reduce(x, "sum"))

    def all_reduce_max(self, x: Tensor) -> Tensor:
        return x if self.size == 1 else wait(self._all_reduce(x, "max"))

    def start_all_reduce_(self, x: Tensor) -> Tensor:
        """Sum in place, on a contiguous tensor."""
        if self.device_collectives:
            return x.copy_(self.device_collectives.all_reduce(x, "sum"))
        return compat.all_reduce_(x, self.name)

    def start_all_gather(self, x: Tensor) -> Tensor:
        """[n] of each rank to [size * n], in the order of the group."""
        if self.device_collectives:
            return self.device_collectives.all_gather(x)
        return compat.all_gather(x, self.size, self.name)

    def start_reduce_scatter(self, x: Tensor) -> Tensor:
        """[size * n] of each rank to this rank's [n] of their sum."""
        if self.device_collectives:
            return self.device_collectives.reduce_scatter(x)
        return compat.reduce_scatter(x, self.size, self.name)

    def all_to_all(self, x: Tensor) -> Tensor:
        """[size * n, ...] of each rank, with n rows for every rank, to the rows that the ranks have for this one."""
        if self.size == 1:
            return x
        if self.device_collectives:
            return self.device_collectives.all_to_all(x)
        rows = [len(x) // self.size] * self.size
        return wait(compat.all_to_all(x, rows, rows, self.name))

    def rotate(self, tensors: list[Tensor]) -> Callable[[], list[Tensor]]:
        """Start sending tensors of one dtype to the next rank. The result waits for those of the previous rank."""
        flat, shapes = torch.cat([x.flatten() for x in tensors]), [x.shape for x in tensors]
        successor, predecessor = (self.rank + 1) % self.size, (self.rank - 1) % self.size
        pending = compat.sendrecv(flat, successor, predecessor, self.size, self.name)

        def receive() -> list[Tensor]:
            parts = wait(pending).split_with_sizes([shape.numel() for shape in shapes])
            return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]

        return receive

    def _all_reduce(self, x: Tensor, op: str) -> Tensor:
        if self.device_collectives:
            return self.device_collectives.all_reduce(x, op)
        return compat.all_reduce(x, self.name, op)

    def all_gather(self, x: Tensor, dim: int = 0) -> Tensor:
        """The x of all ranks, concatenated along `dim`."""
        return x if self.size == 1 else self.finish_all_gather(self.start_all_gather(x), x, dim)

    def finish_all_gather(self, pending: Tensor, x: Tensor, dim: int) -> Tensor:
        """Wait for the result of `start_all_gather(x)` and concatenate it along `dim`."""
        parts = wait(pending).view(self.size, *x.shape)
        return parts.movedim(0, dim).flatten(dim, dim + 1)  # a view if all dims before `dim` are 1

    def reduce_scatter(self, x: Tensor, dim: int = 0) -> Tensor:
        """This rank's part along `dim` of the sum of all ranks' x."""
        return x if self.size == 1 else self.finish_reduce_scatter(self.start_reduce_scatter_dim(x, dim), x, dim)

    def start_reduce_scatter_dim(self, x: Tensor, dim: int) -> Tensor:
        parts = x.reshape(*x.shape[:dim], self.size, x.shape[dim] // self.size, *x.shape[dim + 1 :]).movedim(dim, 0)
        return self.start_reduce_scatter(parts.flatten(0, 1))

    def finish_reduce_scatter(self, pending: Tensor, x: Tensor, dim: int) -> Tensor:
        """Wait for the result of `start_reduce_scatter_dim(x, dim)`."""
        return wait(pending).view(*x.shape[:dim], x.shape[dim] // self.size, *x.shape[dim + 1 :])


@dataclass(frozen=True)
class NestedGroup(Group):
    """All-reduce over a small group emulated inside a larger one, for devices that cannot create the small group.

    Every rank of the parent group contributes a table with one row per small group, zero except for its own row. This
    multiplies the bytes by the number of small groups, so use it only for sums that happen once per step (kv heads
    that several ranks hold).
    """

    parent: Group = field(default_factory=Group)
    subgroup_index: Tensor = field(default_factory=lambda: torch.zeros(1, dtype=torch.int32))
    """This rank's row; a tensor, so that the graph does not depend on the rank."""

    @classmethod
    def contiguous(cls, parent: Group, subgroup_size: int, device: torch.device) -> Self:
        """This rank's group if the parent is cut into groups of `subgroup_size` adjacent ranks."""
        index, rank = divmod(parent.rank, subgroup_size)
        ranks = parent.ranks[index * subgroup_size : (index + 1) * subgroup_size]
        subgroup_index = torch.tensor([index], dtype=torch.int32, device=device)
        return cls(ranks, rank, f"{parent.name}/{subgroup_size}", parent=parent, subgroup_index=subgroup_index)

    def all_reduce_sum(self, x: Tensor) -> Tensor:
        rows = torch.arange(self.parent.size // self.size, dtype=torch.int32, device=x.device)
        table = torch.where((rows == self.subgroup_index)[:, None], x.reshape(1, -1), 0.0)
        return self.parent.all_reduce_sum(table).index_select(0, self.subgroup_index).view_as(x)
