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

from trainyard.config.model_schema import BertModel, LlamaModel
from trainyard.config.schema import Config
from trainyard.models import AnyModel, family
from trainyard.models.blueprint import Blueprint
from trainyard.parallel.layout import Layout
from trainyard.plan.hardware.spec import Hardware
from trainyard.plan.memory.device_kinds import KINDS
from trainyard.plan.rank_parameters import parameters
from trainyard.plan.time.comm_volume import AXES, Counts, Message, messages

UPDATE = 30
"""Bytes that AdamW moves for each weight; LAMB twice that."""
LOGIT = 8
"""Bytes that the loss moves for each logit."""
SCORES = 12
"""Times that each attention score goes through memory where no kernel keeps it on the chip (on Trainium there is one
for Llama)."""
FILLED = 0.75
"""Part of BERT's tokens that are not padding, where padding is left out (that of generated samples)."""
BUBBLE = {"1f1b": 1.0, "zero_bubble": 1 / 3, "zbv": 1 / 6}
"""What a schedule leaves of the bubble of 1F1B."""


class Efficiency(NamedTuple):
    """Parts of the peak rates that runs reach, 0 to 1."""

    product: float = 1.0
    attention: float = 1.0
    memory: float = 1.0
    link: float = 1.0
    network: float = 1.0


_TRN1 = Efficiency(0.83, 0.83, 0.23, 0.33, 0.23)
_HOPPER = Efficiency(0.66, 0.65, 0.58, 0.7, 0.7)
FITTED = {"trn1": _TRN1, "trn2": _TRN1, "trn3": _TRN1, "gpu": _HOPPER, "cpu": Efficiency(0.8, 0.4, 0.5, 1.0, 1.0)}
"""By generation of Trainium, or kind. trn1 and gpu: `published.fit`, rounded. Nobody publishes training on trn2 or
trn3: as trn1. Of GPUs, link and network are guesses; so are all of a CPU, whose peaks are measured."""


class Ideal(NamedTuple):
    """Seconds at peak rates, by what is busy; `fixed` are seconds that no rate shortens."""

    product: float = 0.0
    attention: float = 0.0
    memory: float = 0.0
    link: float = 0.0
    network: float = 0.0
    fixed: float = 0.0

    def real(self, e: Efficiency) -> float:
        return sum(ideal / reached for ideal, reached in zip(self, (*e, 1.0), strict=True))

    def plus(self, other: "Ideal", times: float = 1.0) -> "Ideal":
        return Ideal(*(a + b * times for a, b in zip(self, other, strict=True)))


def efficiency(on: Hardware) -> Efficiency:
    return FITTED[on.entry.generation or on.entry.kind]


@dataclass(frozen=True)
class Step:
    """A predicted step, in seconds of the slowest pipeline rank."""

    parts: dict[str, float]
    """products, attention, memory, tp, cp, pp, bubble, dp, update, all: they add up to the step."""
    hidden: dict[str, float]
    """Communication that is done while something is computed, by axis."""
    slowest: int
    """Pipeline rank that the others wait for."""

    @property
    def seconds(self) -> float:
        return sum(self.parts.values())


def step(config: Config, layout: Layout, on: Hardware, e: Efficiency) -> Step:
    found = {pp: _rank(config, layout, pp, on, e) for pp in distinct(layout)}
    alike = {pp: found[same] for same, group in distinct(layout).items() for pp in group}
    times = {pp: sum(parts.values()) for pp, (parts, _, _, _) in found.items()}
    slowest = max(times, key=lambda pp: times[pp])
    parts, once, hidden, overlaps = found[slowest]
    # While the slowest rank's first micro batch is on its way down and its last one's gradient on its way up, it waits
    # for all other ranks, one micro batch each.
    others = sum(sum(parts.values()) for parts, _, _, _ in alike.values()) - times[slowest]
    bubble = others / layout.micro_batches / layout.vpp * BUBBLE[config.layout.schedule]
    spare = min(once["dp"], overlaps)
    after = {"bubble": bubble, "dp": once["dp"] - spare, "update": once["update"], "all": once["all"]}
    return Step(parts | after, hidden | {"dp": spare}, slowest)


def distinct(layout: Layout) -> dict[int, list[int]]:
    """One pipeline rank of each kind, with all that have the same to do."""
    kinds: dict[tuple[object, ...], list[int]] = {}
    for pp in range(layout.pp):
        stages = layout.stages_of(pp)
        kinds.setdefault(tuple((len(stage.layers), stage.first, stage.last) for stage in stages), []).append(pp)
    return {group[0]: group for group in kinds.values()}


