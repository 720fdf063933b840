"""A group of ranks as this rank sees it, with the few things that groups do together. Alone, all is the identity.

What starts a collective gives a tensor that `wait` makes readable, so that the caller decides what overlaps.
"""

from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor

from trainyard import compat
from trainyard.devices.base import Collectives

wait = compat.wait


@dataclass(frozen=True)
class Group:
    ranks: tuple[int, ...] = (0,)
    """Global ranks, in the group's order."""
    rank: int = 0
    """This rank's place among them."""
    name: str = ""
    handle: dist.ProcessGroup | None = None
    own: Collectives | None = None
    """The device's own, where torch's functional ones do not do."""

    @property
    def size(self) -> int:
        return len(self.ranks)

    def sum(self, x: Tensor) -> Tensor:
        return x if self.size == 1 else wait(self._all_reduce(x, "sum"))

    def max(self, x: Tensor) -> Tensor:
        return x if self.size == 1 else wait(self._all_reduce(x, "max"))

    def start_sum_(self, x: Tensor) -> Tensor:
        """In place, on a contiguous tensor."""
        return x.copy_(self.own.all_reduce(x, "sum")) if self.own else compat.all_reduce_(x, self.name)

    def start_gather(self, x: Tensor) -> Tensor:
        """[n] of each rank to [size * n], in the group's order."""
        return self.own.all_gather(x) if self.own else compat.all_gather(x, self.size, self.name)

    def start_reduce_scatter(self, x: Tensor) -> Tensor:
        """[size * n] of each rank to this rank's [n] of their sum."""
        return self.own.reduce_scatter(x) if self.own else compat.reduce_scatter(x, self.size, self.name)

    def _all_reduce(self, x: Tensor, op: str) -> Tensor:
        return self.own.all_reduce(x, op) if self.own else compat.all_reduce(x, self.name, op)

    def gather(self, x: Tensor, dim: int = 0) -> Tensor:
        """Every rank's x, one after the other along `dim`."""
        return x if self.size == 1 else self.gathered(self.start_gather(x), x, dim)

    def gathered(self, under_way: Tensor, x: Tensor, dim: int) -> Tensor:
        """Wait for what `start_gather(x)` gave, and put it in order along `dim`."""
        parts = wait(under_way).view(self.size, *x.shape)
        return parts.movedim(0, dim).flatten(dim, dim + 1)  # a view where all dims before `dim` are 1

    def reduce_scatter(self, x: Tensor, dim: int = 0) -> Tensor:
        """This rank's part along `dim` of the sum of every rank's x."""
        return x if self.size == 1 else self.scattered(self.start_scatter(x, dim), x, dim)

    def start_scatter(self, x: Tensor, dim: int) -> Tensor:
        parts = x.reshape(*x.shape[:dim], self.size, x.shape[dim] // self.size, *x.shape[dim + 1 :]).movedim(dim, 0)
        return self.start_reduce_scatter(parts.flatten(0, 1))

    def scattered(self, under_way: Tensor, x: Tensor, dim: int) -> Tensor:
        """Wait for what `start_scatter(x, dim)` gave."""
        return wait(under_way).view(*x.shape[:dim], x.shape[dim] // self.size, *x.shape[dim + 1 :])
