"""How ranks of a group work together through torch_xla.

torch's functional collectives reach it without their group: they would go over all ranks. So these go through its own,
which are told every group of the kind at once; the graph that they are traced into is then the same on every rank.
Layouts are never pinned: torch_xla gathers pinned tensors by a sum of padded ones, with the rank in the graph.
"""

from dataclasses import dataclass
from importlib import import_module
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class XlaCollectives:
    groups: list[list[int]]
    """All groups of one kind, of one size; every rank is in one of them."""

    def all_reduce(self, x: Tensor, op: str) -> Tensor:
        out: Tensor = _xla_model().all_reduce(op, x, groups=self.groups, pin_layout=False)
        return out

    def all_gather(self, x: Tensor) -> Tensor:
        out: Tensor = _xla_model().all_gather(x, 0, groups=self.groups, pin_layout=False)
        return out

    def reduce_scatter(self, x: Tensor) -> Tensor:
        size = len(self.groups[0])
        out: Tensor = _xla_model().reduce_scatter("sum", x, 1.0, 0, size, groups=self.groups, pin_layout=False)
        return out


def _xla_model() -> Any:
    return import_module("torch_xla.core.xla_model")
