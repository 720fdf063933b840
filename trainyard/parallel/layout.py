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

AxisName = Literal["pp", "dp", "cp", "tp"]
AXIS_ORDER: tuple[AxisName, ...] = ("pp", "dp", "cp", "tp")
MAX_SUGGESTIONS = 3
"""How many working layouts an error line names."""


@dataclass(frozen=True)
class StageSpec:
    """A stretch of the model that one pipeline rank runs in one go."""

    index: int
    layers: range
    is_first: bool
    is_last: bool


@dataclass(frozen=True)
class Layout:
    tp: int = 1
    pp: int = 1
    cp: int = 1
    dp: int = 1
    vpp: int = 1
    kv_replication: int = 1
    """Neighbouring tensor-parallel ranks that hold the same kv heads, where there are fewer heads than ranks."""
    micro_batches: int = 1
    """Micro batches per rank and optimizer step."""
    stages: tuple[StageSpec, ...] = ()
    """All stages of the pipeline, pp x vpp of them."""
    v_shaped: bool = False
    """Stages go down the ranks and up again (zbv) instead of round and round."""

    @property
    def world_size(self) -> int:
        return self.tp * self.pp * self.cp * self.dp

    def describe(self) -> str:
        stages = f" in {len(self.stages)} stages" if self.vpp > 1 else ""
        return (
            f"tensor {self.tp} x pipeline {self.pp}{stages} x context {self.cp} x data {self.dp}, "
            f"{self.micro_batches} micro batches each"
        )

    def coords(self, rank: int) -> dict[AxisName, int]:
        """Where a rank stands in each dimension."""
        out: dict[AxisName, int] = {}
        for dimension in reversed(AXIS_ORDER):
            rank, out[dimension] = divmod(rank, getattr(self, dimension))
        return out

    def groups(self, *axes: AxisName) -> list[list[int]]:
        """Ranks that differ in these dimensions only, group by group; every rank is in exactly one."""
        out: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.world_size):
            place = self.coords(rank)
            out.setdefault(tuple(place[d] for d in AXIS_ORDER if d not in axes), []).append(rank)
        return list(out.values())

    def stages_on(self, pp_rank: int) -> list[StageSpec]:
        """The stages of a pipeline rank, in the order in which a micro batch meets them."""
        return [stage for stage in self.stages if self.stage_owner(stage.index) == pp_rank]

    def stage_owner(self, stage: int) -> int:
        """The pipeline rank that runs a stage."""
        turn, place = divmod(stage, self.pp)
        return self.pp - 1 - place if self.v_shaped and turn % 2 else place

    @cached_property
    def layer_owner(self) -> dict[int, int]:
        """The pipeline rank of each layer."""
        return {layer: self.stage_owner(stage.index) for stage in self.stages for layer in stage.layers}

    @classmethod
    def from_config(cls, config: Config, world_size: int) -> Self:
        """The layout of `config` on `world` ranks, or one line that says why there is none."""
        layout = config.layout
        if wrong := _first_violation(config, world_size, layout.tp, layout.pp, layout.cp):
            near = _nearest_layouts(config, world_size)
            raise UserError(wrong + (f"; nearest on {world_size} rank{'s' * (world_size > 1)}: {near}" if near else ""))
        dp = world_size // (layout.tp * layout.pp * layout.cp)
        return cls(
            layout.tp,
            layout.pp,
            layout.cp,
            dp,
            layout.vpp,
            replication_factor(config.model.num_kv_heads, layout.tp),
            config.train.global_batch // (config.train.micro_batch * dp),
            _split_stages(config),
            layout.pipeline_schedule == "zbv",
        )


