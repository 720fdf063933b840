"""The messages that one rank sends in a step, derived from shapes and from a trace of layers.

They equal what the Trainer sends, for every family and layout: tests/preflight/plan/test_comm_volume.py counts the
messages of dry runs as any rank of hundreds. The shape exchange between pipeline neighbors in the first step is not
included.
"""

from collections import Counter
from collections.abc import Iterator
from itertools import accumulate, pairwise
from math import prod
from typing import NamedTuple

from trainyard.config.schema import Config
from trainyard.core.user_code import is_user_path
from trainyard.families import family_of
from trainyard.families.family import LOSSES
from trainyard.parallel.flat_buffer import FlatBuffer
from trainyard.parallel.layout import Layout
from trainyard.preflight.plan.layer_kinds import first_alike, traced_alike
from trainyard.preflight.plan.rank_parameters import (
    LocalParam,
    local_params,
    local_params_by_stage,
    planned_rule,
    rank_flat_buffer,
)
from trainyard.preflight.plan.trace.part_recorder import EMBEDDING, HEAD, LOSS
from trainyard.preflight.plan.trace.work_trace import trace_work
from trainyard.train.decisions import loss_chunk_tokens
from trainyard.train.optim.update_rule import UpdateShape
from trainyard.train.status import StepStatus

ELEMENT_BYTES = {"bfloat16": 2, "float32": 4, "int32": 4}
DTYPE_NAMES = {"bf16": "bfloat16", "fp32": "float32"}
STATUS_VALUES = len(StepStatus._fields)
"""Values that a rank shares with all others in every step: its stop flag and its save status."""
GROUP_AXES = {
    "tp": "tp",
    "kv_replicas": "tp",
    "cp": "cp",
    "pp": "pp",
    "tied_embedding": "pp",
    "dp_cp": "dp",
    "ep": "ep",
    "expert_dp": "dp",
    "dp_cp_tp": "all",
    "world": "all",
}
"""The axis that the messages of each group of a `Mesh` count for."""


class Message(NamedTuple):
    """A collective, or a send or receive."""

    group: str
    """Process group, as `Mesh` names it."""
    group_size: int
    kind: str
    dtype: str
    nbytes: int
    """Bytes of the input or of the output, whichever is larger."""
    peer: int | None = None
    """For send and receive, the other rank's index in the group."""


MessageCounts = Counter[Message]


class _RankMessages:
    """Collects the messages of one rank."""

    def __init__(self, config: Config, layout: Layout, rank: int) -> None:
        self.config, self.layout, self.rank, self.coords = config, layout, rank, layout.coords(rank)
        self.counts = MessageCounts()
        self.stages = layout.stages_on(self.coords["pp"])
        self.shards = layout.dp * layout.cp
        """Ranks that hold the same weights outside experts."""
        self.tokens = config.train.micro_batch * config.data.seq_len // layout.cp
        """Tokens of a micro batch on one context-parallel rank."""
        self.compute_dtype = DTYPE_NAMES[config.precision.compute_dtype]
        self.reduce_dtype = DTYPE_NAMES[config.precision.grad_reduce_dtype]

    def add(
        self, group: str, group_size: int, kind: str, dtype: str, elements: int, times: int = 1, peer: int | None = None
    ) -> None:
        if group_size > 1 and elements and times:
            self.counts[Message(group, group_size, kind, dtype, elements * ELEMENT_BYTES[dtype], peer)] += times

    def data_group(self, of_experts: bool) -> tuple[str, int]:
        """Name and size of the group that holds the same values of a parameter."""
        ep = self.layout.ep if of_experts else 1
        return "expert_dp" if ep > 1 else "dp_cp", self.shards // ep


def step_messages(config: Config, layout: Layout, rank: int, logits_bytes: int) -> MessageCounts:
    """Messages of a step of the rank at position `rank` of the layout. `logits_bytes` is the device's
    max_logits_bytes."""
    messages = _RankMessages(config, layout, rank)
    _add_model(messages, logits_bytes)
    _add_pipeline(messages)
    params = local_params(config.model, layout.model_shard(rank), messages.stages)
    (_add_data_parallel if layout.zero < 2 else _add_fsdp)(messages, params)
    loss = config.train.loss or family_of(config.model).loss
    loss_terms = 0 if is_user_path(loss) else len(LOSSES.find(loss).term_names)
    messages.add("dp_cp", messages.shards, "all_reduce", "float32", loss_terms)  # numbers of labels with a loss
    messages.add("world", layout.world_size, "all_reduce", "float32", 2 * max(loss_terms, 1) + STATUS_VALUES)
    return messages.counts


