"""A plan put together: memory of every stage, messages by axis, the step, its cost, what limits it, what to try."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from trainyard.config.load import parse
from trainyard.config.schema import Config
from trainyard.core.errors import UserError
from trainyard.parallel.layout import Layout
from trainyard.plan.group_rules import config_as_run
from trainyard.plan.hardware.spec import Hardware
from trainyard.plan.memory.peak import RankMemory, estimate_memory
from trainyard.plan.time.cost import RunCost, estimate_cost
from trainyard.plan.time.step_time import (
    StepTime,
    distinct_pipeline_ranks,
    fitted_efficiency,
    predict_step,
    traffic_by_axis,
)

MEMORY_FILL_LIMIT = 0.95
"""Part of a rank's memory that is filled by what is proposed: the model of memory is not exact."""
MIN_SPEEDUP = 1.02
"""Times faster that a change must make a step to be worth a line."""
MAX_SUGGESTIONS = 3
"""Lines of what to try."""
COMPUTE_COMPONENTS = ("matmul", "attention")
BOTTLENECK_NAMES = {
    "compute": "compute (matrix products and attention)",
    "memory": "memory bandwidth (norms, activations, losses)",
    "tp": "communication of tensor-parallel ranks",
    "cp": "communication of context-parallel ranks",
    "pp": "communication between pipeline stages",
    "dp": "communication of data-parallel ranks",
    "bubble": "the bubble of the pipeline",
    "update": "the optimizer's update",
    "all": "sums over all ranks",
}


@dataclass(frozen=True)
class AxisTraffic:
    """What one axis sends in a step, on the slowest pipeline rank."""

    messages: int
    nbytes: int
    """Bytes, the larger side of each message."""
    seconds: float
    overlapped: float
    """Of these, seconds while something is computed."""


@dataclass(frozen=True)
class Plan:
    original_config: Config
    config: Config
    """What the hardware does of it."""
    layout: Layout
    hardware: Hardware
    stage_memory: list[RankMemory]
    """Of a rank of each pipeline rank."""
    traffic: dict[str, AxisTraffic]
    step_time: StepTime
    cost: RunCost

    @property
    def fits(self) -> bool:
        return max(each.total for each in self.stage_memory) <= self.hardware.memory

    @property
    def time_shares(self) -> dict[str, float]:
        """Of the step, by what NAMES has."""
        parts = dict(self.step_time.components)
        compute = sum(parts.pop(name) for name in COMPUTE_COMPONENTS)
        return {name: value / self.step_time.seconds for name, value in {"compute": compute, **parts}.items()}

    @property
    def bottleneck(self) -> str:
        """What the step would gain most from."""
        if not self.fits:
            return "memory: it does not fit"
        name, share = max(self.time_shares.items(), key=lambda item: item[1])
        return f"{BOTTLENECK_NAMES[name]}, {share:.0%} of the step"


def make_plan(original_config: Config, hardware: Hardware, price_per_hour: float | None = None) -> Plan:
    config = config_as_run(original_config, hardware)
    layout = Layout.from_config(config, hardware.ranks)
    e = fitted_efficiency(hardware)
    found = predict_step(config, layout, hardware, e)
    wires = {
        axis: AxisTraffic(count, size, ideal.at_efficiency(e), found.overlapped.get(axis, 0.0))
        for axis, (count, size, ideal) in traffic_by_axis(config, layout, found.slowest_pp, hardware).items()
    }
    memories = [estimate_memory(config, layout, pp, hardware.entry.kind) for pp in range(layout.pp)]
    return Plan(
        original_config,
        config,
        layout,
        hardware,
        memories,
        wires,
        found,
        estimate_cost(config, hardware, found.seconds, price_per_hour),
    )


def with_overrides(config: Config, overrides: list[str]) -> Config:
    return parse(config.model_dump(mode="json"), overrides)


def max_rank_memory(config: Config, layout: Layout, device_kind: str) -> int:
    """Bytes of the rank that holds most. Ranks that have the same to do hold most where the first of them stands."""
    return max(estimate_memory(config, layout, pp, device_kind).total for pp in distinct_pipeline_ranks(layout))