def shard_rows(num_rows: int, num_shards: int, shard: int) -> range:
    """The rows (dim 0) of a parameter in one data-parallel shard: equal chunks, the last ones shorter or empty."""
    chunk = -(-num_rows // num_shards)
    return range(min(shard * chunk, num_rows), min((shard + 1) * chunk, num_rows))


def head_range(units: int, tp: int, rank: int) -> tuple[int, int]:
    """Which units (heads) rank `rank` of `tp` holds: [first, end), equally many on each rank.

    Fewer units than ranks: each is held by tp / units ranks. Where neither divides the other, every rank holds all.
    """
    if units % tp == 0:
        return rank * units // tp, (rank + 1) * units // tp
    if tp % units == 0:
        return rank * units // tp, rank * units // tp + 1
    return 0, units


def replication_factor(units: int, tp: int) -> int:
    """How many neighbouring ranks hold the same units."""
    return 1 if units % tp == 0 else tp // units if tp % units == 0 else tp


def _first_violation(config: Config, world_size: int, tp: int, pp: int, cp: int) -> str | None:
    """The first rule that this layout breaks on `world` ranks, in words."""
    model, layout, train, sequence = config.model, config.layout, config.train, config.data.seq_len
    stages = pp * layout.vpp
    if model.heads % tp:
        return f"layout.tp={tp}: does not divide model.heads={model.heads}"
    if model.ffn_size % tp:
        return f"layout.tp={tp}: does not divide model.ffn={model.ffn_size}"
    if stages > model.layers:
        return f"layout.pp={pp}: pp x vpp = {stages} stages for {model.layers} layers"
    if layout.pipeline_cuts and pp == layout.pp and layout.pipeline_cuts[-1] >= model.layers - 1:
        return f"layout.pipeline_cuts={list(layout.pipeline_cuts)}: the model's {model.layers} layers are 0 to {model.layers - 1}"
    if cp > 1 and sequence % (2 * cp):
        return f"layout.cp={cp}: data.seq_len={sequence} is not a multiple of 2 x cp = {2 * cp}"
    if layout.sequence_parallel and sequence // cp % tp:
        return f"layout.tp={tp}: sequence parallel, and {sequence} / cp={cp} tokens do not divide by it"
    if world_size % (tp * pp * cp):
        shards = tp * pp * cp
        return (
            f"layout tp={tp} x pp={pp} x cp={cp}: needs a multiple of {shards} ranks, this run has {world_size} "
            f"(--nproc {nearest_multiples(world_size, shards)} here, or --smoke for a trial)"
        )
    dp = world_size // (tp * pp * cp)
    if train.global_batch % (train.micro_batch * dp):
        return (
            f"train.global_batch={train.global_batch}: not a multiple of micro_batch x data parallel = "
            f"{train.micro_batch} x {dp} (say {nearest_multiples(train.global_batch, train.micro_batch * dp)})"
        )
    micro = train.global_batch // (train.micro_batch * dp)
    if pp > 1 and (layout.vpp > 1 or layout.pipeline_schedule != "1f1b") and micro % max(micro // pp, 1):
        return f"layout.pp={pp}: {micro} micro batches do not come in rounds of at least pp (say {micro // pp * pp})"
    return None


def _nearest_layouts(config: Config, world_size: int) -> str:
    """The working layouts closest to what was asked, in words; empty when there is none."""
    layout = config.layout
    asked = (layout.tp, layout.pp, layout.cp)

    def distance(found: tuple[int, int, int]) -> tuple[float, tuple[int, int, int]]:
        return sum(abs(log2(a / b)) for a, b in zip(found, asked, strict=True)), found

    working = [
        found for found in _candidate_sizes(config, world_size) if not _first_violation(config, world_size, *found)
    ]
    best = sorted(working, key=distance)[:MAX_SUGGESTIONS]
    return ", ".join(f"tp={tp} pp={pp} cp={cp} (dp={world_size // (tp * pp * cp)})" for tp, pp, cp in best)


def _candidate_sizes(config: Config, world_size: int) -> Iterator[tuple[int, int, int]]:
    """Every (tp, pp, cp) whose product divides `world`; one pipeline rank only where nothing asks for more."""
    divisors = [d for d in range(1, world_size + 1) if world_size % d == 0]
    single = config.layout.vpp == 1 and config.layout.pipeline_schedule != "zbv" and not config.layout.pipeline_cuts
    pipelines = divisors if single else [d for d in divisors if d == config.layout.pp]
    for tp, pp, cp in product(divisors, pipelines, divisors):
        if world_size % (tp * pp * cp) == 0:
            yield tp, pp, cp


def _split_stages(config: Config) -> tuple[StageSpec, ...]:
    """Which layers each stage runs. Layers that are over after an even split go to the middle: the first stage has the
    embedding to do as well, and the last one the head."""
    layers, count = config.model.layers, config.layout.pp * config.layout.vpp
    if config.layout.pipeline_cuts:
        ends = [cut + 1 for cut in config.layout.pipeline_cuts] + [layers]
    else:
        sizes = [layers // count] * count
        middle_first = sorted(range(count), key=lambda stage: (abs(2 * stage + 1 - count), stage))
        for stage in middle_first[: layers % count]:
            sizes[stage] += 1
        ends = [sum(sizes[: stage + 1]) for stage in range(count)]
    starts = [0, *ends[:-1]]
    return tuple(
        StageSpec(number, range(start, end), number == 0, number == count - 1)
        for number, (start, end) in enumerate(zip(starts, ends, strict=True))
    )
