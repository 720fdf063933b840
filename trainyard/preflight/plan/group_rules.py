"""The process groups of a layout on Trainium, and those that its runtime does not support."""

from dataclasses import dataclass

from trainyard.config.layout_schema import LayoutSection
from trainyard.core.errors import UserError
from trainyard.devices.neuron.topology import group_problem, rank_order
from trainyard.parallel.layout import AxisName, Layout
from trainyard.preflight.plan.hardware.spec import Hardware

COMMUNICATION_GROUPS: dict[str, tuple[tuple[AxisName, ...], tuple[str, ...]]] = {
    "layout.tp": (("tp",), ("all_gather", "reduce_scatter", "all_reduce")),
    "layout.cp": (("cp",), ("all_gather", "reduce_scatter")),
    "data parallel": (("dp", "cp"), ("reduce_scatter", "all_gather", "all_reduce")),
    "layout.pp": (("pp",), ("send",)),
    "all ranks": (("pp", "dp", "cp", "tp"), ("all_reduce",)),
}
"""Name of a group in messages to the user: its axes, and its collectives."""


@dataclass(frozen=True)
class PlanProblem:
    """A problem of a run, in one line."""

    message: str
    fatal: bool
    """The run would not start, or fail before its end."""


def layout_as_run(layout: LayoutSection, hardware: Hardware) -> LayoutSection:
    """The layout as the hardware runs it: Trainium gathers keys and values instead of passing them around a ring, whose
    graph would depend on the rank."""
    if not hardware.entry.kind.decomposes_attention or layout.cp == 1 or layout.cp_method != "ring":
        return layout
    return layout.model_copy(update={"cp_method": "all_gather"})


def group_problems(layout: Layout, hardware: Hardware) -> list[PlanProblem]:
    """One problem for each unsupported kind of group; fatal if the runtime refuses it, not if users report it."""
    generation = hardware.entry.generation
    if not generation:
        return []
    try:
        order = rank_order(generation, hardware.lnc, layout.tp, layout.world_size)
    except UserError as error:
        return [PlanProblem(str(error), True)]
    problems = []
    for name, (axes, collectives) in COMMUNICATION_GROUPS.items():
        ranks = [order[position] for position in layout.first_group(*axes)]
        for collective in collectives if len(ranks) > 1 else ():
            if problem := group_problem(generation, hardware.lnc, collective, ranks):
                size = f"={getattr(layout, axes[0])}" if name.startswith("layout.") else f" of {len(ranks)}"
                problems.append(PlanProblem(f"{name}{size}: {problem}, users of {generation} report", False))
                break
    return problems
