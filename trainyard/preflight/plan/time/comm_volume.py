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

from trainyard.core.user_code import is_user_path
from trainyard.families.family import LOSSES
from trainyard.parallel.flat_buffer import FlatBuffer
from trainyard.preflight.plan.planned_run import PlannedRun
from trainyard.preflight.plan.rank_parameters import LocalParam, first_alike, local_params, local_params_by_stage
from trainyard.preflight.plan.trace.part_recorder import EMBEDDING, HEAD, LOSS
from trainyard.preflight.plan.trace.work_trace import trace_work
from trainyard.train.decisions import loss_chunk_tokens
from trainyard.train.loss import UserLoss
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

    def __init__(self, run: PlannedRun, rank: int) -> None:
        self.run, self.layout, self.rank, self.coords = run, run.layout, rank, run.layout.coords(rank)
        self.counts = MessageCounts()
        self.stages = run.layout.stages_on(self.coords["pp"])
        self.compute_dtype = DTYPE_NAMES[run.precision.compute_dtype]
        self.reduce_dtype = DTYPE_NAMES[run.precision.grad_reduce_dtype]

    def add(
        self, group: str, group_size: int, kind: str, dtype: str, elements: int, times: int = 1, peer: int | None = None
    ) -> None:
        if group_size > 1 and elements and times:
            self.counts[Message(group, group_size, kind, dtype, elements * ELEMENT_BYTES[dtype], peer)] += times

    def data_group(self, of_experts: bool) -> tuple[str, int]:
        """Name and size of the group that holds the same values of a parameter."""
        ep = self.layout.ep if of_experts else 1
        return "expert_dp" if ep > 1 else "dp_cp", self.run.shards // ep


def step_messages(run: PlannedRun, rank: int) -> MessageCounts:
    """Messages of a step of the rank at position `rank` of the layout."""
    messages = _RankMessages(run, rank)
    _add_model(messages)
    _add_pipeline(messages)
    params = local_params(run.model, run.layout.model_shard(rank), messages.stages)
    (_add_data_parallel if run.zero < 2 else _add_fsdp)(messages, params)
    _add_preparation(messages)
    name = run.train.objective or run.train.loss or run.family.loss
    loss = run.objective or (UserLoss if is_user_path(name) else LOSSES.find(name))
    counted = 0 if loss is UserLoss else len(loss.term_names)
    messages.add("dp_cp", run.shards, "all_reduce", "float32", counted)  # numbers of labels with a loss
    reported = 2 * len((*loss.term_names, *loss.metric_names)) + STATUS_VALUES
    messages.add("world", run.layout.world_size, "all_reduce", "float32", reported)
    return messages.counts


