"""What one rank sends in a step, message by message, from shapes alone.

A twin of what the Trainer really does, for every family and layout: tests/plan/test_comm_volume.py counts the
messages of a rehearsed step, as any rank of hundreds, and compares them with these. Greetings between neighbours of a
pipeline, which only the first step has, are left out.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import prod
from typing import NamedTuple

from trainyard.config.model_schema import BertConfig
from trainyard.config.schema import Config
from trainyard.parallel.flat_buffer import FlatBuffer
from trainyard.parallel.layout import Layout, StageSpec
from trainyard.plan.rank_parameters import LocalParam, local_params, local_params_by_stage

MIB = 2**20
DTYPE_BYTES = {"bfloat16": 2, "float32": 4, "int32": 4}
DTYPE_NAMES = {"bf16": "bfloat16", "fp32": "float32"}
STATUS_VALUES = 5
"""Numbers that a rank tells all others with each step: the wish to stop, and four about saves."""
MIN_CHUNK_TOKENS = 256
"""Tokens of a chunk of logits, at the least."""
GROUP_AXES = {
    "tp": "tp",
    "kv_replicas": "tp",
    "cp": "cp",
    "pp": "pp",
    "tied_embedding": "pp",
    "dp_cp": "dp",
    "dp_cp_tp": "all",
    "world": "all",
}
"""The axis of a layout that each group belongs to."""


class Message(NamedTuple):
    group: str
    """As `Mesh` names it."""
    group_size: int
    kind: str
    dtype: str
    nbytes: int
    """Bytes of the larger one of what goes in and what comes out."""
    peer: int | None = None
    """Of send and receive: the other's rank in the group."""


MessageCounts = Counter[Message]


@dataclass(frozen=True)
class _RankMessages:
    """One rank and what it adds up."""

    config: Config
    layout: Layout
    rank: int
    counts: MessageCounts

    def add(
        self, group: str, group_size: int, kind: str, dtype: str, elements: int, times: int = 1, peer: int | None = None
    ) -> None:
        if group_size > 1 and elements and times:
            self.counts[Message(group, group_size, kind, dtype, elements * DTYPE_BYTES[dtype], peer)] += times

    @property
    def pp(self) -> int:
        return self.layout.coords(self.rank)["pp"]

    @property
    def stages(self) -> list[StageSpec]:
        return self.layout.stages_on(self.pp)

    @property
    def shards(self) -> int:
        """Ranks that hold the same weights."""
        return self.layout.dp * self.layout.cp

    @property
    def tokens(self) -> int:
        """Of a micro batch, on one context-parallel rank."""
        return self.config.train.micro_batch * self.config.data.seq_len // self.layout.cp

    @property
    def compute(self) -> str:
        return DTYPE_NAMES[self.config.precision.compute_dtype]


def step_messages(config: Config, layout: Layout, rank: int, logits_bytes: int) -> MessageCounts:
    """Those of one step of the rank at place `rank`; `logits_bytes` as the device has it (devices.Device)."""
    this = _RankMessages(config, layout, rank, Counter())
    _add_tensor_parallel(this, logits_bytes)
    _add_pipeline(this)
    _add_context_parallel(this)
    held = local_params(config.model, layout.tp, this.stages)
    (_add_data_parallel if config.layout.zero < 2 or this.shards == 1 else _add_fsdp)(this, held)
    terms = 0 if config.train.loss else 2 if isinstance(config.model, BertConfig) else 1
    this.add("dp_cp", this.shards, "all_reduce", "float32", terms)  # labels that count
    this.add("world", layout.world_size, "all_reduce", "float32", 2 * max(terms, 1) + STATUS_VALUES)
    return this.counts


