"""Collectives through torch_xla.

torch's functional collectives lose their group on the way to torch_xla and would run over all ranks. These call
torch_xla directly with all groups of a kind at once, so the traced graph is the same on every rank. Layouts are never
pinned: torch_xla gathers pinned tensors as a sum of padded ones, which puts the rank into the graph.
"""

from dataclasses import dataclass
from importlib import import_module
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class XlaCollectives:
    groups: list[list[int]]
    """All groups of one kind, of equal size; every rank is in exactly one."""

    def all_reduce(self, x: Tensor, op: str) -> Tensor:
        return _xla_model().all_reduce(op, x, groups=self.groups, pin_layout=False)

    def all_gather(self, x: Tensor) -> Tensor:
        return _xla_model().all_gather(x, 0, groups=self.groups, pin_layout=False)

    def reduce_scatter(self, x: Tensor) -> Tensor:
        size = len(self.groups[0])
        return _xla_model().reduce_scatter("sum", x, 1.0, 0, size, groups=self.groups, pin_layout=False)

    def all_to_all(self, x: Tensor) -> Tensor:
        return _xla_model().all_to_all(x, 0, 0, len(self.groups[0]), groups=self.groups, pin_layout=False)


def _xla_model() -> Any:
    return import_module("torch_xla.core.xla_model")
