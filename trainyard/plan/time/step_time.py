"""How long a step takes: what the hardware must do at the very least, divided by how well it is known to do it.

For every pipeline rank the work of a micro batch is counted: FLOP of matrix products and of attention, bytes that other
passes move through memory, bytes that messages move over links and over the network. Each count over its peak rate is
an ideal time; each ideal time over an efficiency, a number below 1 that is fitted on measured runs (`published`), is
the predicted one. What overlaps is taken off, the bubble of the pipeline and the update are added. docs/plan.md has
the formulas.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from math import log2, prod
from typing import NamedTuple

from trainyard.config.model_schema import BertConfig, LlamaConfig
from trainyard.config.schema import Config
from trainyard.models import AnyModelConfig, family_of
from trainyard.models.blueprint import Blueprint
from trainyard.parallel.layout import Layout
from trainyard.plan.hardware.spec import Hardware
from trainyard.plan.memory.device_kinds import DEVICE_KINDS
from trainyard.plan.rank_parameters import local_params
from trainyard.plan.time.comm_volume import GROUP_AXES, Message, MessageCounts, step_messages

UPDATE_BYTES_PER_WEIGHT = 30
"""Bytes that AdamW moves for each weight; LAMB twice that."""
LOSS_BYTES_PER_LOGIT = 8
"""Bytes that the loss moves for each logit."""
SCORE_MEMORY_PASSES = 12
"""Times that each attention score goes through memory where no kernel keeps it on the chip (on Trainium there is one
for Llama)."""
NON_PADDING_SHARE = 0.75
"""Part of BERT's tokens that are not padding, where padding is left out (that of generated samples)."""
SCHEDULE_BUBBLE = {"1f1b": 1.0, "zero_bubble": 1 / 3, "zbv": 1 / 6}
"""What a schedule leaves of the bubble of 1F1B."""


class Efficiency(NamedTuple):
    """Parts of the peak rates that runs reach, 0 to 1."""

    matmul: float = 1.0
    attention: float = 1.0
    memory: float = 1.0
    link: float = 1.0
    network: float = 1.0


_TRN1 = Efficiency(0.83, 0.83, 0.23, 0.33, 0.23)
_HOPPER = Efficiency(0.66, 0.65, 0.58, 0.7, 0.7)
FITTED_EFFICIENCY = {
    "trn1": _TRN1,
    "trn2": _TRN1,
    "trn3": _TRN1,
    "gpu": _HOPPER,
    "cpu": Efficiency(0.8, 0.4, 0.5, 1.0, 1.0),
}
"""By generation of Trainium, or kind. trn1 and gpu: `published.fit`, rounded. Nobody publishes training on trn2 or
trn3: as trn1. Of GPUs, link and network are guesses; so are all of a CPU, whose peaks are measured."""


class IdealTime(NamedTuple):
    """Seconds at peak rates, by what is busy; `fixed` are seconds that no rate shortens."""

    matmul: float = 0.0
    attention: float = 0.0
    memory: float = 0.0
    link: float = 0.0
    network: float = 0.0
    fixed: float = 0.0

    def at_efficiency(self, efficiency: Efficiency) -> float:
        return sum(ideal / reached for ideal, reached in zip(self, (*efficiency, 1.0), strict=True))

    def plus(self, other: "IdealTime", times: float = 1.0) -> "IdealTime":
        return IdealTime(*(a + b * times for a, b in zip(self, other, strict=True)))


def fitted_efficiency(hardware: Hardware) -> Efficiency:
    return FITTED_EFFICIENCY[hardware.entry.generation or hardware.entry.kind]


@dataclass(frozen=True)
class StepTime:
    """A predicted step, in seconds of the slowest pipeline rank."""

    components: dict[str, float]
    """products, attention, memory, tp, cp, pp, bubble, dp, update, all: they add up to the step."""
    overlapped: dict[str, float]
    """Communication that is done while something is computed, by axis."""
    slowest_pp: int
    """Pipeline rank that the others wait for."""

    @property
    def seconds(self) -> float:
        return sum(self.components.values())


