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

from trainyard.config.model_schema import BertModel
from trainyard.config.schema import Config
from trainyard.parallel.flat_buffer import Flat
from trainyard.parallel.layout import Layout, Stage
from trainyard.plan.rank_parameters import Held, parameters, rows_of

MIB = 2**20
BYTES = {"bfloat16": 2, "float32": 4, "int32": 4}
DTYPES = {"bf16": "bfloat16", "fp32": "float32"}
SAID = 5
"""Numbers that a rank tells all others with each step: the wish to stop, and four about saves."""
LEAST = 256
"""Tokens of a chunk of logits, at the least."""
AXES = {
    "tp": "tp",
    "copies": "tp",
    "cp": "cp",
    "pp": "pp",
    "tied": "pp",
    "data": "dp",
    "stage": "all",
    "everyone": "all",
}
"""The axis of a layout that each group belongs to."""


class Message(NamedTuple):
    group: str
    """As `Mesh` names it."""
    ranks: int
    kind: str
    dtype: str
    size: int
    """Bytes of the larger one of what goes in and what comes out."""
    peer: int | None = None
    """Of send and receive: the other's rank in the group."""


Counts = Counter[Message]


@dataclass(frozen=True)
class _Rank:
    """One rank and what it adds up."""

    config: Config
    layout: Layout
    rank: int
    out: Counts

    def add(
        self, group: str, ranks: int, kind: str, dtype: str, elements: int, times: int = 1, peer: int | None = None
    ) -> None:
        if ranks > 1 and elements and times:
            self.out[Message(group, ranks, kind, dtype, elements * BYTES[dtype], peer)] += times

    @property
    def pp(self) -> int:
        return self.layout.place(self.rank)["pp"]

    @property
    def stages(self) -> list[Stage]:
        return self.layout.stages_of(self.pp)

    @property
    def shards(self) -> int:
        """Ranks that hold the same weights."""
        return self.layout.dp * self.layout.cp

    @property
    def tokens(self) -> int:
        """Of a micro batch, on one context-parallel rank."""
        return self.config.train.micro_batch * self.config.data.sequence // self.layout.cp

    @property
    def compute(self) -> str:
        return DTYPES[self.config.precision.compute]


def messages(config: Config, layout: Layout, rank: int, logits_bytes: int) -> Counts:
    """Those of one step of the rank at place `rank`; `logits_bytes` as the device has it (devices.Device)."""
    this = _Rank(config, layout, rank, Counter())
    _tensor(this, logits_bytes)
    _pipeline(this)
    _context(this)
    held = parameters(config.model, layout.tp, this.stages)
    (_data if config.layout.zero < 2 or this.shards == 1 else _sharded)(this, held)
    terms = 0 if config.train.loss else 2 if isinstance(config.model, BertModel) else 1
    this.add("data", this.shards, "all_reduce", "float32", terms)  # labels that count
    this.add("everyone", layout.world, "all_reduce", "float32", 2 * max(terms, 1) + SAID)
    return this.out


