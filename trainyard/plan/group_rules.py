"""Which groups of ranks a layout makes on Trainium, and which of them its runtime cannot serve."""

from typing import NamedTuple

from trainyard.config.schema import Config
from trainyard.core.errors import UserError
from trainyard.devices.neuron.topology import group_problem, rank_order
from trainyard.parallel.layout import AxisName, Layout
from trainyard.plan.hardware.spec import Hardware

COMMUNICATION_GROUPS: dict[str, tuple[tuple[AxisName, ...], tuple[str, ...]]] = {
    "layout.tp": (("tp",), ("all_gather", "reduce_scatter", "all_reduce")),
    "layout.cp": (("cp",), ("all_gather", "reduce_scatter")),
    "data parallel": (("dp", "cp"), ("reduce_scatter", "all_gather", "all_reduce")),
    "layout.pp": (("pp",), ("send",)),
    "all ranks": (("pp", "dp", "cp", "tp"), ("all_reduce",)),
}
"""What a group is called here, the dimensions in which its ranks differ, and what they do together."""


class GroupProblem(NamedTuple):
    message: str
    fatal: bool
    """A run ends at once; the others are what users report."""


def config_as_run(config: Config, hardware: Hardware) -> Config:
    """With what Trainium does instead of a ring, whose graph would know its rank."""
    if hardware.entry.kind != "trainium" or config.layout.cp == 1 or config.layout.cp_method != "ring":
        return config
    return config.model_copy(update={"layout": config.layout.model_copy(update={"cp_method": "all_gather"})})


def group_problems(layout: Layout, hardware: Hardware) -> list[GroupProblem]:
    """One for each kind of group that will not work."""
    if hardware.entry.kind != "trainium":
        return []
    try:
        order = rank_order(hardware.entry.generation, hardware.lnc, layout.tp, layout.world_size)
    except UserError as error:
        return [GroupProblem(str(error), True)]
    out = []
    for name, (dimensions, kinds) in COMMUNICATION_GROUPS.items():
        sizes = [getattr(layout, dimension) for dimension in dimensions]
        first = layout.groups(*dimensions)[0]
        ranks = [order[place] for place in first]
        for kind in kinds if len(first) > 1 else ():
            if wrong := group_problem(hardware.entry.generation, hardware.lnc, kind, ranks):
                size = f"={sizes[0]}" if name.startswith("layout.") else f" of {len(first)}"
                out.append(GroupProblem(f"{name}{size}: {wrong}, users of {hardware.entry.generation} report", False))
                break
    return out