def _add_tensor_parallel(this: _RankMessages, logits_bytes: int) -> None:
    """Attention and MLP each gather tokens before and scatter sums after, and backward the other way round; without
    sequence parallelism both are a sum, one forward and one backward."""
    config, layout = this.config, this.layout
    tp, once, whole = layout.tp, layout.micro_batches, this.tokens * config.model.hidden
    bert = isinstance(config.model, BertConfig)
    precision, kind = config.precision, config.recompute.kind
    parts = set(config.recompute.modules)
    last = any(stage.is_last for stage in this.stages)
    first = any(stage.is_first for stage in this.stages)
    gathers = sums = 0
    for stage in this.stages:
        for layer in stage.layers:
            eight = (
                precision.kind == "fp8"
                and precision.bf16_first_layers <= layer < config.model.layers - precision.bf16_last_layers
            )
            for part in ("attention", "mlp"):
                # What was gathered is not kept but gathered again, in backward or when a part is recomputed. In fp8 it
                # is kept, unless the part is recomputed.
                gathers += 2 + (not eight or kind == "full" or part in parts)
            # A whole block that is recomputed makes attention's sum again; the MLP's, at its end, nobody needs.
            sums += 4 + (kind == "full")
    if config.layout.sequence_parallel:
        # The embedding scatters and the head gathers; backward the other way. BERT's heads are repeated by all ranks:
        # their tokens are gathered and nothing comes back.
        this.add("tp", tp, "all_gather", this.compute, whole, once * (gathers + first + last))
        this.add("tp", tp, "reduce_scatter", this.compute, whole, once * (sums + first + (last and not bert)))
    else:
        this.add("tp", tp, "all_reduce", this.compute, whole, once * (sums + first + (last and not bert)))
    if not last:
        return
    # The loss: for each token of a chunk of logits the maximum, then the sum and the label's logit.
    tokens = config.train.micro_batch * config.data.max_predictions if bert else this.tokens
    if bert:
        this.add("tp", tp, "all_reduce", this.compute, tokens * config.model.hidden, once)
    most = max(MIN_CHUNK_TOKENS, logits_bytes // (4 * -(-config.model.vocab // tp)))
    size = -(-tokens // -(-tokens // most))
    for chunk, times in ((size, tokens // size), (tokens % size, 1)):
        this.add("tp", tp, "all_reduce", "float32", chunk, once * times)
        this.add("tp", tp, "all_reduce", "float32", 2 * chunk, once * times)


def _add_pipeline(this: _RankMessages) -> None:
    """Activations down and gradients up, just this rank's tokens."""
    layout = this.layout
    shared = layout.tp if this.config.layout.sequence_parallel else 1
    size = this.tokens * this.config.model.hidden // shared
    for stage in this.stages:
        neighbours = [stage.index - 1] * (not stage.is_first) + [stage.index + 1] * (not stage.is_last)
        for peer in map(layout.stage_owner, neighbours):
            for kind in ("send", "receive") if peer != this.pp else ():
                this.add("pp", layout.pp, kind, this.compute, size, layout.micro_batches, peer)


def _add_context_parallel(this: _RankMessages) -> None:
    """Keys and values, forward and once more in backward; their gradients, in fp32, home."""
    config, layout = this.config, this.layout
    model, cp = config.model, layout.cp
    kv = (
        max(model.num_kv_heads // layout.tp, 1)
        if model.num_kv_heads % layout.tp == 0 or layout.tp % model.num_kv_heads == 0
        else model.heads // layout.tp
    )
    each = this.tokens * kv * model.head_size
    blocks = layout.micro_batches * sum(len(stage.layers) for stage in this.stages)
    again = config.recompute.kind == "full" or "attention" in config.recompute.modules
    documents = this.tokens * (config.data.document_mask or isinstance(model, BertConfig))
    if config.layout.cp_method == "ring":
        passes = blocks * (cp - 1) * (2 + again)
        this.add("cp", cp, "all_to_all", this.compute, 2 * each, passes)
        this.add("cp", cp, "all_to_all", "float32", 2 * each, blocks * (cp - 1))
        this.add("cp", cp, "all_to_all", "int32", documents, passes)
    else:
        this.add("cp", cp, "all_gather", this.compute, cp * each, 2 * blocks * (2 + again))
        this.add("cp", cp, "reduce_scatter", "float32", cp * each, 2 * blocks)
        this.add("cp", cp, "all_gather", "int32", cp * documents, blocks * (2 + again))


def _add_data_parallel(this: _RankMessages, params: dict[str, LocalParam]) -> None:
    """Once a step gradients, and with shards new weights: neighbours in memory together, up to the size of a bucket."""
    config, shards = this.config, this.shards
    travel = DTYPE_NAMES[config.precision.grad_reduce_dtype]
    zero = config.layout.zero == 1 and shards > 1
    flat = _flat_buffer(this, params, shards if zero else 1)
    for bucket in flat.buckets:
        if not zero:
            this.add("dp_cp", shards, "all_reduce", travel, bucket.full_range.stop - bucket.full_range.start)
            continue
        size = shards * (bucket.shard_range.stop - bucket.shard_range.start)
        this.add("dp_cp", shards, "reduce_scatter", travel, size)
        this.add("dp_cp", shards, "all_gather", this.compute, size)
    _add_replicated_params(this, params, flat, DTYPE_NAMES[config.precision.grad_accum_dtype])


def _add_fsdp(this: _RankMessages, params: dict[str, LocalParam]) -> None:
    """Once a micro batch, block by block: weights come (with ZeRO-3 twice), gradients go."""
    config, shards, once = this.config, this.shards, this.layout.micro_batches
    travel = DTYPE_NAMES[config.precision.grad_reduce_dtype]

    def whole(some: list[LocalParam]) -> int:
        """Elements of what travels together, each padded to equal shards."""
        return sum(-(-each.shape[0] // shards) * shards * prod(each.shape[1:]) for each in some)

    rows = local_params_by_stage(config.model, this.layout.tp)
    for stage in this.stages:
        ends = (
            rows["both"] * (stage.is_first or stage.is_last)
            + rows["first"] * stage.is_first
            + rows["last"] * stage.is_last
        )
        twice = 1 + (config.layout.zero == 3)
        for size, times, gathers in ((whole(rows["block"]), len(stage.layers), twice), (whole(ends), 1, 1)):
            this.add("dp_cp", shards, "all_gather", this.compute, size, once * times * gathers)
            this.add("dp_cp", shards, "reduce_scatter", travel, size, once * times)
    kept = "bfloat16" if config.precision.kind == "bf16_sr" else "float32"
    _add_replicated_params(this, params, _flat_buffer(this, params, shards), kept)


def _flat_buffer(this: _RankMessages, params: dict[str, LocalParam], shards: int) -> FlatBuffer:
    shapes = [(name, each.shape) for name, each in params.items()]
    split = sum(each.spec.weight_decay for each in params.values())
    bucket = this.config.layout.bucket_mib * MIB // DTYPE_BYTES[DTYPE_NAMES[this.config.precision.grad_reduce_dtype]]
    return FlatBuffer(shapes, split, shards, bucket)


def _add_replicated_params(this: _RankMessages, params: dict[str, LocalParam], flat: FlatBuffer, dtype: str) -> None:
    """Gradients of what several tensor-parallel or pipeline ranks hold, this shard of it; and the norms."""
    layout = this.layout
    place = layout.coords(this.rank)
    shard = place["dp"] * layout.cp + place["cp"] if flat.num_shards > 1 else 0
    sums = Counter[str]()
    for name, each in params.items():
        row, rows, width = each.spec, flat.shard_row_range(name, shard), prod(each.shape[1:])
        if row.pipeline_stage == "both":
            sums["tied_embedding"] += len(rows) * width
        if row.tp_dim is None:
            sums["tp"] += len(rows) * width * (this.config.layout.sequence_parallel and not row.replicated_compute)
            continue
        for count, holders in _replicated_rows(each, flat.spans[name].shard_rows, len(rows)):
            sums["kv_replicas" if holders == layout.kv_replication else "tp"] += count * width
    this.add("tp", layout.tp, "all_reduce", dtype, sums["tp"])
    this.add("kv_replicas", layout.kv_replication, "all_reduce", dtype, sums["kv_replicas"])
    ends = {0, layout.stage_owner(layout.pp * layout.vpp - 1)}
    this.add("tied_embedding", len(ends) if this.pp in ends else 1, "all_reduce", dtype, sums["tied_embedding"])
    # Each parameter's norm (LAMB: of its gradient, of itself and of its update), then the norm of all.
    group, ranks = ("dp_cp_tp", layout.tp * this.shards) if flat.num_shards > 1 else ("tp", layout.tp)
    this.add(group, ranks, "all_reduce", "float32", len(flat.spans), 3 if this.config.optimizer.kind == "lamb" else 1)
    this.add("pp", layout.pp, "all_reduce", "float32", 1)


def _replicated_rows(param: LocalParam, rows: int, mine: int) -> Iterator[tuple[int, int]]:
    """Rows of a shard that are summed over so many ranks. A shard's `rows` are cut wherever a part begins in any shard,
    and a piece is summed by all shards if any of them has to: so all ranks have one graph."""
    if len(param.replication) == 1:
        if param.replication[0][1] > 1:
            yield mine, param.replication[0][1]
        return
    starts = list(accumulate((size for size, _ in param.replication), initial=0))[:-1]
    for first, end in pairwise([*sorted({start % rows for start in starts} | {0}), rows]):
        places = range(first, param.shape[0], rows)
        for holders in {param.replication[bisect_right(starts, row) - 1][1] for row in places} - {1}:
            yield max(min(end, mine) - first, 0), holders