def _add_model(messages: _RankMessages) -> None:
    """Messages of tensor and context parallelism inside the model, as a trace of a layer of each kind sends them, and
    of the loss."""
    run, layout = messages.run, messages.layout
    if layout.tp == layout.cp == layout.ep == 1:
        return
    forward_passes = run.preparation.forward_passes
    parts = Counter(run.alike[layer] for stage in messages.stages for layer in stage.layers)
    first, last = (any(getattr(stage, end) for stage in messages.stages) for end in ("is_first", "is_last"))
    parts.update({EMBEDDING: int(first), HEAD: int(last), LOSS: int(last)})
    scores = int(run.model.score_head)  # every rank has this head: nothing is sent in its backward pass
    for work, passes, passes_of_loss in (
        (trace_work(run), 1, 1 - scores),
        (trace_work(run, forward_only=True), forward_passes, forward_passes + scores),
    ):
        for part, times in parts.items():
            repeats = times * (passes_of_loss if part == LOSS else passes) * layout.micro_batches
            for message, count in work[part].messages.items() if part in work and repeats else ():
                messages.counts[Message(*message)] += count * repeats
    if not last:
        return
    # The loss: for each token of a chunk of logits the maximum, then the sum and the label's logit.
    masked = run.train.micro_batch * run.data.max_predictions
    tokens = masked if run.family.has_masked_positions else run.tokens
    chunk = loss_chunk_tokens(tokens, -(-run.model.vocab // layout.tp), run.device.max_logits_bytes)
    passes = 1
    if run.train.objective:  # backward computes the logits again; answers are sums over all ranks of a sequence
        passes = 2 + forward_passes
        messages.add("cp", layout.cp, "all_reduce", "float32", 4 * run.train.micro_batch, passes * layout.micro_batches)
    if scores:
        return
    for size, times in ((chunk, passes * (tokens // chunk)), (tokens % chunk, passes)):
        messages.add("tp", layout.tp, "all_reduce", "float32", size, layout.micro_batches * times)
        messages.add("tp", layout.tp, "all_reduce", "float32", 2 * size, layout.micro_batches * times)


def _add_preparation(messages: _RankMessages) -> None:
    """What an objective sums or gathers before the passes of a step."""
    run, layout = messages.run, messages.layout
    messages.add("world", layout.world_size, "all_reduce", "float32", run.preparation.summed)
    pairs = run.train.micro_batch * layout.micro_batches * run.shards
    messages.add("dp_cp", run.shards, "all_gather", "float32", run.preparation.gathered * pairs)


def _add_pipeline(messages: _RankMessages) -> None:
    """Activations to the next stage and gradients to the previous one, for this rank's tokens."""
    run, layout = messages.run, messages.layout
    size = run.tokens * run.model.hidden // (layout.tp if run.sequence_parallel else 1)
    for stage in messages.stages:
        neighbors = [(stage.index - 1, "receive")] * (not stage.is_first)
        neighbors += [(stage.index + 1, "send")] * (not stage.is_last)
        for neighbor, of_activations in neighbors:
            peer = layout.stage_owner(neighbor)
            for kind in ("send", "receive") if peer != messages.coords["pp"] else ():
                passes = 1 + run.preparation.forward_passes * (kind == of_activations)
                messages.add("pp", layout.pp, kind, messages.compute_dtype, size, passes * layout.micro_batches, peer)


def _add_data_parallel(messages: _RankMessages, params: dict[str, LocalParam]) -> None:
    """Gradients once a step and, with ZeRO-1, new weights: bucket by bucket of the flat buffer."""
    run = messages.run
    flat = run.flat_buffer(params)
    for bucket in flat.buckets:
        group = messages.data_group(bucket.of_experts)
        if not run.zero:
            size = bucket.full_range.stop - bucket.full_range.start
            messages.add(*group, "all_reduce", messages.reduce_dtype, size)
            continue
        size = bucket.padded_elements
        messages.add(*group, "reduce_scatter", messages.reduce_dtype, size)
        messages.add(*group, "all_gather", messages.compute_dtype, size)
    _add_replicated_params(messages, params, flat, DTYPE_NAMES[run.precision.grad_accum_dtype])


def _add_fsdp(messages: _RankMessages, params: dict[str, LocalParam]) -> None:
    """For every micro batch and block: weights are gathered (with ZeRO-3 twice), gradients reduce-scattered."""
    run, micro_batches = messages.run, messages.layout.micro_batches

    def padded_elements(members: list[LocalParam], shards: int) -> int:
        """Elements of a group of parameters, each padded to equal shards."""
        return sum(-(-param.shape[0] // shards) * shards * prod(param.shape[1:]) for param in members)

    by_stage = local_params_by_stage(run.model, run.layout.model_shard(messages.rank))
    alike = first_alike(run.model)
    block_gathers = 2 + run.preparation.forward_passes if run.zero == 3 else 1
    for stage in messages.stages:
        ends = by_stage["first"] * stage.is_first + by_stage["last"] * stage.is_last
        ends = by_stage["both"] * (stage.is_first or stage.is_last) + ends
        kinds = Counter(alike[layer] for layer in stage.layers)
        blocks = ((by_stage[kind], count, block_gathers) for kind, count in kinds.items())
        # Weights that stay gathered after a forward pass are there for the next one, up to a backward pass.
        for members, count, gathers in (*blocks, (ends, 1, 1)):
            by_group: dict[tuple[str, int], list[LocalParam]] = {}
            for param in members:
                if param.spec.storage:  # whole on each rank
                    continue
                by_group.setdefault(messages.data_group(bool(param.spec.experts)), []).append(param)
            for group, params_of_group in by_group.items():
                size, times = padded_elements(params_of_group, group[1]), micro_batches * count
                messages.add(*group, "all_gather", messages.compute_dtype, size, times * gathers)
                trained = padded_elements([param for param in params_of_group if param.spec.trained], group[1])
                messages.add(*group, "reduce_scatter", messages.reduce_dtype, trained, times)
    master_dtype = "bfloat16" if run.precision.kind == "bf16_sr" else "float32"
    _add_replicated_params(messages, params, run.flat_buffer(params), master_dtype)


def _add_replicated_params(
    messages: _RankMessages, params: dict[str, LocalParam], flat: FlatBuffer, dtype: str
) -> None:
    """Gradients of parameters that several tensor-parallel or pipeline ranks hold, as far as they are in this rank's
    shard, and the norms."""
    run, layout = messages.run, messages.layout
    elements = Counter[str]()
    for name in flat.spans:
        param = params[name]
        shard = layout.data_shard(messages.rank, flat.spans[name].of_experts)[1] if run.zero else 0
        spec, rows, width = param.spec, len(flat.shard_row_range(name, shard)), prod(param.shape[1:])
        if spec.pipeline_stage == "both":
            elements["tied_embedding"] += rows * width
        if spec.tp_dim is None:
            summed = spec.sums_tp_gradient(run.sequence_parallel)
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
    group, size = ("dp_cp_tp", layout.tp * run.shards) if run.zero or layout.ep > 1 else ("tp", layout.tp)
    messages.add(group, size, "all_reduce", "float32", len(flat.spans), run.rule.norms_per_parameter)
    messages.add("pp", layout.pp, "all_reduce", "float32", 1)
    for message in run.rule.messages(run.update_shape(flat)):
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