def sent(config: Config, layout: Layout, pp: int, on: Hardware) -> Counts:
    """What a rank of a pipeline rank sends (its first one: the others differ in peers)."""
    return messages(config, layout, pp * layout.dp * layout.cp * layout.tp, KINDS[on.entry.kind].logits)


def on_the_wire(config: Config, layout: Layout, pp: int, on: Hardware) -> dict[str, tuple[int, int, Ideal]]:
    """By axis: messages, bytes, and the time they take at peak rates."""
    out: dict[str, tuple[int, int, Ideal]] = {}
    for message, times in sent(config, layout, pp, on).items():
        axis = AXES[message.group]
        count, size, ideal = out.get(axis, (0, 0, Ideal()))
        out[axis] = count + times, size + times * message.size, ideal.plus(wire(message, layout, on), times)
    return out


def wire(message: Message, layout: Layout, on: Hardware) -> Ideal:
    """One message among the ranks of its group: rings inside an instance, then between instances, whose network all
    ranks of an instance share."""
    # What is received comes while something is sent. On Trainium both are a gather of two ranks, one after the other.
    if message.kind == "receive" and on.entry.kind != "trainium":
        return Ideal()
    stage = layout.tp * layout.cp * layout.dp
    apart = {"cp": layout.tp, "data": layout.tp, "pp": stage, "tied": stage}.get(message.group, 1)
    one = message.kind in ("send", "receive")
    ranks = 2 if one else message.ranks
    inside = max(min(ranks, on.node // apart), 1)
    around = 1.0 if one or message.kind == "all_to_all" else (ranks - 1) / ranks
    # On a CPU gathers and scatters are sums too (compat.all_gather).
    summed = message.kind in ("all_gather", "reduce_scatter") and KINDS[on.entry.kind].sums
    twice = message.kind == "all_reduce" or summed
    size = message.size * around * (1 + twice)
    crossing = inside < ranks
    return Ideal(
        link=size / on.link if inside > 1 else 0.0,
        network=size / (on.entry.network * inside / on.node) if crossing else 0.0,
        fixed=on.entry.hop * log2(ranks) + on.entry.jump * crossing,
    )


def _rank(
    config: Config, layout: Layout, pp: int, on: Hardware, e: Efficiency
) -> tuple[dict[str, float], dict[str, float], dict[str, float], float]:
    """Of a pipeline rank: what micro batches take, what comes once a step, what is hidden, and what could hide dp."""
    work = micro_batch(config, layout, pp, on)
    count = layout.micro_batches
    parts = {name: count * getattr(work, name) / getattr(e, name) for name in ("product", "attention", "memory")}
    wires = on_the_wire(config, layout, pp, on)
    axes = {axis: wires[axis][2].real(e) if axis in wires else 0.0 for axis in ("tp", "cp", "pp", "dp", "all")}
    # A ring sends keys and values while a block of attention is computed.
    spare = min(axes["cp"], parts["attention"]) if config.layout.context == "ring" else 0.0
    weights = held(config, layout, pp)
    shards = layout.dp * layout.cp if config.layout.zero else 1
    passes = 2 if config.optimizer.kind == "lamb" else 1
    update = passes * UPDATE * weights / shards / on.bandwidth / e.memory
    once = {"dp": axes["dp"], "all": axes["all"], "update": update}
    # Gradients leave while the last backward pass goes on, weights come while the next forward pass does; with ZeRO-2
    # and 3 in every micro batch. The published Trainium runs did one after the other.
    overlaps = sum(parts.values()) / (1 if config.layout.zero >= 2 else count) if on.entry.kind == "gpu" else 0.0
    sends = {"tp": axes["tp"], "cp": axes["cp"] - spare, "pp": axes["pp"]}
    named = {"products": parts["product"], "attention": parts["attention"], "memory": parts["memory"]}
    return named | sends, once, {"cp": spare}, overlaps


@cache
def _blueprint(model: AnyModel) -> Blueprint:
    return family(model).blueprint(model)


def held(config: Config, layout: Layout, pp: int) -> int:
    """Weights of a rank."""
    return sum(prod(each.shape) for each in parameters(config.model, layout.tp, layout.stages_of(pp)).values())


def micro_batch(config: Config, layout: Layout, pp: int, on: Hardware) -> Ideal:
    """Forward and backward of one micro batch on one rank."""
    out = Ideal()
    for stage in layout.stages_of(pp):
        for piece in (*[block(config, layout, on)] * len(stage.layers), *_ends(config, layout, on, stage.last)):
            out = out.plus(piece)
    if on.entry.kind != "gpu":  # where the products do not add to the sum of gradients themselves
        size = 4 if config.precision.accumulate == "fp32" else 2
        width = 4 if config.precision.compute == "fp32" else 2
        out = out.plus(Ideal(memory=held(config, layout, pp) * (2 * size + width) / on.bandwidth))
    return out


def block(config: Config, layout: Layout, on: Hardware) -> Ideal:
    """One block: products, attention, and everything else that passes through memory."""
    c, tp = config.model, layout.tp
    blueprint, tokens = _blueprint(c), _tokens(config, layout, on)
    width = 4 if config.precision.compute == "fp32" else 2
    local = {
        row.name.split(".")[-2]: prod(blueprint.local_shape(row.name.replace("*", "0"), tp))
        for row in blueprint.rows
        if row.place == "block" and row.sees == "tokens"
    }
    all_weights = sum(local.values())
    again, core = _recomputed(config, layout, local)
    flops = 2 * tokens * (3 * all_weights + again)
    kind = {"fp32": "fp32", "fp8": "fp8"}.get(config.precision.kind, "bf16")
    own = c.heads * c.head_size // tp
    keys = config.data.sequence * (FILLED if _packs(config, layout, on) else 1)
    causal = 0.5 if not isinstance(c, BertModel) and on.entry.kind != "trainium" else 1.0
    back = 2.5 if on.entry.kind != "trainium" else 2.0  # kernels that keep no scores make them again
    attention = 4 * own * tokens * keys * causal * (1 + back + core)
    split = tp if config.layout.sequence_parallel else 1
    # Elements that go through memory for each token, forward and backward: norms and residual sums, the activation,
    # positions, and attention's own reading and writing.
    gated = isinstance(c, LlamaModel)
    norms = (14 + 3) * c.hidden if gated else 19 * c.hidden
    moved = norms / split + ((8 if gated else 5) * c.inner + 10 * c.heads * c.head_size * gated) / tp + 12 * own
    size = tokens * moved * width
    if not gated and on.entry.kind == "trainium":  # as the published runs of GPT and BERT did it
        size += SCORES * width * own / c.head_size * tokens * keys * (1 + core / 3)
    if config.precision.kind == "fp8":  # casting what products read: the largest value, then twice in 8 bits
        cast = 8 * c.hidden + 3 * c.inner / tp
        size += tokens * cast * 6
    return Ideal(flops / on.peak(kind), attention / on.peak("fp32" if kind == "fp32" else "bf16"), size / on.bandwidth)


def _recomputed(config: Config, layout: Layout, local: dict[str, int]) -> tuple[int, int]:
    """Weights whose products are made again in backward, and whether attention is. What a part ends with is not."""
    kind, parts = config.recompute.kind, set(config.recompute.parts)
    inside = sum(size for name, size in local.items() if name in ("q", "k", "v", "qkv"))
    mlp = sum(size for name, size in local.items() if name in ("gate_up", "gate", "up"))
    if kind == "full":
        return sum(local.values()) - local["down"], 1
    attention = "attention" in parts
    core = attention or (layout.cp == 1 and (kind == "attention" or "core_attention" in parts))
    return inside * attention + mlp * ("mlp" in parts), int(core)


def _ends(config: Config, layout: Layout, on: Hardware, last: bool) -> Iterator[Ideal]:
    """The head and its loss. (An embedding is a look-up; its bytes are not counted.)"""
    if not last:
        return
    c, tp = config.model, layout.tp
    words = -(-c.vocab // tp)
    masked = config.train.micro_batch * config.data.predictions
    seen = {"tokens": _tokens(config, layout, on), "masked": masked, "first": config.train.micro_batch, "nothing": 0}
    blueprint = _blueprint(c)
    forward = sum(
        2 * prod(blueprint.local_shape(row.name, tp)) * seen[row.sees] for row in blueprint.rows if row.place == "last"
    )
    if blueprint.tied_head:
        forward += 2 * words * c.hidden * seen[blueprint.tied_head[2]]
    logits = words * (masked if isinstance(c, BertModel) else seen["tokens"])
    kind = "fp32" if config.precision.kind == "fp32" else "bf16"
    yield Ideal(3 * forward / on.peak(kind), memory=LOGIT * logits / on.bandwidth)


def _tokens(config: Config, layout: Layout, on: Hardware) -> float:
    whole = config.train.micro_batch * config.data.sequence / layout.cp
    return whole * FILLED if _packs(config, layout, on) else whole


def _packs(config: Config, layout: Layout, on: Hardware) -> bool:
    """Whether samples leave their padding behind (train.loop does so there)."""
    alone = layout.tp == layout.pp == layout.cp == 1
    return on.entry.kind == "gpu" and alone and isinstance(config.model, BertModel)