@dataclass(frozen=True)
class ConfigChange:
    overrides: str
    speedup: float
    """Times as fast as the file."""
    memory: int


def suggest_changes(plan: Plan) -> list[ConfigChange]:
    """Single changes that fit and make the step faster or, where the file does not fit, that make it fit."""
    out = []
    for words, config, layout in single_key_variants(plan.config, plan.hardware.ranks):
        gain = (
            plan.step_time.seconds
            / predict_step(config, layout, plan.hardware, fitted_efficiency(plan.hardware)).seconds
        )
        if plan.fits and gain < MIN_SPEEDUP:
            continue
        size = max_rank_memory(config, layout, plan.hardware.entry.kind)
        if size <= MEMORY_FILL_LIMIT * plan.hardware.memory:
            out.append(ConfigChange(words, gain, size))
    return sorted(out, key=lambda change: -change.speedup)[:MAX_SUGGESTIONS]


def single_key_variants(config: Config, ranks: int) -> Iterator[tuple[str, Config, Layout]]:
    """What single changes make of it, as far as they are possible."""
    for words in _candidate_overrides(config):
        try:
            other = with_overrides(config, words)
            layout = Layout.from_config(other, ranks)
        except UserError:
            continue
        yield " ".join(words), other, layout


def _candidate_overrides(config: Config) -> list[list[str]]:
    """Other values of the keys that change speed or memory but not what is learned."""
    layout, train, recompute = config.layout, config.train, config.recompute
    out = [[f"train.micro_batch={train.micro_batch * 2}"]]
    if train.micro_batch % 2 == 0:
        out.append([f"train.micro_batch={train.micro_batch // 2}"])
    for kind in ("none", "attention", "full"):
        if kind != recompute.kind:
            out.append([f"recompute.kind={kind}", *(["recompute.modules=[]"] if recompute.modules else [])])
    out += [[f"layout.zero={zero}"] for zero in (1, 3) if zero != layout.zero]
    if layout.tp > 1 and not layout.sequence_parallel:
        out.append(["layout.sequence_parallel=true"])
    if layout.pp > 1 and not layout.pipeline_cuts and layout.pipeline_schedule == "1f1b":
        out.append([f"layout.vpp={layout.vpp * 2}"])
    if config.precision.kind != "fp32" and config.precision.grad_reduce_dtype == "fp32":
        out.append(["precision.reduce_dtype=bf16"])
    halves = {"tp": layout.tp, "pp": layout.pp}
    cuts = ["layout.pipeline_cuts=[]"] if layout.pipeline_cuts else []
    for name, value in halves.items():
        out += [[f"layout.{name}={other}", *cuts] for other in (value // 2, value * 2) if other and value > 1]
    return out


def plan_as_json(plan: Plan) -> dict[str, Any]:
    """Everything, as plain data."""
    entry = plan.hardware.entry
    return {
        "hardware": {
            "name": plan.hardware.name,
            "count": plan.hardware.count,
            "lnc": plan.hardware.lnc,
            "ranks": plan.hardware.ranks,
            "memory_bytes": plan.hardware.memory,
            "flops": {kind: plan.hardware.peak_flops(kind) for kind in ("bf16", "fp8", "fp32")},
            "sources": entry.sources,
        },
        "layout": {name: getattr(plan.layout, name) for name in ("tp", "pp", "cp", "dp", "vpp", "micro_batches")},
        "efficiency": fitted_efficiency(plan.hardware)._asdict(),
        "memory": [{**vars(each), "total": each.total} for each in plan.stage_memory],
        "fits": plan.fits,
        "messages": {axis: vars(wire) for axis, wire in plan.traffic.items()},
        "step": {"seconds": plan.step_time.seconds, "slowest": plan.step_time.slowest_pp, **plan.step_time.components},
        "cost": vars(plan.cost),
        "limit": plan.bottleneck,
    }
