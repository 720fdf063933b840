"""A plan: memory of each pipeline rank, traffic by axis, step time, cost, bottleneck, suggestions."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import inf
from typing import Any

from trainyard.config.layout_schema import LayoutSection
from trainyard.config.load import parse
from trainyard.config.schema import Config, PrecisionSection, RecomputeSection
from trainyard.core.errors import UserError
from trainyard.devices.kind import DeviceKind
from trainyard.families.flops import flops_per_sample
from trainyard.models import blueprint_of
from trainyard.parallel.layout import Layout
from trainyard.preflight.plan.group_rules import layout_as_run
from trainyard.preflight.plan.hardware.spec import Hardware
from trainyard.preflight.plan.memory.pass_memory import RankMemory
from trainyard.preflight.plan.memory.peak import estimate_memory
from trainyard.preflight.plan.planned_run import PlannedRun
from trainyard.preflight.plan.time.step_time import (
    StepTime,
    distinct_pipeline_ranks,
    predict_step,
    traffic_by_axis,
)

HOUR_S = 3600.0
MEMORY_FILL_LIMIT = 0.95
"""Share of a rank's memory that a suggestion may fill: estimates are not exact."""
MIN_SPEEDUP = 1.02
"""Least speedup that makes a change worth suggesting."""
MAX_SUGGESTIONS = 3
COMPUTE_COMPONENTS = ("matmul", "attention")
BOTTLENECK_NAMES = {
    "compute": "compute (matrix multiplications and attention)",
    "memory": "memory bandwidth (norms, activations, losses)",
    "tp": "tensor-parallel communication",
    "cp": "context-parallel communication",
    "ep": "expert-parallel communication",
    "pp": "communication between pipeline stages",
    "dp": "data-parallel communication",
    "bubble": "the pipeline bubble",
    "update": "the optimizer's update",
    "all": "all-reduces over all ranks",
}


@dataclass(frozen=True)
class RunCost:
    """Speed, duration and price of a run, from the time of a step."""

    sequences_per_second: float
    tokens_per_second: float
    mfu_full: float
    """Model FLOP utilization with every query-key pair counted, of the dense peak (of bf16 for fp8 too)."""
    mfu_causal: float
    """The same with only the pairs that a causal mask keeps."""
    days: float
    """Days until train.steps."""
    dollars: float | None
    price_per_hour: float | None
    """Dollars an hour for one instance; None if unknown."""


def estimate_cost(run: PlannedRun, hardware: Hardware, seconds: float, price_per_hour: float | None) -> RunCost:
    """The cost of a run whose steps take `seconds`. `price_per_hour` overrides the price in the catalog."""
    train, data = run.train, run.data
    speed = train.global_batch / seconds
    flops = flops_per_sample(run.model, blueprint_of(run.model), data.seq_len, data.max_predictions)
    peak = hardware.peak_flops(run.precision.compute_dtype) * hardware.ranks
    hours = seconds * train.steps / HOUR_S
    price = hardware.entry.price_per_hour if price_per_hour is None else price_per_hour
    return RunCost(
        sequences_per_second=speed,
        tokens_per_second=speed * data.seq_len,
        mfu_full=speed * flops.full_attention / peak,
        mfu_causal=speed * flops.causal_attention / peak,
        days=hours / 24,
        dollars=None if price is None else hours * price * hardware.instances,
        price_per_hour=price,
    )


@dataclass(frozen=True)
class AxisTraffic:
    """Messages of one axis in a step, on the slowest pipeline rank."""

    messages: int
    nbytes: int
    """Bytes of all messages, each by its input or output, whichever is larger."""
    seconds: float
    overlapped: float
    """The part of `seconds` that overlaps with computation."""


@dataclass(frozen=True)
class Plan:
    config: Config
    """The configuration as the hardware runs it."""
    replaces_ring: bool
    """The file passes keys and values around a ring, which the hardware does not."""
    layout: Layout
    hardware: Hardware
    memory_by_pp: list[RankMemory]
    """Memory of a rank at each pipeline position."""
    traffic: dict[str, AxisTraffic]
    step_time: StepTime
    cost: RunCost

    @property
    def fits(self) -> bool:
        return max(memory.total for memory in self.memory_by_pp) <= self.hardware.memory

    @property
    def time_shares(self) -> dict[str, float]:
        """Share of the step by key of BOTTLENECK_NAMES."""
        components = dict(self.step_time.components)
        compute = sum(components.pop(name) for name in COMPUTE_COMPONENTS)
        return {name: value / self.step_time.seconds for name, value in {"compute": compute, **components}.items()}

    @property
    def bottleneck(self) -> str:
        if not self.fits:
            return "memory: the run does not fit"
        name, share = max(self.time_shares.items(), key=lambda item: item[1])
        return f"{BOTTLENECK_NAMES[name]}, {share:.0%} of the step"


