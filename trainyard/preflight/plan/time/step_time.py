"""Predicted time of a step: the least work that the hardware must do, divided by the efficiency that runs reach.

For every pipeline rank the work of a micro batch is counted in a trace: FLOPs of GEMMs and of attention,
bytes that other passes move through memory, bytes that messages move over links and over the network. Each count
divided by its peak rate is an ideal time. Each ideal time divided by an efficiency, a number below 1 that
bench/calibrate.py fits to measured runs, is the predicted time. Overlap is subtracted; the pipeline bubble and the
update are added. docs/internals/time-model.md has the formulas.
"""

from collections import Counter
from dataclasses import dataclass, replace
from functools import cache
from math import log2, prod
from typing import NamedTuple

from trainyard.core.constants import DTYPE_BYTES
from trainyard.core.splits import ModelShard
from trainyard.devices.kind import Efficiency
from trainyard.families.blueprint import Blueprint
from trainyard.families.flops import pair_flops
from trainyard.models import ModelConfig, blueprint_of
from trainyard.parallel.layout import Layout
from trainyard.preflight.plan.hardware.spec import Hardware
from trainyard.preflight.plan.planned_run import PlannedRun
from trainyard.preflight.plan.rank_parameters import first_alike, local_params_by_stage
from trainyard.preflight.plan.time.comm_volume import GROUP_AXES, Message, step_messages
from trainyard.preflight.plan.trace.work_trace import trace_work

UPDATE_BYTES_PER_WEIGHT = 30
"""Bytes that AdamW moves for each weight; LAMB moves twice as many."""
LOSS_BYTES_PER_LOGIT = 8
"""Bytes that the loss moves for each logit."""
HEAD_FORWARD_SHARE = 1 / 3
"""Share of the forward pass in the work of the head; the others are two gradients."""
NON_PADDING_SHARE = 0.75
"""Share of tokens that are not padding, where padding is removed (the share of synthetic samples)."""
SCHEDULE_BUBBLE = {"1f1b": 1.0, "zero_bubble": 1 / 3, "zbv": 1 / 6}
"""Bubble of a pipeline schedule, relative to 1F1B."""


class IdealTime(NamedTuple):
    """Seconds at peak rates for each resource; `fixed` seconds depend on no rate."""

    matmul: float = 0.0
    attention: float = 0.0
    memory: float = 0.0
    link: float = 0.0
    network: float = 0.0
    fixed: float = 0.0

    def at_efficiency(self, efficiency: Efficiency) -> float:
        return sum(ideal / fraction for ideal, fraction in zip(self, (*efficiency, 1.0), strict=True))

    def plus(self, other: "IdealTime", times: float = 1.0) -> "IdealTime":
        return IdealTime(*(a + b * times for a, b in zip(self, other, strict=True)))


@dataclass(frozen=True)
class StepTime:
    """A predicted step, in seconds of the slowest pipeline rank."""

    components: dict[str, float]
    """matmul, attention, memory, tp, cp, pp, bubble, dp, update, all: their sum is the step."""
    overlapped: dict[str, float]
    """Communication during computation, by axis."""
    slowest_pp: int
    """The pipeline rank that the others wait for."""

    @property
    def seconds(self) -> float:
        return sum(self.components.values())

    @property
    def micro_batch_seconds(self) -> float:
        """Seconds of all micro batches, without what occurs once a step."""
        return sum(self.components[name] for name in ("matmul", "attention", "memory", "tp", "cp", "ep", "pp"))


def predict_step(run: PlannedRun, hardware: Hardware, efficiency: Efficiency) -> StepTime:
    layout, distinct = run.layout, distinct_pipeline_ranks(run.model, run.layout)
    times = [_pipeline_rank_time(run, pp, hardware, efficiency) for pp in distinct]
    slowest = max(times, key=lambda time: time.micro_batch_seconds)
    # While the first micro batch travels down to the slowest rank and the last gradient travels up from it, that rank
    # waits for all others, one micro batch each.
    ranks = zip(times, distinct.values(), strict=True)
    others = sum(time.micro_batch_seconds * len(alike) for time, alike in ranks) - slowest.micro_batch_seconds
    bubble = others / layout.micro_batches / layout.vpp * SCHEDULE_BUBBLE[run.pipeline_schedule]
    return replace(slowest, components=slowest.components | {"bubble": bubble})


def distinct_pipeline_ranks(model: ModelConfig, layout: Layout) -> dict[int, list[int]]:
    """One pipeline rank of each kind, with all ranks that have the same work."""
    alike = first_alike(model)
    kinds: dict[tuple[object, ...], list[int]] = {}
    for pp in range(layout.pp):
        work = (
            (*(alike[layer] for layer in stage.layers), stage.is_first, stage.is_last) for stage in layout.stages_on(pp)
        )
        kinds.setdefault(tuple(work), []).append(pp)
    return {ranks[0]: ranks for ranks in kinds.values()}


