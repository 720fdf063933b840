"""The arithmetic of ranks: who does what, and every rule that a layout must keep.

Ranks are arranged [pp][dp][cp][tp], tp fastest. Everything is checked here, before a process group exists; an error
says which rule is broken and names the nearest layouts that keep all of them.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from math import log2
from typing import Literal, Self

from trainyard.config.base import nearest_multiples
from trainyard.config.schema import Config
from trainyard.core.errors import UserError

Dimension = Literal["pp", "dp", "cp", "tp"]
ORDER: tuple[Dimension, ...] = ("pp", "dp", "cp", "tp")
SHOWN = 3
"""How many working layouts an error line names."""


@dataclass(frozen=True)
class Stage:
    """A stretch of the model that one pipeline rank runs in one go."""

    number: int
    layers: range
    first: bool
    last: bool


@dataclass(frozen=True)
class Layout:
    tp: int = 1
    pp: int = 1
    cp: int = 1
    dp: int = 1
    vpp: int = 1
    copies: int = 1
    """Neighbouring tensor-parallel ranks that hold the same kv heads, where there are fewer heads than ranks."""
    micro_batches: int = 1
    """Micro batches per rank and optimizer step."""
    stages: tuple[Stage, ...] = ()
    """All stages of the pipeline, pp x vpp of them."""
    vee: bool = False
    """Stages go down the ranks and up again (zbv) instead of round and round."""

    @property
    def world(self) -> int:
        return self.tp * self.pp * self.cp * self.dp

    def describe(self) -> str:
        stages = f" in {len(self.stages)} stages" if self.vpp > 1 else ""
        return (
            f"tensor {self.tp} x pipeline {self.pp}{stages} x context {self.cp} x data {self.dp}, "
            f"{self.micro_batches} micro batches each"
        )

    def place(self, rank: int) -> dict[Dimension, int]:
        """Where a rank stands in each dimension."""
        out: dict[Dimension, int] = {}
        for dimension in reversed(ORDER):
            rank, out[dimension] = divmod(rank, getattr(self, dimension))
        return out

    def groups(self, *dimensions: Dimension) -> list[list[int]]:
        """Ranks that differ in these dimensions only, group by group; every rank is in exactly one."""
        out: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.world):
            place = self.place(rank)
            out.setdefault(tuple(place[d] for d in ORDER if d not in dimensions), []).append(rank)
        return list(out.values())

    def stages_of(self, pp: int) -> list[Stage]:
        """The stages of a pipeline rank, in the order in which a micro batch meets them."""
        return [stage for stage in self.stages if self.holder(stage.number) == pp]

    def holder(self, stage: int) -> int:
        """The pipeline rank that runs a stage."""
        turn, place = divmod(stage, self.pp)
        return self.pp - 1 - place if self.vee and turn % 2 else place

    @cached_property
    def owners(self) -> dict[int, int]:
        """The pipeline rank of each layer."""
        return {layer: self.holder(stage.number) for stage in self.stages for layer in stage.layers}

    @classmethod
    def of(cls, config: Config, world: int) -> Self:
        """The layout of `config` on `world` ranks, or one line that says why there is none."""
        layout = config.layout
        if wrong := _broken(config, world, layout.tp, layout.pp, layout.cp):
            near = _nearest(config, world)
            raise UserError(wrong + (f"; nearest on {world} rank{'s' * (world > 1)}: {near}" if near else ""))
        dp = world // (layout.tp * layout.pp * layout.cp)
        return cls(
            layout.tp,
            layout.pp,
            layout.cp,
            dp,
            layout.vpp,
            copies(config.model.kv, layout.tp),
            config.train.global_batch // (config.train.micro_batch * dp),
            _stages(config),
            layout.schedule == "zbv",
        )


def share(units: int, tp: int, rank: int) -> tuple[int, int]:
    """Which units (heads) rank `rank` of `tp` holds: [first, end), equally many on each rank.

    Fewer units than ranks: each is held by tp / units ranks. Where neither divides the other, every rank holds all.
    """
    if units % tp == 0:
        return rank * units // tp, (rank + 1) * units // tp
    if tp % units == 0:
        return rank * units // tp, rank * units // tp + 1
    return 0, units


def copies(units: int, tp: int) -> int:
    """How many neighbouring ranks hold the same units."""
    return 1 if units % tp == 0 else tp // units if tp % units == 0 else tp


def _broken(config: Config, world: int, tp: int, pp: int, cp: int) -> str | None:
    """The first rule that this layout breaks on `world` ranks, in words."""
    model, layout, train, sequence = config.model, config.layout, config.train, config.data.sequence
    stages = pp * layout.vpp
    if model.heads % tp:
        return f"layout.tp={tp}: does not divide model.heads={model.heads}"
    if model.inner % tp:
        return f"layout.tp={tp}: does not divide model.ffn={model.inner}"
    if stages > model.layers:
        return f"layout.pp={pp}: pp x vpp = {stages} stages for {model.layers} layers"
    if layout.cuts and pp == layout.pp and layout.cuts[-1] >= model.layers - 1:
        return f"layout.cuts={list(layout.cuts)}: the model's {model.layers} layers are 0 to {model.layers - 1}"
    if cp > 1 and sequence % (2 * cp):
        return f"layout.cp={cp}: data.sequence={sequence} is not a multiple of 2 x cp = {2 * cp}"
    if layout.sequence_parallel and sequence // cp % tp:
        return f"layout.tp={tp}: sequence parallel, and {sequence} / cp={cp} tokens do not divide by it"
    if world % (tp * pp * cp):
        shards = tp * pp * cp
        return (
            f"layout tp={tp} x pp={pp} x cp={cp}: needs a multiple of {shards} ranks, this run has {world} "
            f"(--nproc {nearest_multiples(world, shards)} here, or --smoke for a trial)"
        )
    dp = world // (tp * pp * cp)
    if train.global_batch % (train.micro_batch * dp):
        return (
            f"train.global_batch={train.global_batch}: not a multiple of micro_batch x data parallel = "
            f"{train.micro_batch} x {dp} (say {nearest_multiples(train.global_batch, train.micro_batch * dp)})"
        )
    micro = train.global_batch // (train.micro_batch * dp)
    if pp > 1 and (layout.vpp > 1 or layout.schedule != "1f1b") and micro % max(micro // pp, 1):
        return f"layout.pp={pp}: {micro} micro batches do not come in rounds of at least pp (say {micro // pp * pp})"
    return None


def _nearest(config: Config, world: int) -> str:
    """The working layouts closest to what was asked, in words; empty when there is none."""
    layout = config.layout
    asked = (layout.tp, layout.pp, layout.cp)

    def distance(found: tuple[int, int, int]) -> tuple[float, tuple[int, int, int]]:
        return sum(abs(log2(a / b)) for a, b in zip(found, asked, strict=True)), found

    working = [found for found in _splits(config, world) if not _broken(config, world, *found)]
    best = sorted(working, key=distance)[:SHOWN]
    return ", ".join(f"tp={tp} pp={pp} cp={cp} (dp={world // (tp * pp * cp)})" for tp, pp, cp in best)


def _splits(config: Config, world: int) -> Iterator[tuple[int, int, int]]:
    """Every (tp, pp, cp) whose product divides `world`; one pipeline rank only where nothing asks for more."""
    divisors = [d for d in range(1, world + 1) if world % d == 0]
    single = config.layout.vpp == 1 and config.layout.schedule != "zbv" and not config.layout.cuts
    pipelines = divisors if single else [d for d in divisors if d == config.layout.pp]
    for tp, pp, cp in product(divisors, pipelines, divisors):
        if world % (tp * pp * cp) == 0:
            yield tp, pp, cp


def _stages(config: Config) -> tuple[Stage, ...]:
    """Which layers each stage runs. Layers that are over after an even split go to the middle: the first stage has the
    embedding to do as well, and the last one the head."""
    layers, count = config.model.layers, config.layout.pp * config.layout.vpp
    if config.layout.cuts:
        ends = [cut + 1 for cut in config.layout.cuts] + [layers]
    else:
        sizes = [layers // count] * count
        middle_first = sorted(range(count), key=lambda stage: (abs(2 * stage + 1 - count), stage))
        for stage in middle_first[: layers % count]:
            sizes[stage] += 1
        ends = [sum(sizes[: stage + 1]) for stage in range(count)]
    starts = [0, *ends[:-1]]
    return tuple(
        Stage(number, range(start, end), number == 0, number == count - 1)
        for number, (start, end) in enumerate(zip(starts, ends, strict=True))
    )
