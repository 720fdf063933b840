"""A group of ranks as this rank sees it, with the few things that groups do together. Alone, all is the identity.

What starts a collective gives a tensor that `wait` makes readable, so that the caller decides what overlaps.
"""

from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor

from trainyard import compat
from trainyard.devices.base import DeviceCollectives

wait = compat.wait


@dataclass(frozen=True)
class Group:
    ranks: tuple[int, ...] = (0,)
    """Global ranks, in the group's order."""
    rank: int = 0
    """This rank's place among them."""
    name: str = ""
    handle: dist.ProcessGroup | None = None
    device_collectives: DeviceCollectives | None = None
    """The device's own, where torch's functional ones do not do."""

    @property
    def size(self) -> int:
        return len(self.ranks)

    def all_reduce_sum(self, x: Tensor) -> Tensor:
        return x if self.size == 1 else wait(self._all_reduce(x, "sum"))

    def all_reduce_max(self, x: Tensor) -> Tensor:
        return x if self.size == 1 else wait(self._all_reduce(x, "max"))

    def start_all_reduce_(self, x: Tensor) -> Tensor:
        """In place, on a contiguous tensor."""
        return (
            x.copy_(self.device_collectives.all_reduce(x, "sum"))
            if self.device_collectives
            else compat.all_reduce_(x, self.name)
        )

    def start_all_gather(self, x: Tensor) -> Tensor:
        """[n] of each rank to [size * n], in the group's order."""
        return (
            self.device_collectives.all_gather(x)
            if self.device_collectives
            else compat.all_gather(x, self.size, self.name)
        )

    def start_reduce_scatter(self, x: Tensor) -> Tensor:
        """[size * n] of each rank to this rank's [n] of their sum."""
        return (
            self.device_collectives.reduce_scatter(x)
            if self.device_collectives
            else compat.reduce_scatter(x, self.size, self.name)
        )

    def _all_reduce(self, x: Tensor, op: str) -> Tensor:
        return (
            self.device_collectives.all_reduce(x, op)
            if self.device_collectives
            else compat.all_reduce(x, self.name, op)
        )

    def all_gather(self, x: Tensor, dim: int = 0) -> Tensor:
        """Every rank's x, one after the other along `dim`."""
        return x if self.size == 1 else self.finish_all_gather(self.start_all_gather(x), x, dim)

    def finish_all_gather(self, pending: Tensor, x: Tensor, dim: int) -> Tensor:
        """Wait for what `start_gather(x)` gave, and put it in order along `dim`."""
        parts = wait(pending).view(self.size, *x.shape)
        return parts.movedim(0, dim).flatten(dim, dim + 1)  # a view where all dims before `dim` are 1

    def reduce_scatter(self, x: Tensor, dim: int = 0) -> Tensor:
        """This rank's part along `dim` of the sum of every rank's x."""
        return x if self.size == 1 else self.finish_reduce_scatter(self.start_reduce_scatter_dim(x, dim), x, dim)

    def start_reduce_scatter_dim(self, x: Tensor, dim: int) -> Tensor:
        parts = x.reshape(*x.shape[:dim], self.size, x.shape[dim] // self.size, *x.shape[dim + 1 :]).movedim(dim, 0)
        return self.start_reduce_scatter(parts.flatten(0, 1))

    def finish_reduce_scatter(self, pending: Tensor, x: Tensor, dim: int) -> Tensor:
        """Wait for what `start_scatter(x, dim)` gave."""
        return wait(pending).view(*x.shape[:dim], x.shape[dim] // self.size, *x.shape[dim + 1 :])
