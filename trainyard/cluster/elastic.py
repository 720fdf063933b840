"""Layouts for every number of nodes that an elastic job may get.

A run has the same losses at any layout, so that a job which lost a node continues on fewer ones with the same global
batch and the same samples. A number of nodes for which the file's own layout is possible and fits keeps it; any other
one takes the fastest layout that `trainyard plan --search` finds, or trains on fewer nodes than it has.
"""

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any, Self

from trainyard.config.schema import Config
from trainyard.core.errors import UserError
from trainyard.core.quantities import counted
from trainyard.core.yaml_io import format_value
from trainyard.parallel.layout import Layout
from trainyard.preflight.plan.hardware.catalog import CatalogEntry
from trainyard.preflight.plan.hardware.microbenchmark import measure_cpu
from trainyard.preflight.plan.hardware.spec import needed_hardware, parse_hardware
from trainyard.preflight.plan.search import OVERRIDE_KEYS, LayoutSearch, RankedLayout, override_values


@dataclass(frozen=True)
class NodeLayout:
    """How a run trains on a number of nodes."""

    nodes: int
    """Nodes that it uses; the job may have more."""
    overrides: list[str]
    """Overrides of the configuration, complete: they do not depend on the layout of an earlier attempt."""
    layout: str
    """The layout in words."""
    origin: str
    """file, or search."""

    @classmethod
    def from_values(cls, values: Iterable[Any], nodes: int, layout: Layout, origin: str) -> Self:
        """`values` are those of OVERRIDE_KEYS."""
        overrides = [f"{key}={format_value(value)}" for key, value in zip(OVERRIDE_KEYS, values, strict=True)]
        return cls(nodes, [*overrides, f"layout.ranks={layout.world_size}"], layout.describe(), origin)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def layouts_by_nodes(
    config: Config,
    low: int,
    high: int,
    nproc: int,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict[int, NodeLayout]:
    """The layout for every number of nodes from `low` to `high`. Raises UserError if there is none for `low`.

    `on_progress` is called with the number of sizes done and their total.
    """
    out: dict[int, NodeLayout] = {}
    measured: list[CatalogEntry] = []  # the CPU of this machine, once

    def measure(ranks: int) -> CatalogEntry:
        measured[:] = measured or [measure_cpu(max(2, nproc))]
        per_rank = measured[0].network_bandwidth
        memory = measured[0].memory * ranks // nproc
        return replace(measured[0], memory=memory, link_bandwidth=per_rank * ranks, ranks_per_device={1: ranks})

    for nodes in range(low, high + 1):
        on_progress(nodes - low, high - low + 1)
        section = config.layout.model_copy(update={"ranks": nodes * nproc})
        # What the file says about its hardware; this machine's CPU otherwise.
        hardware = parse_hardware(needed_hardware(config.hardware, section, config.device.lnc), measure=measure)
        if hardware.ranks != nodes * nproc:
            raise UserError(
                f"--nproc {nproc}: a node of {config.hardware} has {counted(hardware.ranks_per_node, 'rank')}; the "
                "layouts of an elastic job need all of them"
            )
        found = _find_layout(LayoutSearch(config.model_copy(update={"layout": section}), hardware), nodes)
        if found is None and nodes == low:
            raise UserError(
                f"--nodes {low}-{high}: no layout trains this model on {counted(low, 'node')} of "
                f"{counted(nproc, 'rank')}; nearest: trainyard plan --search"
            )
        out[nodes] = found or out[nodes - 1]
    return out


def _find_layout(search: LayoutSearch, nodes: int) -> NodeLayout | None:
    """The layout for exactly this number of nodes; None if there is none."""
    ranking = search.best(1)
    own = ranking.file_layout
    if own and own.memory <= search.hardware.memory:
        return NodeLayout.from_values(override_values(search.config), nodes, own.layout, "file")
    best: RankedLayout | None = next((layout for layout in ranking.layouts if not layout.is_file), None)
    return NodeLayout.from_values(best.values, nodes, best.layout, "search") if best else None
