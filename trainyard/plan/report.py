"""A plan put together: memory of every stage, messages by axis, the step, its cost, what limits it, what to try."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from trainyard.config.load import parse
from trainyard.config.schema import Config
from trainyard.core.errors import UserError
from trainyard.parallel.layout import Layout
from trainyard.plan.group_rules import as_run
from trainyard.plan.hardware.spec import Hardware
from trainyard.plan.memory.peak import Memory, memory
from trainyard.plan.time.cost import Cost, cost
from trainyard.plan.time.step_time import Step, distinct, efficiency, on_the_wire, step

ROOM = 0.95
"""Part of a rank's memory that is filled by what is proposed: the model of memory is not exact."""
GAIN = 1.02
"""Times faster that a change must make a step to be worth a line."""
TRIED = 3
"""Lines of what to try."""
COMPUTE = ("products", "attention")
NAMES = {
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
class Wire:
    """What one axis sends in a step, on the slowest pipeline rank."""

    messages: int
    size: int
    """Bytes, the larger side of each message."""
    seconds: float
    hidden: float
    """Of these, seconds while something is computed."""


@dataclass(frozen=True)
class Plan:
    given: Config
    config: Config
    """What the hardware does of it."""
    layout: Layout
    on: Hardware
    memories: list[Memory]
    """Of a rank of each pipeline rank."""
    wires: dict[str, Wire]
    step: Step
    cost: Cost

    @property
    def fits(self) -> bool:
        return max(each.total for each in self.memories) <= self.on.memory

    @property
    def shares(self) -> dict[str, float]:
        """Of the step, by what NAMES has."""
        parts = dict(self.step.parts)
        compute = sum(parts.pop(name) for name in COMPUTE)
        return {name: value / self.step.seconds for name, value in {"compute": compute, **parts}.items()}

    @property
    def limit(self) -> str:
        """What the step would gain most from."""
        if not self.fits:
            return "memory: it does not fit"
        name, share = max(self.shares.items(), key=lambda item: item[1])
        return f"{NAMES[name]}, {share:.0%} of the step"


def make(given: Config, on: Hardware, price: float | None = None) -> Plan:
    config = as_run(given, on)
    layout = Layout.of(config, on.ranks)
    e = efficiency(on)
    found = step(config, layout, on, e)
    wires = {
        axis: Wire(count, size, ideal.real(e), found.hidden.get(axis, 0.0))
        for axis, (count, size, ideal) in on_the_wire(config, layout, found.slowest, on).items()
    }
    memories = [memory(config, layout, pp, on.entry.kind) for pp in range(layout.pp)]
    return Plan(given, config, layout, on, memories, wires, found, cost(config, on, found.seconds, price))


def changed(config: Config, words: list[str]) -> Config:
    return parse(config.model_dump(mode="json"), words)


def largest(config: Config, layout: Layout, kind: str) -> int:
    """Bytes of the rank that holds most. Ranks that have the same to do hold most where the first of them stands."""
    return max(memory(config, layout, pp, kind).total for pp in distinct(layout))


@dataclass(frozen=True)
class Change:
    words: str
    gain: float
    """Times as fast as the file."""
    memory: int


def advice(plan: Plan) -> list[Change]:
    """Single changes that fit and make the step faster or, where the file does not fit, that make it fit."""
    out = []
    for words, config, layout in others(plan.config, plan.on.ranks):
        gain = plan.step.seconds / step(config, layout, plan.on, efficiency(plan.on)).seconds
        if plan.fits and gain < GAIN:
            continue
        size = largest(config, layout, plan.on.entry.kind)
        if size <= ROOM * plan.on.memory:
            out.append(Change(words, gain, size))
    return sorted(out, key=lambda change: -change.gain)[:TRIED]


def others(config: Config, ranks: int) -> Iterator[tuple[str, Config, Layout]]:
    """What single changes make of it, as far as they are possible."""
    for words in _changes(config):
        try:
            other = changed(config, words)
            layout = Layout.of(other, ranks)
        except UserError:
            continue
        yield " ".join(words), other, layout


def _changes(config: Config) -> list[list[str]]:
    """Other values of the keys that change speed or memory but not what is learned."""
    layout, train, recompute = config.layout, config.train, config.recompute
    out = [[f"train.micro_batch={train.micro_batch * 2}"]]
    if train.micro_batch % 2 == 0:
        out.append([f"train.micro_batch={train.micro_batch // 2}"])
    for kind in ("none", "attention", "full"):
        if kind != recompute.kind:
            out.append([f"recompute.kind={kind}", *(["recompute.parts=[]"] if recompute.parts else [])])
    out += [[f"layout.zero={zero}"] for zero in (1, 3) if zero != layout.zero]
    if layout.tp > 1 and not layout.sequence_parallel:
        out.append(["layout.sequence_parallel=true"])
    if layout.pp > 1 and not layout.cuts and layout.schedule == "1f1b":
        out.append([f"layout.vpp={layout.vpp * 2}"])
    if config.precision.kind != "fp32" and config.precision.travel == "fp32":
        out.append(["precision.reduce=bf16"])
    halves = {"tp": layout.tp, "pp": layout.pp}
    cuts = ["layout.cuts=[]"] if layout.cuts else []
    for name, value in halves.items():
        out += [[f"layout.{name}={other}", *cuts] for other in (value // 2, value * 2) if other and value > 1]
    return out


def as_json(plan: Plan) -> dict[str, Any]:
    """Everything, as plain data."""
    entry = plan.on.entry
    return {
        "hardware": {
            "name": plan.on.name,
            "count": plan.on.count,
            "lnc": plan.on.lnc,
            "ranks": plan.on.ranks,
            "memory_bytes": plan.on.memory,
            "flops": {kind: plan.on.peak(kind) for kind in ("bf16", "fp8", "fp32")},
            "sources": entry.why,
        },
        "layout": {name: getattr(plan.layout, name) for name in ("tp", "pp", "cp", "dp", "vpp", "micro_batches")},
        "efficiency": efficiency(plan.on)._asdict(),
        "memory": [{**vars(each), "total": each.total} for each in plan.memories],
        "fits": plan.fits,
        "messages": {axis: vars(wire) for axis, wire in plan.wires.items()},
        "step": {"seconds": plan.step.seconds, "slowest": plan.step.slowest, **plan.step.parts},
        "cost": vars(plan.cost),
        "limit": plan.limit,
    }