def predict_step(config: Config, layout: Layout, hardware: Hardware, efficiency: Efficiency) -> StepTime:
    found = {
        pp: _pipeline_rank_time(config, layout, pp, hardware, efficiency) for pp in distinct_pipeline_ranks(layout)
    }
    alike = {pp: found[same] for same, group in distinct_pipeline_ranks(layout).items() for pp in group}
    times = {pp: sum(parts.values()) for pp, (parts, _, _, _) in found.items()}
    slowest = max(times, key=lambda pp: times[pp])
    parts, once, hidden, overlaps = found[slowest]
    # While the slowest rank's first micro batch is on its way down and its last one's gradient on its way up, it waits
    # for all other ranks, one micro batch each.
    others = sum(sum(parts.values()) for parts, _, _, _ in alike.values()) - times[slowest]
    bubble = others / layout.micro_batches / layout.vpp * SCHEDULE_BUBBLE[config.layout.pipeline_schedule]
    spare = min(once["dp"], overlaps)
    after = {"bubble": bubble, "dp": once["dp"] - spare, "update": once["update"], "all": once["all"]}
    return StepTime(parts | after, hidden | {"dp": spare}, slowest)


def distinct_pipeline_ranks(layout: Layout) -> dict[int, list[int]]:
    """One pipeline rank of each kind, with all that have the same to do."""
    kinds: dict[tuple[object, ...], list[int]] = {}
    for pp in range(layout.pp):
        stages = layout.stages_on(pp)
        kinds.setdefault(tuple((len(stage.layers), stage.is_first, stage.is_last) for stage in stages), []).append(pp)
    return {group[0]: group for group in kinds.values()}


def rank_messages(config: Config, layout: Layout, pp: int, hardware: Hardware) -> MessageCounts:
    """What a rank of a pipeline rank sends (its first one: the others differ in peers)."""
    return step_messages(
        config, layout, pp * layout.dp * layout.cp * layout.tp, DEVICE_KINDS[hardware.entry.kind].logits_bytes
    )


def traffic_by_axis(
    config: Config, layout: Layout, pp: int, hardware: Hardware
) -> dict[str, tuple[int, int, IdealTime]]:
    """By axis: messages, bytes, and the time they take at peak rates."""
    out: dict[str, tuple[int, int, IdealTime]] = {}
    for message, times in rank_messages(config, layout, pp, hardware).items():
        axis = GROUP_AXES[message.group]
        count, size, ideal = out.get(axis, (0, 0, IdealTime()))
        out[axis] = (
            count + times,
            size + times * message.nbytes,
            ideal.plus(message_time(message, layout, hardware), times),
        )
    return out