def _tensor(this: _Rank, logits_bytes: int) -> None:
    """Attention and MLP each gather tokens before and scatter sums after, and backward the other way round; without
    sequence parallelism both are a sum, one forward and one backward."""
    config, layout = this.config, this.layout
    tp, once, whole = layout.tp, layout.micro_batches, this.tokens * config.model.hidden
    bert = isinstance(config.model, BertModel)
    precision, kind = config.precision, config.recompute.kind
    parts = set(config.recompute.parts)
    last = any(stage.last for stage in this.stages)
    first = any(stage.first for stage in this.stages)
    gathers = sums = 0
    for stage in this.stages:
        for layer in stage.layers:
            eight = (
                precision.kind == "fp8" and precision.bf16_first <= layer < config.model.layers - precision.bf16_last
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
    tokens = config.train.micro_batch * config.data.predictions if bert else this.tokens
    if bert:
        this.add("tp", tp, "all_reduce", this.compute, tokens * config.model.hidden, once)
    most = max(LEAST, logits_bytes // (4 * -(-config.model.vocab // tp)))
    size = -(-tokens // -(-tokens // most))
    for chunk, times in ((size, tokens // size), (tokens % size, 1)):
        this.add("tp", tp, "all_reduce", "float32", chunk, once * times)
        this.add("tp", tp, "all_reduce", "float32", 2 * chunk, once * times)


def _pipeline(this: _Rank) -> None:
    """Activations down and gradients up, just this rank's tokens."""
    layout = this.layout
    shared = layout.tp if this.config.layout.sequence_parallel else 1
    size = this.tokens * this.config.model.hidden // shared
    for stage in this.stages:
        neighbours = [stage.number - 1] * (not stage.first) + [stage.number + 1] * (not stage.last)
        for peer in map(layout.holder, neighbours):
            for kind in ("send", "receive") if peer != this.pp else ():
                this.add("pp", layout.pp, kind, this.compute, size, layout.micro_batches, peer)


def _context(this: _Rank) -> None:
    """Keys and values, forward and once more in backward; their gradients, in fp32, home."""
    config, layout = this.config, this.layout
    model, cp = config.model, layout.cp
    kv = (
        max(model.kv // layout.tp, 1)
        if model.kv % layout.tp == 0 or layout.tp % model.kv == 0
        else model.heads // layout.tp
    )
    each = this.tokens * kv * model.head_size
    blocks = layout.micro_batches * sum(len(stage.layers) for stage in this.stages)
    again = config.recompute.kind == "full" or "attention" in config.recompute.parts
    documents = this.tokens * (config.data.separate or isinstance(model, BertModel))
    if config.layout.context == "ring":
        passes = blocks * (cp - 1) * (2 + again)
        this.add("cp", cp, "all_to_all", this.compute, 2 * each, passes)
        this.add("cp", cp, "all_to_all", "float32", 2 * each, blocks * (cp - 1))
        this.add("cp", cp, "all_to_all", "int32", documents, passes)
    else:
        this.add("cp", cp, "all_gather", this.compute, cp * each, 2 * blocks * (2 + again))
        this.add("cp", cp, "reduce_scatter", "float32", cp * each, 2 * blocks)
        this.add("cp", cp, "all_gather", "int32", cp * documents, blocks * (2 + again))


def _data(this: _Rank, held: dict[str, Held]) -> None:
    """Once a step gradients, and with shards new weights: neighbours in memory together, up to the size of a bucket."""
    config, shards = this.config, this.shards
    travel = DTYPES[config.precision.travel]
    zero = config.layout.zero == 1 and shards > 1
    flat = _flat(this, held, shards if zero else 1)
    for bucket in flat.buckets:
        if not zero:
            this.add("data", shards, "all_reduce", travel, bucket.whole.stop - bucket.whole.start)
            continue
        size = shards * (bucket.shard.stop - bucket.shard.start)
        this.add("data", shards, "reduce_scatter", travel, size)
        this.add("data", shards, "all_gather", this.compute, size)
    _shared(this, held, flat, DTYPES[config.precision.accumulate])


def _sharded(this: _Rank, held: dict[str, Held]) -> None:
    """Once a micro batch, block by block: weights come (with ZeRO-3 twice), gradients go."""
    config, shards, once = this.config, this.shards, this.layout.micro_batches
    travel = DTYPES[config.precision.travel]

    def whole(some: list[Held]) -> int:
        """Elements of what travels together, each padded to equal shards."""
        return sum(-(-each.shape[0] // shards) * shards * prod(each.shape[1:]) for each in some)

    rows = rows_of(config.model, this.layout.tp)
    for stage in this.stages:
        ends = rows["both"] * (stage.first or stage.last) + rows["first"] * stage.first + rows["last"] * stage.last
        twice = 1 + (config.layout.zero == 3)
        for size, times, gathers in ((whole(rows["block"]), len(stage.layers), twice), (whole(ends), 1, 1)):
            this.add("data", shards, "all_gather", this.compute, size, once * times * gathers)
            this.add("data", shards, "reduce_scatter", travel, size, once * times)
    kept = "bfloat16" if config.precision.kind == "bf16_sr" else "float32"
    _shared(this, held, _flat(this, held, shards), kept)


def _flat(this: _Rank, held: dict[str, Held], shards: int) -> Flat:
    shapes = [(name, each.shape) for name, each in held.items()]
    split = sum(each.row.decay for each in held.values())
    bucket = this.config.layout.bucket * MIB // BYTES[DTYPES[this.config.precision.travel]]
    return Flat(shapes, split, shards, bucket)


def _shared(this: _Rank, held: dict[str, Held], flat: Flat, dtype: str) -> None:
    """Gradients of what several tensor-parallel or pipeline ranks hold, this shard of it; and the norms."""
    layout = this.layout
    place = layout.place(this.rank)
    shard = place["dp"] * layout.cp + place["cp"] if flat.shards > 1 else 0
    sums = Counter[str]()
    for name, each in held.items():
        row, rows, width = each.row, flat.rows(name, shard), prod(each.shape[1:])
        if row.place == "both":
            sums["tied"] += len(rows) * width
        if row.split is None:
            sums["tp"] += len(rows) * width * (this.config.layout.sequence_parallel and not row.repeated)
            continue
        for count, holders in _copied(each, flat.spans[name].rows, len(rows)):
            sums["copies" if holders == layout.copies else "tp"] += count * width
    this.add("tp", layout.tp, "all_reduce", dtype, sums["tp"])
    this.add("copies", layout.copies, "all_reduce", dtype, sums["copies"])
    ends = {0, layout.holder(layout.pp * layout.vpp - 1)}
    this.add("tied", len(ends) if this.pp in ends else 1, "all_reduce", dtype, sums["tied"])
    # Each parameter's norm (LAMB: of its gradient, of itself and of its update), then the norm of all.
    group, ranks = ("stage", layout.tp * this.shards) if flat.shards > 1 else ("tp", layout.tp)
    this.add(group, ranks, "all_reduce", "float32", len(flat.spans), 3 if this.config.optimizer.kind == "lamb" else 1)
    this.add("pp", layout.pp, "all_reduce", "float32", 1)


def _copied(held: Held, rows: int, mine: int) -> Iterator[tuple[int, int]]:
    """Rows of a shard that are summed over so many ranks. A shard's `rows` are cut wherever a part begins in any shard,
    and a piece is summed by all shards if any of them has to: so all ranks have one graph."""
    if len(held.pieces) == 1:
        if held.pieces[0][1] > 1:
            yield mine, held.pieces[0][1]
        return
    starts = list(accumulate((size for size, _ in held.pieces), initial=0))[:-1]
    for first, end in pairwise([*sorted({start % rows for start in starts} | {0}), rows]):
        places = range(first, held.shape[0], rows)
        for holders in {held.pieces[bisect_right(starts, row) - 1][1] for row in places} - {1}:
            yield max(min(end, mine) - first, 0), holders
