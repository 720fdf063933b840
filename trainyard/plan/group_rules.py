"""Which groups of ranks a layout makes on Trainium, and which of them its runtime cannot serve."""

from typing import NamedTuple

from trainyard.config.schema import Config
from trainyard.core.errors import UserError
from trainyard.devices.neuron.topology import group_problem, rank_order
from trainyard.parallel.layout import Dimension, Layout
from trainyard.plan.hardware.spec import Hardware

GROUPS: dict[str, tuple[tuple[Dimension, ...], tuple[str, ...]]] = {
    "layout.tp": (("tp",), ("all_gather", "reduce_scatter", "all_reduce")),
    "layout.cp": (("cp",), ("all_gather", "reduce_scatter")),
    "data parallel": (("dp", "cp"), ("reduce_scatter", "all_gather", "all_reduce")),
    "layout.pp": (("pp",), ("send",)),
    "all ranks": (("pp", "dp", "cp", "tp"), ("all_reduce",)),
}
"""What a group is called here, the dimensions in which its ranks differ, and what they do together."""


class GroupProblem(NamedTuple):
    line: str
    refused: bool
    """A run ends at once; the others are what users report."""


def as_run(config: Config, on: Hardware) -> Config:
    """With what Trainium does instead of a ring, whose graph would know its rank."""
    if on.entry.kind != "trainium" or config.layout.cp == 1 or config.layout.context != "ring":
        return config
    return config.model_copy(update={"layout": config.layout.model_copy(update={"context": "all_gather"})})


def group_problems(layout: Layout, on: Hardware) -> list[GroupProblem]:
    """One for each kind of group that will not work."""
    if on.entry.kind != "trainium":
        return []
    try:
        order = rank_order(on.entry.generation, on.lnc, layout.tp, layout.world)
    except UserError as error:
        return [GroupProblem(str(error), True)]
    out = []
    for name, (dimensions, kinds) in GROUPS.items():
        sizes = [getattr(layout, dimension) for dimension in dimensions]
        first = layout.groups(*dimensions)[0]
        ranks = [order[place] for place in first]
        for kind in kinds if len(first) > 1 else ():
            if wrong := group_problem(on.entry.generation, on.lnc, kind, ranks):
                size = f"={sizes[0]}" if name.startswith("layout.") else f" of {len(first)}"
                out.append(GroupProblem(f"{name}{size}: {wrong}, users of {on.entry.generation} report", False))
                break
    return out
