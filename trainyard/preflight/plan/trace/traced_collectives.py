"""Collectives of a group that does not exist: they return shapes and report what they would send."""

from collections.abc import Callable

from torch import Tensor

from trainyard.parallel.process_group import Group

OnMessage = Callable[[str, int, str, Tensor], None]
"""(group, group size, kind, the larger of input and output)."""


class TracedCollectives:
    """Allocates what the collectives of a device allocate. With `by_all_reduce`, gathers and scatters are emulated."""

    def __init__(self, group: str, size: int, by_all_reduce: bool, on_message: OnMessage) -> None:
        self.group, self.size, self.by_all_reduce, self.on_message = group, size, by_all_reduce, on_message

    def all_reduce(self, x: Tensor, op: str) -> Tensor:
        self.on_message(self.group, self.size, "all_reduce", x)
        return x.contiguous().new_empty(x.shape)

    def all_gather(self, x: Tensor) -> Tensor:
        out = x.new_empty(self.size * x.shape[0], *x.shape[1:])
        self.on_message(self.group, self.size, "all_gather", out)
        return out

    def reduce_scatter(self, x: Tensor) -> Tensor:
        self.on_message(self.group, self.size, "reduce_scatter", x)
        x = x.contiguous()
        total = x.new_empty(x.shape) if self.by_all_reduce else None
        out = x.new_empty(x.shape[0] // self.size, *x.shape[1:])
        del total
        return out

    def all_to_all(self, x: Tensor) -> Tensor:
        self.on_message(self.group, self.size, "all_to_all", x)
        return x.contiguous().new_empty(x.shape)


def traced_group(name: str, size: int, by_all_reduce: bool, on_message: OnMessage) -> Group:
    """The first of `size` ranks."""
    collectives = TracedCollectives(name, size, by_all_reduce, on_message)
    return Group(tuple(range(size)), 0, name, None, collectives)