def make_plan(config: Config, hardware: Hardware, price_per_hour: float | None = None) -> Plan:
    section = layout_as_run(config.layout, hardware)
    replaces_ring = section.cp_method != config.layout.cp_method
    config = config.model_copy(update={"layout": section})
    layout, efficiency = Layout.from_config(config, hardware.ranks), hardware.entry.kind.efficiency
    run = PlannedRun(config, layout, hardware.entry.kind)
    step_time = predict_step(run, hardware, efficiency)
    traffic = {
        axis: AxisTraffic(count, size, ideal.at_efficiency(efficiency), step_time.overlapped.get(axis, 0.0))
        for axis, (count, size, ideal) in traffic_by_axis(run, step_time.slowest_pp, hardware).items()
    }
    memory = [estimate_memory(run, pp) for pp in range(layout.pp)]
    cost = estimate_cost(run, hardware, step_time.seconds, price_per_hour)
    return Plan(config, replaces_ring, layout, hardware, memory, traffic, step_time, cost)


def max_rank_memory(run: PlannedRun, limit: float = inf) -> int:
    """Bytes of the rank with the highest peak, or of the first one found above `limit`. Among pipeline ranks with the
    same work that is the first one, which has the most micro batches in flight."""
    most = 0
    for pp in distinct_pipeline_ranks(run.model, run.layout):
        most = max(most, estimate_memory(run, pp).total)
        if most > limit:
            break
    return most


@dataclass(frozen=True)
class ConfigChange:
    overrides: str
    speedup: float
    """Speed relative to the original configuration."""
    memory: int


def suggest_changes(plan: Plan) -> list[ConfigChange]:
    """Single changes that fit and make the step faster or, if the configuration does not fit, make it fit."""
    changes = []
    hardware, efficiency = plan.hardware, plan.hardware.entry.kind.efficiency
    limit = MEMORY_FILL_LIMIT * hardware.memory
    for overrides, run in single_key_variants(plan.config, hardware.ranks, hardware.entry.kind):
        speedup = plan.step_time.seconds / predict_step(run, hardware, efficiency).seconds
        if plan.fits and speedup < MIN_SPEEDUP:
            continue
        memory = max_rank_memory(run, limit)
        if memory <= limit:
            changes.append(ConfigChange(overrides, speedup, memory))
    return sorted(changes, key=lambda change: -change.speedup)[:MAX_SUGGESTIONS]


def single_key_variants(config: Config, ranks: int, device: DeviceKind) -> Iterator[tuple[str, PlannedRun]]:
    """Each valid variant of `config` that changes one choice, with its overrides."""
    keys = config.model_dump(mode="json")
    for overrides in _candidate_overrides(config.layout, config.train.micro_batch, config.recompute, config.precision):
        try:
            variant = parse(keys, overrides)
            layout = Layout.from_config(variant, ranks)
        except UserError:
            continue
        yield " ".join(overrides), PlannedRun(variant, layout, device)


def _candidate_overrides(
    layout: LayoutSection, micro_batch: int, recompute: RecomputeSection, precision: PrecisionSection
) -> list[list[str]]:
    """Other values of keys that change speed or memory but not the result of training."""
    candidates = [[f"train.micro_batch={micro_batch * 2}"]]
    if micro_batch % 2 == 0:
        candidates.append([f"train.micro_batch={micro_batch // 2}"])
    for kind in ("none", "attention", "full"):
        if kind != recompute.kind:
            candidates.append([f"recompute.kind={kind}", *(["recompute.modules=[]"] if recompute.modules else [])])
    candidates += [[f"layout.zero={zero}"] for zero in (1, 3) if zero != layout.zero]
    if layout.tp > 1 and not layout.sequence_parallel:
        candidates.append(["layout.sequence_parallel=true"])
    if layout.pp > 1 and not layout.pipeline_cuts and layout.pipeline_schedule == "1f1b":
        candidates.append([f"layout.vpp={layout.vpp * 2}"])
    if precision.kind != "fp32" and precision.grad_reduce_dtype == "fp32":
        candidates.append(["precision.reduce_dtype=bf16"])
    cuts = ["layout.pipeline_cuts=[]"] if layout.pipeline_cuts else []
    for name, size in (("tp", layout.tp), ("pp", layout.pp)):
        candidates += [[f"layout.{name}={other}", *cuts] for other in (size // 2, size * 2) if other and size > 1]
    return candidates


def plan_as_json(plan: Plan) -> dict[str, Any]:
    hardware, step_time = plan.hardware, plan.step_time
    return {
        "hardware": {
            "name": hardware.name,
            "count": hardware.count,
            "lnc": hardware.lnc,
            "ranks": hardware.ranks,
            "memory_bytes": hardware.memory,
            "flops": {dtype: hardware.peak_flops(dtype) for dtype in ("bf16", "fp8", "fp32")},
            "sources": hardware.entry.sources,
        },
        "layout": {name: getattr(plan.layout, name) for name in ("tp", "pp", "cp", "ep", "dp", "vpp", "micro_batches")},
        "efficiency": hardware.entry.kind.efficiency._asdict(),
        "memory": [{**vars(memory), "total": memory.total} for memory in plan.memory_by_pp],
        "fits": plan.fits,
        "messages": {axis: vars(traffic) for axis, traffic in plan.traffic.items()},
        "step": {"seconds": step_time.seconds, "slowest": step_time.slowest_pp, **step_time.components},
        "cost": vars(plan.cost),
        "limit": plan.bottleneck,
    }
