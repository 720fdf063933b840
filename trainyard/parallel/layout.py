"""The layout: how ranks divide the work along tp, pp, cp, ep and dp, and every rule that a layout must satisfy.

Ranks are arranged [pp][dp][cp][tp], tp fastest. Expert parallelism divides the experts among `ep` adjacent of the
dp x cp ranks that hold the same other weights. All rules are checked here, before a process group exists; an error
names the violated rule and the nearest valid layouts.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import accumulate, product
from math import log2, prod
from typing import Literal, Self

from trainyard.config.layout_schema import LayoutSection
from trainyard.config.schema import Config, TrainSection
from trainyard.core.errors import UserError
from trainyard.core.quantities import counted
from trainyard.core.section import nearest_multiples
from trainyard.core.splits import ModelShard, replication_factor
from trainyard.families import ModelConfig, blueprint_of
from trainyard.families.flops import layer_flops

AxisName = Literal["pp", "dp", "cp", "tp"]
AXIS_ORDER: tuple[AxisName, ...] = ("pp", "dp", "cp", "tp")
SECTION_KEYS = ["tp", "pp", "cp", "vpp", "ep", "sequence_parallel", "cp_method", "pipeline_schedule", "bucket_mib"]
"""Keys of the layout section that a Layout takes as they are."""
MAX_SUGGESTIONS = 3
"""Valid layouts that an error message names."""


@dataclass(frozen=True)
class StageSpec:
    """A pipeline stage: consecutive layers that one pipeline rank runs at once."""

    index: int
    layers: Sequence[int]
    is_first: bool
    is_last: bool


@dataclass(frozen=True)
class Layout:
    """The sizes of all parallel axes, and how pipeline ranks divide the layers."""

    tp: int = 1
    pp: int = 1
    cp: int = 1
    dp: int = 1
    vpp: int = 1
    kv_replication: int = 1
    """Adjacent tensor-parallel ranks that hold the same kv heads, if there are fewer heads than ranks."""
    micro_batches: int = 1
    """Micro batches per rank and optimizer step."""
    stages: tuple[StageSpec, ...] = ()
    """All pp x vpp pipeline stages."""
    ep: int = 1
    """Adjacent data and context parallel ranks that divide the experts."""
    zero: int = 0
    """The ZeRO stage in effect: 0 if no two ranks hold the same parameters."""
    sequence_parallel: bool = False
    cp_method: Literal["ring", "all_gather"] = "ring"
    pipeline_schedule: Literal["1f1b", "zero_bubble", "zbv"] = "1f1b"
    bucket_mib: int = 256
    """The last four are those of the layout section."""

    @property
    def world_size(self) -> int:
        return self.tp * self.pp * self.cp * self.dp

    def describe(self) -> str:
        stages = f" in {counted(len(self.stages), 'stage')}" if self.vpp > 1 else ""
        experts = f" (expert {self.ep})" if self.ep > 1 else ""
        return (
            f"tensor {self.tp} x pipeline {self.pp}{stages} x context {self.cp} x data {self.dp}{experts}, "
            f"{counted(self.micro_batches, 'micro batch')} each"
        )

    def coords(self, rank: int) -> dict[AxisName, int]:
        """The coordinate of a rank along each axis."""
        coords: dict[AxisName, int] = {}
        for axis in reversed(AXIS_ORDER):
            rank, coords[axis] = divmod(rank, getattr(self, axis))
        return coords

    def data_index(self, rank: int) -> int:
        """Index among the ranks that hold the same weights outside experts, `groups("dp", "cp")`."""
        coords = self.coords(rank)
        return coords["dp"] * self.cp + coords["cp"]

    def model_shard(self, rank: int) -> ModelShard:
        """The part of every parameter that a rank holds."""
        return ModelShard(self.tp, self.coords(rank)["tp"], self.ep, self.data_index(rank) % self.ep)

    def data_shard(self, rank: int, of_experts: bool) -> tuple[int, int]:
        """(number of ranks that hold the same values of a parameter, index of `rank` among them)."""
        ep = self.ep if of_experts else 1
        return self.dp * self.cp // ep, self.data_index(rank) // ep

    def expert_groups(self) -> list[list[int]]:
        """The groups of ranks that divide the experts."""
        data_groups, ep = self.groups("dp", "cp"), self.ep
        return [members[first : first + ep] for members in data_groups for first in range(0, len(members), ep)]

    def expert_data_groups(self) -> list[list[int]]:
        """The groups of ranks that hold the same experts."""
        return [members[index :: self.ep] for members in self.groups("dp", "cp") for index in range(self.ep)]

    def groups(self, *axes: AxisName) -> list[list[int]]:
        """The groups of ranks that differ only along these axes; every rank is in exactly one."""
        groups: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.world_size):
            coords = self.coords(rank)
            groups.setdefault(tuple(coords[axis] for axis in AXIS_ORDER if axis not in axes), []).append(rank)
        return list(groups.values())

    def first_group(self, *axes: AxisName) -> list[int]:
        """The group of rank 0 among `groups(*axes)`, without the others."""
        ranks, stride = [0], 1
        for axis in reversed(AXIS_ORDER):
            size = getattr(self, axis)
            if axis in axes:
                ranks = [rank + index * stride for index in range(size) for rank in ranks]
            stride *= size
        return ranks

    def stages_on(self, pp_rank: int) -> list[StageSpec]:
        """The stages of a pipeline rank, in the order in which a micro batch passes them."""
        return [stage for stage in self.stages if self.stage_owner(stage.index) == pp_rank]

    def stage_owner(self, stage: int) -> int:
        """The pipeline rank that runs a stage."""
        round_index, pp_rank = divmod(stage, self.pp)
        runs_back_up = self.pipeline_schedule == "zbv" and round_index % 2  # instead of in rounds
        return self.pp - 1 - pp_rank if runs_back_up else pp_rank

    @cached_property
    def layer_owner(self) -> dict[int, int]:
        """The pipeline rank of each layer."""
        return {layer: self.stage_owner(stage.index) for stage in self.stages for layer in stage.layers}

    @classmethod
    def from_config(cls, config: Config, world_size: int) -> Self:
        """The layout of `config` on `world_size` ranks. Raises UserError if a rule is violated."""
        section, model, train, seq_lens = config.layout, config.model, config.train, config.data.seq_lens
        sizes = section.tp, section.pp, section.cp
        if violation := _first_violation(section, sizes, model, train, seq_lens, world_size):
            nearest = _nearest_layouts(section, model, train, seq_lens, world_size)
            on = f"nearest on {counted(world_size, 'rank')}"
            raise UserError(f"{violation}; {on}: {nearest}" if nearest else violation)
        dp = world_size // prod(sizes)
        return cls(
            **{key: getattr(section, key) for key in SECTION_KEYS},
            dp=dp,
            kv_replication=replication_factor(model.num_kv_heads, section.tp),
            micro_batches=train.global_batch // (train.micro_batch * dp),
            stages=_split_stages(section, model, seq_lens[-1]),
            zero=section.zero if dp * section.cp > 1 else 0,
        )


def _first_violation(
    layout: LayoutSection,
    sizes: tuple[int, int, int],
    model: ModelConfig,
    train: TrainSection,
    seq_lens: tuple[int, ...],
    world_size: int,
) -> str | None:
    """The first rule that `layout` with these `sizes` of tp, pp and cp violates on `world_size` ranks, as text for the
    user."""
    tp, pp, cp = sizes
    stages = pp * layout.vpp
    if model.heads % tp:
        return f"layout.tp={tp}: does not divide model.heads={model.heads}"
    for key, size in model.ffn_sizes.items():
        if size % tp:
            return f"layout.tp={tp}: does not divide model.{key}={size}"
    recurrent = next((layer for layer in range(model.layers) if model.recurrence(layer)), None)
    if cp > 1 and recurrent is not None:
        return f"layout.cp={cp}: layer {recurrent} of {model.family} passes a state from token to token"
    if stages > model.layers:
        return f"layout.pp={pp}: pp x vpp = {stages} stages for {counted(model.layers, 'layer')}"
    if pp > 1 and model.mtp_blocks and layout.pipeline_schedule in ("zero_bubble", "zbv"):
        blocks = f"model.mtp_layers={len(model.mtp_blocks)}"
        return f"layout.pipeline_schedule={layout.pipeline_schedule}: torch cannot split the backward pass of {blocks}"
    if layout.pipeline_cuts and pp == layout.pp and layout.pipeline_cuts[-1] >= model.layers - 1:
        cuts = list(layout.pipeline_cuts)
        return f"layout.pipeline_cuts={cuts}: the model's {model.layers} layers are 0 to {model.layers - 1}"
    for seq_len in seq_lens:
        key = "data.seq_len" if seq_len == seq_lens[-1] else "a length of data.buckets"
        if cp > 1 and seq_len % (2 * cp):
            return f"layout.cp={cp}: {key}={seq_len} is not a multiple of 2 x cp = {2 * cp}"
        if layout.sequence_parallel and seq_len // cp % tp:
            return f"layout.tp={tp}: sequence parallelism needs {key} / cp = {seq_len} / {cp} divisible by tp"
    if world_size % (tp * pp * cp):
        model_ranks = tp * pp * cp
        return (
            f"layout tp={tp} x pp={pp} x cp={cp}: needs a multiple of {model_ranks} ranks, this run has {world_size} "
            f"(use --nproc {nearest_multiples(world_size, model_ranks)})"
        )
    dp = world_size // (tp * pp * cp)
    if train.global_batch % (train.micro_batch * dp):
        return (
            f"train.global_batch={train.global_batch}: not a multiple of micro_batch x data parallel = "
            f"{train.micro_batch} x {dp} (use {nearest_multiples(train.global_batch, train.micro_batch * dp)})"
        )
    if layout.ep > 1 and (violation := _expert_violation(model.family, model.num_experts, layout.ep, dp, cp)):
        return violation
    micro = train.global_batch // (train.micro_batch * dp)
    if pp > 1 and (layout.vpp > 1 or layout.pipeline_schedule != "1f1b") and micro % max(micro // pp, 1):
        return (
            f"layout.pp={pp}: this schedule needs equal rounds of at least pp micro batches; {micro} cannot be split "
            f"that way (use {micro // pp * pp})"
        )
    return None


def _expert_violation(family: str, experts: int, ep: int, dp: int, cp: int) -> str | None:
    sizes = [size for size in range(1, experts + 1) if experts % size == 0 and dp * cp % size == 0]
    use = f"(use {' or '.join(map(str, sizes[-2:])) or 1})"
    if not experts:
        return f"layout.ep={ep}: model.family={family} has no experts {use}"
    if experts % ep:
        return f"layout.ep={ep}: does not divide model.experts={experts} {use}"
    if dp * cp % ep:
        return f"layout.ep={ep}: does not divide data x context parallel = {dp} x {cp} {use}"
    return None


def _nearest_layouts(
    section: LayoutSection, model: ModelConfig, train: TrainSection, seq_lens: tuple[int, ...], world_size: int
) -> str:
    """The valid layouts closest to the configured one, as text; empty if there are none."""
    configured = (section.tp, section.pp, section.cp)

    def distance(sizes: tuple[int, int, int]) -> tuple[float, tuple[int, int, int]]:
        return sum(abs(log2(a / b)) for a, b in zip(sizes, configured, strict=True)), sizes

    divisors = [d for d in range(1, world_size + 1) if world_size % d == 0]
    # pp stays as configured if other keys depend on it. Sizes that no layout can have are left out early: 10,000 ranks
    # have thousands of products.
    pp_is_free = section.vpp == 1 and section.pipeline_schedule != "zbv" and not section.pipeline_cuts
    tp_sizes = [d for d in divisors if all(size % d == 0 for size in (model.heads, *model.ffn_sizes.values()))]
    pp_sizes = [d for d in divisors if d <= model.layers and (pp_is_free or d == section.pp)]
    cp_sizes = [d for d in divisors if d == 1 or not any(seq_len % (2 * d) for seq_len in seq_lens)]

    def is_valid(sizes: tuple[int, int, int]) -> bool:
        return not (world_size % prod(sizes) or _first_violation(section, sizes, model, train, seq_lens, world_size))

    nearest = sorted(filter(is_valid, product(tp_sizes, pp_sizes, cp_sizes)), key=distance)[:MAX_SUGGESTIONS]
    return ", ".join(f"tp={tp} pp={pp} cp={cp} (dp={world_size // (tp * pp * cp)})" for tp, pp, cp in nearest)


def _split_stages(section: LayoutSection, model: ModelConfig, seq_len: int) -> tuple[StageSpec, ...]:
    """Assign layers to stages. If layers of one kind do not divide evenly, the middle stages get one more, because the
    first stage also computes the embedding and the last one the head. Layers of several kinds are divided by their
    work."""
    layers, count = model.layers, section.pp * section.vpp
    if section.pipeline_cuts:
        ends = [cut + 1 for cut in section.pipeline_cuts] + [layers]
    elif len({model.layer_kind(layer) for layer in range(layers)}) > 1:
        ends = _ends_by_work(_layer_work(model, seq_len), count)
    else:
        sizes = [layers // count] * count
        for stage in sorted(range(count), key=lambda stage: (abs(2 * stage + 1 - count), stage))[: layers % count]:
            sizes[stage] += 1
        ends = list(accumulate(sizes))
    starts = [0, *ends[:-1]]
    return tuple(
        StageSpec(index, range(start, end), index == 0, index == count - 1)
        for index, (start, end) in enumerate(zip(starts, ends, strict=True))
    )


@cache
def _layer_work(model: ModelConfig, seq_len: int) -> tuple[float, ...]:
    return tuple(layer_flops(model, blueprint_of(model), seq_len))


@cache
def _ends_by_work(work: tuple[float, ...], count: int) -> list[int]:
    """Divide layers among `count` stages so that the stage with the most work has as little as possible, and stages
    are as equal as that allows. Returns the end of each stage."""
    done = list(accumulate(work, initial=0.0))
    layers = len(work)
    # By first layer, the best division of the layers from there on: (most work, sum of squares, ends).
    best = {start: (done[-1] - done[start], (done[-1] - done[start]) ** 2, [layers]) for start in range(layers)}
    for stages_left in range(2, count + 1):
        best = {
            start: min(
                (max(own := done[end] - done[start], most), own**2 + squares, [end, *ends])
                for end in range(start + 1, layers - stages_left + 2)
                for most, squares, ends in (best[end],)
            )
            for start in range(layers - stages_left + 1)
        }
    return best[0][2]