def traffic_by_axis(run: PlannedRun, pp: int, hardware: Hardware) -> dict[str, tuple[int, int, IdealTime]]:
    """(messages, bytes, time at peak rates) by axis, of the first rank at pipeline position `pp`."""
    traffic: dict[str, tuple[int, int, IdealTime]] = {}
    first_rank = pp * run.layout.dp * run.layout.cp * run.layout.tp
    for message, times in step_messages(run, first_rank).items():
        axis = GROUP_AXES[message.group]
        count, size, ideal = traffic.get(axis, (0, 0, IdealTime()))
        ideal = ideal.plus(message_time(message, run.layout, hardware), times)
        traffic[axis] = count + times, size + times * message.nbytes, ideal
    return traffic


def message_time(message: Message, layout: Layout, hardware: Hardware) -> IdealTime:
    """Time of one message: rings inside an instance, then rings between instances, whose network all ranks of an
    instance share."""
    # A rank receives while it sends, unless both are an all-gather of two ranks, one after the other.
    if message.kind == "receive" and not hardware.entry.kind.sends_by_all_gather:
        return IdealTime()
    stage = layout.tp * layout.cp * layout.dp
    strides = {"cp": layout.tp, "dp_cp": layout.tp, "ep": layout.tp, "expert_dp": layout.tp * layout.ep}
    stride = {**strides, "pp": stage, "tied_embedding": stage}.get(message.group, 1)
    point_to_point = message.kind in ("send", "receive")
    ranks = 2 if point_to_point else message.group_size
    in_instance = max(min(ranks, hardware.ranks_per_node // stride), 1)
    to_neighbor = point_to_point or (message.kind == "all_to_all" and message.group == "cp")  # ring attention
    ring_share = 1.0 if to_neighbor else (ranks - 1) / ranks
    emulated = message.kind in ("all_gather", "reduce_scatter") and hardware.entry.kind.gathers_by_all_reduce
    rounds = 2 if message.kind == "all_reduce" or emulated else 1
    size = message.nbytes * ring_share * rounds
    crosses = in_instance < ranks
    network = hardware.entry.network_bandwidth * in_instance / hardware.ranks_per_node
    return IdealTime(
        link=size / hardware.link_bandwidth if in_instance > 1 else 0.0,
        network=size / network if crosses else 0.0,
        fixed=hardware.entry.link_latency * log2(ranks) + hardware.entry.network_latency * crosses,
    )


def _pipeline_rank_time(run: PlannedRun, pp: int, hardware: Hardware, efficiency: Efficiency) -> StepTime:
    """The step of one pipeline rank, without its bubble."""
    ideal = micro_batch_time(run, pp, hardware)
    count = run.layout.micro_batches
    names = ("matmul", "attention", "memory")
    compute = {name: count * getattr(ideal, name) / getattr(efficiency, name) for name in names}
    traffic = traffic_by_axis(run, pp, hardware)
    axes = dict.fromkeys(("tp", "cp", "ep", "pp", "dp", "all"), 0.0)
    axes |= {axis: ideal.at_efficiency(efficiency) for axis, (_, _, ideal) in traffic.items()}
    # A ring sends keys and values while a block of attention is computed.
    hidden_cp = min(axes["cp"], compute["attention"]) if run.cp_method == "ring" else 0.0
    weights = local_weight_count(run.model, run.layout, pp, bool(run.zero))
    update_bytes = run.rule.passes * UPDATE_BYTES_PER_WEIGHT * weights
    update = update_bytes / hardware.memory_bandwidth / efficiency.memory
    # Gradients are reduced during the last backward pass and weights gathered during the next forward pass; with ZeRO-2
    # and 3 in every micro batch. The published Trainium runs did not overlap them.
    can_hide_dp = sum(compute.values()) / (1 if run.zero >= 2 else count)
    hidden_dp = min(axes["dp"], can_hide_dp) if hardware.entry.kind.overlaps_gradients else 0.0
    exposed = {"tp": axes["tp"], "cp": axes["cp"] - hidden_cp, "ep": axes["ep"], "pp": axes["pp"]}
    per_step = {"bubble": 0.0, "dp": axes["dp"] - hidden_dp, "update": update, "all": axes["all"]}
    return StepTime(compute | exposed | per_step, {"cp": hidden_cp, "dp": hidden_dp}, pp)


@cache
def _blueprint(model: ModelConfig) -> Blueprint:
    return blueprint_of(model)


def local_weight_count(model: ModelConfig, layout: Layout, pp: int, sharded: bool = False) -> int:
    """Trained weights of a rank, or of its ZeRO shard."""
    shards = layout.dp * layout.cp if sharded else 1
    expert_shards = shards // layout.ep if sharded else 1
    sizes = _weights_by_stage(model, layout.model_shard(0), shards, expert_shards)
    stages, alike = layout.stages_on(pp), first_alike(model)
    first, last = any(stage.is_first for stage in stages), any(stage.is_last for stage in stages)
    ends = sizes["first"] * first + sizes["last"] * last + sizes["both"] * (first or last)
    return ends + sum(sizes[alike[layer]] for stage in stages for layer in stage.layers)


@cache
def _weights_by_stage(
    model: ModelConfig, model_shard: ModelShard, shards: int, expert_shards: int
) -> dict[str | int, int]:
    """Trained weights in a shard of a block of each kind, of the first and last stage, and of parameters that both
    have."""
    params = local_params_by_stage(model, model_shard)
    return {
        stage: sum(
            prod(param.shape) // (expert_shards if param.spec.experts else shards)
            for param in members
            if param.spec.trained
        )
        for stage, members in params.items()
    }


def micro_batch_time(run: PlannedRun, pp: int, hardware: Hardware) -> IdealTime:
    """Forward and backward pass of one micro batch on one rank, and the forward passes of an objective before these."""
    stages, precision = run.layout.stages_on(pp), run.precision
    layers = Counter(run.alike[layer] for stage in stages for layer in stage.layers)
    total, forward_passes = IdealTime(), run.preparation.forward_passes
    for layer, count in layers.items():
        total = total.plus(layer_time(run, hardware, layer), count)
        total = total.plus(layer_time(run, hardware, layer, forward_only=True), count * forward_passes)
    if any(stage.is_last for stage in stages):
        total = total.plus(_head_time(run, hardware), 1 + forward_passes * HEAD_FORWARD_SHARE)
    if not hardware.entry.kind.gpu_operators:
        # Without fused wgrad accumulation gradients are added in a pass over memory.
        gradient, compute = DTYPE_BYTES[precision.grad_accum_dtype], DTYPE_BYTES[precision.compute_dtype]
        moved = local_weight_count(run.model, run.layout, pp) * (2 * gradient + compute)
        total = total.plus(IdealTime(memory=moved / hardware.memory_bandwidth))
    return total


def layer_time(run: PlannedRun, hardware: Hardware, layer: int, forward_only: bool = False) -> IdealTime:
    """One transformer block, from its trace: matrix multiplications, attention, and all other passes over memory.
    `layer` is the first of its kind."""
    work, fused, share = trace_work(run, forward_only)[layer], hardware.entry.kind.fused_attention, _token_share(run)
    kind = "fp32" if run.precision.kind == "fp32" else "bf16"
    backward_factor = 2.5 if fused else 2.0  # kernels that do not save scores recompute them
    score_passes = 0 if fused else run.family.score_passes
    seq_len = run.data.seq_len
    causal_share = min(0.5, run.family.visible_keys(run.model, layer, seq_len) / seq_len)
    attention, moved = 0.0, share * work.moved_bytes
    for (call, backward), times in work.attention.items():
        visible = causal_share if call.causal and fused else 1.0
        attention += times * share**2 * call.flops * visible * (backward_factor if backward else 1.0)
        moved += times * share**2 * score_passes * call.scores * call.dtype.itemsize * (2 / 3 if backward else 1 / 3)
    matmul = work.matmul_flops / hardware.peak_flops(kind)
    if work.fp8_flops:
        matmul += work.fp8_flops / hardware.peak_flops("fp8")
    return IdealTime(share * matmul, attention / hardware.peak_flops(kind), moved / hardware.memory_bandwidth)


def _head_time(run: PlannedRun, hardware: Hardware) -> IdealTime:
    """The output head and its loss. The embedding, a look-up, is not counted."""
    model, tp, samples = run.model, run.layout.tp, run.train.micro_batch
    local_vocab = -(-model.vocab // tp)
    masked = samples * run.data.max_predictions
    rows: dict[str, float] = {
        "tokens": samples * run.data.seq_len / run.layout.cp * _token_share(run),
        "masked": masked,
        "first": samples,
        "nothing": 0,
    }
    blueprint = _blueprint(model)
    flops = sum(
        2 * prod(blueprint.local_shape(spec.name, ModelShard(tp))) * spec.flops_share * rows[spec.flops_tokens]
        * spec.matmul_passes
        for spec in blueprint.specs
        if spec.pipeline_stage == "last"
    )  # fmt: skip
    if blueprint.tied_head:
        vocab, _, tokens = blueprint.tied_head
        flops += 2 * -(-vocab // tp) * model.hidden * rows[tokens] * blueprint.tied_head_passes
    further, last = len(model.mtp_blocks), model.layers - 1  # blocks like the last layer, each with its logits
    pairs = rows["tokens"] * run.family.visible_keys(model, last, run.data.seq_len)
    flops += further * 3 * pair_flops(model, last) / tp * pairs
    logits = local_vocab * (masked if run.family.has_masked_positions else rows["tokens"]) * (1 + further)
    kind = "fp32" if run.precision.kind == "fp32" else "bf16"
    return IdealTime(
        matmul=flops / hardware.peak_flops(kind),
        memory=LOSS_BYTES_PER_LOGIT * logits / hardware.memory_bandwidth,
    )


def _token_share(run: PlannedRun) -> float:
    """Share of the tokens that are computed."""
    return NON_PADDING_SHARE if run.packed_batch else 1.0