def _add_model(messages: _RankMessages, logits_bytes: int) -> None:
    """Messages of tensor and context parallelism inside the model, as a trace of a layer of each kind sends them, and
    of the loss."""
    config, layout = messages.config, messages.layout
    if layout.tp == layout.cp == layout.ep == 1:
        return
    work, alike = trace_work(config, layout), traced_alike(config)
    parts = Counter(alike[layer] for stage in messages.stages for layer in stage.layers)
    first, last = (any(getattr(stage, end) for stage in messages.stages) for end in ("is_first", "is_last"))
    parts.update({EMBEDDING: int(first), HEAD: int(last), LOSS: int(last)})
    for part, times in parts.items():
        for message, count in work[part].messages.items() if part in work and times else ():
            messages.counts[Message(*message)] += count * times * layout.micro_batches
    if not last:
        return
    # The loss: for each token of a chunk of logits the maximum, then the sum and the label's logit.
    masked = config.train.micro_batch * config.data.max_predictions
    tokens = masked if family_of(config.model).has_masked_positions else messages.tokens
    chunk = loss_chunk_tokens(tokens, -(-config.model.vocab // layout.tp), logits_bytes)
    for size, times in ((chunk, tokens // chunk), (tokens % chunk, 1)):
        messages.add("tp", layout.tp, "all_reduce", "float32", size, layout.micro_batches * times)
        messages.add("tp", layout.tp, "all_reduce", "float32", 2 * size, layout.micro_batches * times)


def _add_pipeline(messages: _RankMessages) -> None:
    """Activations to the next stage and gradients to the previous one, for this rank's tokens."""
    layout = messages.layout
    token_shards = layout.tp if messages.config.layout.sequence_parallel else 1
    size = messages.tokens * messages.config.model.hidden // token_shards
    for stage in messages.stages:
        neighbors = [stage.index - 1] * (not stage.is_first) + [stage.index + 1] * (not stage.is_last)
        for peer in map(layout.stage_owner, neighbors):
            for kind in ("send", "receive") if peer != messages.coords["pp"] else ():
                messages.add("pp", layout.pp, kind, messages.compute_dtype, size, layout.micro_batches, peer)


def _add_data_parallel(messages: _RankMessages, params: dict[str, LocalParam]) -> None:
    """Gradients once a step and, with ZeRO-1, new weights: bucket by bucket of the flat buffer."""
    config = messages.config
    flat = rank_flat_buffer(config, params, messages.layout)
    for bucket in flat.buckets:
        group = messages.data_group(bucket.of_experts)
        if not messages.layout.zero:
            size = bucket.full_range.stop - bucket.full_range.start
            messages.add(*group, "all_reduce", messages.reduce_dtype, size)
            continue
        size = bucket.padded_elements
        messages.add(*group, "reduce_scatter", messages.reduce_dtype, size)
        messages.add(*group, "all_gather", messages.compute_dtype, size)
    _add_replicated_params(messages, params, flat, DTYPE_NAMES[config.precision.grad_accum_dtype])


def _add_fsdp(messages: _RankMessages, params: dict[str, LocalParam]) -> None:
    """For every micro batch and block: weights are gathered (with ZeRO-3 twice), gradients reduce-scattered."""
    config, micro_batches = messages.config, messages.layout.micro_batches

    def padded_elements(members: list[LocalParam], shards: int) -> int:
        """Elements of a group of parameters, each padded to equal shards."""
        return sum(-(-param.shape[0] // shards) * shards * prod(param.shape[1:]) for param in members)

    by_stage = local_params_by_stage(config.model, messages.layout.model_shard(messages.rank))
    alike = first_alike(config.model)
    block_gathers = 2 if config.layout.zero == 3 else 1
    for stage in messages.stages:
        ends = by_stage["first"] * stage.is_first + by_stage["last"] * stage.is_last
        ends = by_stage["both"] * (stage.is_first or stage.is_last) + ends
        kinds = Counter(alike[layer] for layer in stage.layers)
        blocks = ((by_stage[kind], count, block_gathers) for kind, count in kinds.items())
        for members, count, gathers in (*blocks, (ends, 1, 1)):
            by_group: dict[tuple[str, int], list[LocalParam]] = {}
            for param in members:
                by_group.setdefault(messages.data_group(bool(param.spec.experts)), []).append(param)
            for group, params_of_group in by_group.items():
                size, times = padded_elements(params_of_group, group[1]), micro_batches * count
                messages.add(*group, "all_gather", messages.compute_dtype, size, times * gathers)
                messages.add(*group, "reduce_scatter", messages.reduce_dtype, size, times)
    master_dtype = "bfloat16" if config.precision.kind == "bf16_sr" else "float32"
    _add_replicated_params(messages, params, rank_flat_buffer(config, params, messages.layout), master_dtype)


def _add_replicated_params(
    messages: _RankMessages, params: dict[str, LocalParam], flat: FlatBuffer, dtype: str
) -> None:
    """Gradients of parameters that several tensor-parallel or pipeline ranks hold, as far as they are in this rank's
    shard, and the norms."""
    layout, zero = messages.layout, messages.layout.zero
    elements = Counter[str]()
    for name, param in params.items():
        shard = layout.data_shard(messages.rank, flat.spans[name].of_experts)[1] if zero else 0
        spec, rows, width = param.spec, len(flat.shard_row_range(name, shard)), prod(param.shape[1:])
        if spec.pipeline_stage == "both":
            elements["tied_embedding"] += rows * width
        if spec.tp_dim is None:
            summed = spec.sums_tp_gradient(messages.config.layout.sequence_parallel)
            elements["tp"] += rows * width * summed
            continue
        for count, replicas in _replicated_rows(param, flat.spans[name].shard_rows, rows):
            elements["kv_replicas" if replicas == layout.kv_replication else "tp"] += count * width
    messages.add("tp", layout.tp, "all_reduce", dtype, elements["tp"])
    messages.add("kv_replicas", layout.kv_replication, "all_reduce", dtype, elements["kv_replicas"])
    ends = {0, layout.stage_owner(layout.pp * layout.vpp - 1)}
    tied = len(ends) if messages.coords["pp"] in ends else 1
    messages.add("tied_embedding", tied, "all_reduce", dtype, elements["tied_embedding"])
    # The norms of each parameter, then the global norm.
    group, size = ("dp_cp_tp", layout.tp * messages.shards) if zero or layout.ep > 1 else ("tp", layout.tp)
    rule = planned_rule(messages.config)
    messages.add(group, size, "all_reduce", "float32", len(flat.spans), rule.norms_per_parameter)
    messages.add("pp", layout.pp, "all_reduce", "float32", 1)
    for message in rule.messages(UpdateShape(layout, messages.config.precision, flat, zero >= 2)):
        groups = {"data": messages.data_group(message.of_experts), "tp": ("tp", layout.tp), "ep": ("ep", layout.ep)}
        messages.add(*groups[message.group], message.kind, messages.compute_dtype, message.elements)


def _replicated_rows(param: LocalParam, shard_rows: int, rows: int) -> Iterator[tuple[int, int]]:
    """(rows, replicas): the rows of this rank's shard, of which it has `rows`, that are summed over `replicas` ranks.

    A shard is cut wherever a part of the parameter begins in any shard, and a range is summed on all shards if any of
    them needs it, so that all ranks run the same graph.
    """
    if len(param.replication) == 1:
        replicas = param.replication[0][1]
        if replicas > 1:
            yield rows, replicas
        return
    ends = list(accumulate(size for size, _ in param.replication))
    parts = [(end - size, end, replicas) for end, (size, replicas) in zip(ends, param.replication, strict=True)]
    for begin, end in pairwise([*sorted({start % shard_rows for start, _, _ in parts} | {0}), shard_rows]):
        # The first row of a part among begin, begin + shard_rows, ...: there may be thousands of shards.
        needed = {
            replicas
            for start, stop, replicas in parts
            if begin + max(-(-(start - begin) // shard_rows), 0) * shard_rows < stop
        }
        for replicas in needed - {1}:
            yield max(min(end, rows) - begin, 0), replicas