def message_time(message: Message, layout: Layout, hardware: Hardware) -> IdealTime:
    """One message among the ranks of its group: rings inside an instance, then between instances, whose network all
    ranks of an instance share."""
    # What is received comes while something is sent. On Trainium both are a gather of two ranks, one after the other.
    if message.kind == "receive" and hardware.entry.kind != "trainium":
        return IdealTime()
    stage = layout.tp * layout.cp * layout.dp
    apart = {"cp": layout.tp, "dp_cp": layout.tp, "pp": stage, "tied_embedding": stage}.get(message.group, 1)
    one = message.kind in ("send", "receive")
    ranks = 2 if one else message.group_size
    inside = max(min(ranks, hardware.ranks_per_node // apart), 1)
    around = 1.0 if one or message.kind == "all_to_all" else (ranks - 1) / ranks
    # On a CPU gathers and scatters are sums too (compat.all_gather).
    summed = (
        message.kind in ("all_gather", "reduce_scatter") and DEVICE_KINDS[hardware.entry.kind].gathers_by_all_reduce
    )
    twice = message.kind == "all_reduce" or summed
    size = message.nbytes * around * (1 + twice)
    crossing = inside < ranks
    return IdealTime(
        link=size / hardware.link_bandwidth if inside > 1 else 0.0,
        network=size / (hardware.entry.network_bandwidth * inside / hardware.ranks_per_node) if crossing else 0.0,
        fixed=hardware.entry.link_latency * log2(ranks) + hardware.entry.network_latency * crossing,
    )


def _pipeline_rank_time(
    config: Config, layout: Layout, pp: int, hardware: Hardware, efficiency: Efficiency
) -> tuple[dict[str, float], dict[str, float], dict[str, float], float]:
    """Of a pipeline rank: what micro batches take, what comes once a step, what is hidden, and what could hide dp."""
    work = micro_batch_time(config, layout, pp, hardware)
    count = layout.micro_batches
    parts = {
        name: count * getattr(work, name) / getattr(efficiency, name) for name in ("matmul", "attention", "memory")
    }
    wires = traffic_by_axis(config, layout, pp, hardware)
    axes = {
        axis: wires[axis][2].at_efficiency(efficiency) if axis in wires else 0.0
        for axis in ("tp", "cp", "pp", "dp", "all")
    }
    # A ring sends keys and values while a block of attention is computed.
    spare = min(axes["cp"], parts["attention"]) if config.layout.cp_method == "ring" else 0.0
    weights = local_weight_count(config, layout, pp)
    shards = layout.dp * layout.cp if config.layout.zero else 1
    passes = 2 if config.optimizer.kind == "lamb" else 1
    update = passes * UPDATE_BYTES_PER_WEIGHT * weights / shards / hardware.memory_bandwidth / efficiency.memory
    once = {"dp": axes["dp"], "all": axes["all"], "update": update}
    # Gradients leave while the last backward pass goes on, weights come while the next forward pass does; with ZeRO-2
    # and 3 in every micro batch. The published Trainium runs did one after the other.
    overlaps = sum(parts.values()) / (1 if config.layout.zero >= 2 else count) if hardware.entry.kind == "gpu" else 0.0
    sends = {"tp": axes["tp"], "cp": axes["cp"] - spare, "pp": axes["pp"]}
    named = {"matmul": parts["matmul"], "attention": parts["attention"], "memory": parts["memory"]}
    return named | sends, once, {"cp": spare}, overlaps


@cache
def _blueprint(model: AnyModelConfig) -> Blueprint:
    return family_of(model).blueprint(model)


def local_weight_count(config: Config, layout: Layout, pp: int) -> int:
    """Weights of a rank."""
    return sum(prod(each.shape) for each in local_params(config.model, layout.tp, layout.stages_on(pp)).values())


def micro_batch_time(config: Config, layout: Layout, pp: int, hardware: Hardware) -> IdealTime:
    """Forward and backward of one micro batch on one rank."""
    out = IdealTime()
    for stage in layout.stages_on(pp):
        for piece in (
            *[block_time(config, layout, hardware)] * len(stage.layers),
            *_head_time(config, layout, hardware, stage.is_last),
        ):
            out = out.plus(piece)
    if hardware.entry.kind != "gpu":  # where the products do not add to the sum of gradients themselves
        size = 4 if config.precision.grad_accum_dtype == "fp32" else 2
        width = 4 if config.precision.compute_dtype == "fp32" else 2
        out = out.plus(
            IdealTime(memory=local_weight_count(config, layout, pp) * (2 * size + width) / hardware.memory_bandwidth)
        )
    return out


def block_time(config: Config, layout: Layout, hardware: Hardware) -> IdealTime:
    """One block: products, attention, and everything else that passes through memory."""
    c, tp = config.model, layout.tp
    blueprint, tokens = _blueprint(c), _micro_batch_tokens(config, layout, hardware)
    width = 4 if config.precision.compute_dtype == "fp32" else 2
    local = {
        row.name.split(".")[-2]: prod(blueprint.local_shape(row.name.replace("*", "0"), tp))
        for row in blueprint.specs
        if row.pipeline_stage == "block" and row.flops_tokens == "tokens"
    }
    all_weights = sum(local.values())
    again, core = _recomputed_work(config, layout, local)
    flops = 2 * tokens * (3 * all_weights + again)
    kind = {"fp32": "fp32", "fp8": "fp8"}.get(config.precision.kind, "bf16")
    own = c.heads * c.head_size // tp
    keys = config.data.seq_len * (NON_PADDING_SHARE if _packs_batches(config, layout, hardware) else 1)
    causal = 0.5 if not isinstance(c, BertConfig) and hardware.entry.kind != "trainium" else 1.0
    back = 2.5 if hardware.entry.kind != "trainium" else 2.0  # kernels that keep no scores make them again
    attention = 4 * own * tokens * keys * causal * (1 + back + core)
    split = tp if config.layout.sequence_parallel else 1
    # Elements that go through memory for each token, forward and backward: norms and residual sums, the activation,
    # positions, and attention's own reading and writing.
    gated = isinstance(c, LlamaConfig)
    norms = (14 + 3) * c.hidden if gated else 19 * c.hidden
    moved = norms / split + ((8 if gated else 5) * c.ffn_size + 10 * c.heads * c.head_size * gated) / tp + 12 * own
    size = tokens * moved * width
    if not gated and hardware.entry.kind == "trainium":  # as the published runs of GPT and BERT did it
        size += SCORE_MEMORY_PASSES * width * own / c.head_size * tokens * keys * (1 + core / 3)
    if config.precision.kind == "fp8":  # casting what products read: the largest value, then twice in 8 bits
        cast = 8 * c.hidden + 3 * c.ffn_size / tp
        size += tokens * cast * 6
    return IdealTime(
        flops / hardware.peak_flops(kind),
        attention / hardware.peak_flops("fp32" if kind == "fp32" else "bf16"),
        size / hardware.memory_bandwidth,
    )


def _recomputed_work(config: Config, layout: Layout, local: dict[str, int]) -> tuple[int, int]:
    """Weights whose products are made again in backward, and whether attention is. What a part ends with is not."""
    kind, parts = config.recompute.kind, set(config.recompute.modules)
    inside = sum(size for name, size in local.items() if name in ("q", "k", "v", "qkv"))
    mlp = sum(size for name, size in local.items() if name in ("gate_up", "gate", "up"))
    if kind == "full":
        return sum(local.values()) - local["down"], 1
    attention = "attention" in parts
    core = attention or (layout.cp == 1 and (kind == "attention" or "core_attention" in parts))
    return inside * attention + mlp * ("mlp" in parts), int(core)


def _head_time(config: Config, layout: Layout, hardware: Hardware, last: bool) -> Iterator[IdealTime]:
    """The head and its loss. (An embedding is a look-up; its bytes are not counted.)"""
    if not last:
        return
    c, tp = config.model, layout.tp
    words = -(-c.vocab // tp)
    masked = config.train.micro_batch * config.data.max_predictions
    seen = {
        "tokens": _micro_batch_tokens(config, layout, hardware),
        "masked": masked,
        "first": config.train.micro_batch,
        "nothing": 0,
    }
    blueprint = _blueprint(c)
    forward = sum(
        2 * prod(blueprint.local_shape(row.name, tp)) * seen[row.flops_tokens]
        for row in blueprint.specs
        if row.pipeline_stage == "last"
    )
    if blueprint.tied_head:
        forward += 2 * words * c.hidden * seen[blueprint.tied_head[2]]
    logits = words * (masked if isinstance(c, BertConfig) else seen["tokens"])
    kind = "fp32" if config.precision.kind == "fp32" else "bf16"
    yield IdealTime(
        3 * forward / hardware.peak_flops(kind), memory=LOSS_BYTES_PER_LOGIT * logits / hardware.memory_bandwidth
    )


def _micro_batch_tokens(config: Config, layout: Layout, hardware: Hardware) -> float:
    whole = config.train.micro_batch * config.data.seq_len / layout.cp
    return whole * NON_PADDING_SHARE if _packs_batches(config, layout, hardware) else whole


def _packs_batches(config: Config, layout: Layout, hardware: Hardware) -> bool:
    """Whether samples leave their padding behind (train.loop does so there)."""
    alone = layout.tp == layout.pp == layout.cp == 1
    return hardware.entry.kind == "gpu" and alone and isinstance(config.model, BertConfig)
