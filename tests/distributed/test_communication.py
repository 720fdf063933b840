"""What a step sends: every message of the real recipes at full size, counted on one machine and without weights.

In a fake process group this process is any one of 512 ranks; its tensors are on the meta device, which knows shapes and
has no memory. A real Trainer takes a real step, and each message must be one that `expected` derives from the model's
shapes. As a script this file prints the tables of one whole step:

    .venv/bin/python tests/distributed/test_communication.py
"""

from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FakeWork
from torch.utils._python_dispatch import TorchDispatchMode

from trainyard.compat import splits_backward
from trainyard.config.load import load
from trainyard.config.schema import Config
from trainyard.devices.cpu import Cpu
from trainyard.parallel import ring
from trainyard.parallel.mesh import Mesh
from trainyard.train.rehearsal import rehearsal
from trainyard.train.saving import Words

pytestmark = pytest.mark.slow

MIB = 2**20
LIMIT = 300.0
"""Seconds for one trace; most take three."""
VOTES = int(splits_backward())
"""In the first step of a pipeline neighbours greet each other; since torch 2.13 to ask whether shapes are fixed."""
BYTES = {"bfloat16": 2, "float32": 4, "int32": 4}
GROUPS = ("tp", "cp", "pp", "data", "stage", "everyone", "copies", "tied")


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


# What is sent.


# Operators that are opaque, and whose stand-ins on the meta device send nothing: what they really do is run instead.
OPAQUE = {
    torch.ops.trainyard.context_attention.default: ring.context_attention._init_fn,
    torch.ops.trainyard.context_attention_backward.default: ring.context_attention_backward._init_fn,
}
BETWEEN_TWO = {torch.ops.c10d.send.default: "send", torch.ops.c10d.recv_.default: "receive"}
TOGETHER = {
    torch.ops._c10d_functional.all_reduce.default: "all_reduce",
    torch.ops._c10d_functional.all_reduce_.default: "all_reduce",
    torch.ops._c10d_functional.all_gather_into_tensor.default: "all_gather",
    torch.ops._c10d_functional.reduce_scatter_tensor.default: "reduce_scatter",
    torch.ops._c10d_functional.all_to_all_single.default: "all_to_all",
}


class Traffic(TorchDispatchMode):
    """Counts messages, and answers what the meta device cannot."""

    def __init__(self, mesh: Mesh) -> None:
        super().__init__()
        groups = {name: getattr(mesh, name) for name in GROUPS}
        self.groups = {group.name: (name, group.size) for name, group in groups.items() if group.size > 1}
        self.counts: Counts = Counter()
        self.questions = 0
        """Times that the host waited for a number."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in OPAQUE:
            with self:
                return OPAQUE[function](*args, **(kwargs or {}))
        if function is torch.ops.aten._fused_adamw_.tensor_lr:
            return None
        if function is torch.ops.aten._local_scalar_dense.default:
            self.questions += 1
            return 1
        if function.namespace == "c10d":
            (tensor,), group, peer = args[:3]
            self._count(BETWEEN_TWO[function], dist.ProcessGroup.unbox(group).group_name, tensor, peer=peer)
            return FakeWork().boxed()
        out = function(*args, **(kwargs or {}))
        if function.namespace == "_c10d_functional" and function is not torch.ops._c10d_functional.wait_tensor.default:
            self._count(TOGETHER[function], args[-1], args[0], out)
        return out

    def _count(self, kind: str, group: str, *tensors: Tensor, peer: int | None = None) -> None:
        name, ranks = self.groups[group]
        dtype = str(tensors[0].dtype).removeprefix("torch.")
        self.counts[Message(name, ranks, kind, dtype, max(tensor.nbytes for tensor in tensors), peer)] += 1


def configure(recipe: str, micro_batches: int | None, *words: str) -> Config:
    """A recipe with so many micro batches a step (None: its own number)."""
    config = load(recipe, words)
    if micro_batches is None:
        return config
    batch = micro_batches * Sizes(config, 0).dp * config.train.micro_batch
    return load(recipe, [f"train.global_batch={batch}", *words])


def trace(recipe: str, rank: int, micro_batches: int | None, *words: str) -> Counts:
    """What `rank` sends and gets in its first step. For a process of its own: it becomes that rank."""
    config = configure(recipe, micro_batches, *words)
    assert config.layout.ranks
    torch.set_num_threads(1)
    with rehearsal(config, rank, config.layout.ranks) as trainer:
        for model in trainer.models:
            model.train()
        batch = trainer.loader.batch(0, trainer.rows)
        with Traffic(trainer.mesh) as traffic:
            trainer.step(batch, 1, config.optimizer.lr, (0.0, *Words()))
            trainer.optimizer.settle()  # new weights travel while the next step begins
        # The first step of a pipeline asks its neighbours whether shapes are fixed. Nothing else waits for the device.
        assert traffic.questions == (config.layout.pp > 1) * VOTES
        return traffic.counts


# What must be sent.


class Sizes:
    """The numbers that everything follows from, for one rank; ranks are numbered [pp][dp][cp][tp]."""

    def __init__(self, config: Config, rank: int) -> None:
        layout, model = config.layout, config.model
        assert layout.ranks
        self.tp, self.pp, self.cp = layout.tp, layout.pp, layout.cp
        self.dp = layout.ranks // (self.tp * self.pp * self.cp)
        self.shards = self.dp * self.cp
        self.shard = rank // self.tp % self.shards
        self.stage = rank // (self.tp * self.shards)
        self.first, self.last = self.stage == 0, self.stage == self.pp - 1
        self.layers = model.layers // self.pp
        self.micro_batches = config.train.global_batch // (config.train.micro_batch * self.dp)
        self.tokens = config.train.micro_batch * config.data.sequence // self.cp
        self.hidden = model.hidden
        self.words = model.vocab // self.tp
        self.q_rows = model.heads * model.head_size // self.tp
        self.kv_rows = max(model.kv // self.tp, 1) * model.head_size
        self.copies = max(self.tp // model.kv, 1)
        self.inner = model.ffn // self.tp
        self.bucket = config.layout.bucket * MIB // BYTES["float32"]

    @property
    def matrices(self) -> list[int]:
        """Elements of this rank's matrices, in the order of the forward pass."""
        rows = self.q_rows + 2 * self.kv_rows, self.q_rows, 2 * self.inner, self.inner
        ends = [self.words * self.hidden]
        return ends * self.first + [each * self.hidden for each in rows] * self.layers + ends * self.last

    @property
    def vectors(self) -> int:
        """How many norms this rank has."""
        return 2 * self.layers + self.last


def expected(config: Config, rank: int) -> Counts:
    """The messages of the first step: Llama, sequence parallel, ZeRO-1, bf16 weights and fp32 gradients."""
    s = Sizes(config, rank)
    out: Counts = Counter()

    def add(
        group: str, ranks: int, kind: str, dtype: str, elements: int, times: int = 1, peer: int | None = None
    ) -> None:
        if ranks > 1 and elements and times:
            out[Message(group, ranks, kind, dtype, elements * BYTES[dtype], peer)] += times

    # Tensor parallel. Attention and MLP each gather tokens before and scatter sums after, and backward the other way
    # round. What was gathered is not kept: backward, or the recomputing of an MLP, gathers it again. What is recomputed
    # is not scattered twice, and core attention has nothing to gather. The embedding scatters, the head gathers.
    once, ends = s.micro_batches, s.first + s.last
    whole = s.tokens * s.hidden
    add("tp", s.tp, "all_gather", "bfloat16", whole, once * (6 * s.layers + ends))
    add("tp", s.tp, "reduce_scatter", "bfloat16", whole, once * (4 * s.layers + ends))
    # The loss: for each token of a chunk of logits the maximum, then the sum and the label's logit.
    chunks = -(-s.tokens // max(256, Cpu.logits_bytes // (s.words * BYTES["float32"])))
    assert s.tokens % chunks == 0
    add("tp", s.tp, "all_reduce", "float32", s.tokens // chunks, once * chunks * s.last)
    add("tp", s.tp, "all_reduce", "float32", 2 * s.tokens // chunks, once * chunks * s.last)

    # Pipeline: activations down and gradients up, just this rank's tokens. The first step asks if shapes are fixed.
    for peer, there in ((s.stage - 1, not s.first), (s.stage + 1, not s.last)):
        for kind in ("send", "receive"):
            add("pp", s.pp, kind, "bfloat16", whole // s.tp, once * there, peer)
            add("pp", s.pp, kind, "int32" if VOTES else "float32", 1, int(there), peer)

    # Context parallel: keys and values go round, and once more in backward (core attention alone is not recomputed);
    # their gradients go as far, in fp32, from the rank after their own back home.
    pair = 2 * s.tokens * s.kv_rows
    add("cp", s.cp, "all_to_all", "bfloat16", pair, once * s.layers * (s.cp - 1) * 2)
    add("cp", s.cp, "all_to_all", "float32", pair, once * s.layers * (s.cp - 1))

    # Data parallel: once a step gradients and new weights, neighbours together up to the size of a bucket, norms apart.
    for elements in (*packed(s.matrices, s.bucket), s.vectors * s.hidden):
        add("data", s.shards, "reduce_scatter", "float32", elements)
        add("data", s.shards, "all_gather", "bfloat16", elements)
    add("data", s.shards, "all_reduce", "float32", 1)  # labels that count

    # What several tensor-parallel ranks hold, this shard of it: norms, and kv heads where there are more ranks than
    # heads. A shard has some rows of the fused matrix q, k, v.
    add("tp", s.tp, "all_reduce", "float32", s.vectors * s.hidden // s.shards)
    rows = (s.q_rows + 2 * s.kv_rows) // s.shards
    kv_here = sum(row >= s.q_rows for row in range(s.shard * rows, (s.shard + 1) * rows))
    add("copies", s.copies, "all_reduce", "float32", kv_here * s.hidden * s.layers)

    # Numbers: loss, count, the wish to stop and four of a save; each parameter's norm; the norm of all.
    add("everyone", s.tp * s.pp * s.shards, "all_reduce", "float32", 7)
    add("stage", s.tp * s.shards, "all_reduce", "float32", len(s.matrices) + s.vectors)
    add("pp", s.pp, "all_reduce", "float32", 1)
    return out


def packed(sizes: list[int], most: int) -> list[int]:
    """Neighbours added up while they fit."""
    out: list[int] = []
    for size in sizes:
        if out and out[-1] + size <= most:
            out[-1] += size
        else:
            out.append(size)
    return out


# Both compared.

SEVEN, SEVENTY, RING = "llama2-7b", "llama3-70b", "llama3-70b-cp"
STAGE = 64
"""Ranks of a pipeline stage of the two 70B recipes."""
SHALLOW = "model.layers=16"
Case = tuple[Any, ...]
"""Arguments of `trace`."""
CASES: list[Case] = [
    (SEVEN, 0, 3),
    (RING, STAGE, 8),
    *((SEVENTY, rank, 8) for rank in (STAGE, 7 * STAGE + 32)),
    *((SEVEN, rank, 1) for rank in (0, 5, 127)),
    *((SEVENTY, rank, 8, SHALLOW) for rank in (0, STAGE, STAGE + 5, STAGE + 31, 6 * STAGE, 7 * STAGE)),
    (SEVENTY, STAGE, 9),
    *((RING, rank, 8, SHALLOW) for rank in (0, STAGE, STAGE + 32 + 5, 7 * STAGE)),
    (RING, STAGE, 8, SHALLOW, "recompute.kind=none", "recompute.parts=[]"),
]


class Traces:
    """Made side by side, in processes of their own: a fake process group must not leak."""

    def __init__(self, cases: list[Case]) -> None:
        self.pool = ProcessPoolExecutor(2, get_context("spawn"))
        self.made: dict[Case, Future[Counts]] = {case: self.pool.submit(trace, *case) for case in cases}

    def __getitem__(self, case: Case) -> Counts:
        return self.made[case].result(LIMIT)

    def close(self) -> None:
        self.pool.shutdown(cancel_futures=True)


@pytest.fixture(scope="module")
def traces() -> Iterator[Traces]:
    made = Traces(CASES)
    yield made
    made.close()


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_each_message_follows_from_the_shapes(case: Case, traces: Traces) -> None:
    recipe, rank, micro_batches, *words = case
    assert traces[case] == expected(configure(recipe, micro_batches, *words), rank)


def test_totals_of_llama_2_7b(traces: Traces) -> None:
    """The recipe as it is: 32 layers, 16 micro batches of 4096 tokens, each matrix over 8 ranks."""
    total = summed(extrapolated(traces[SEVEN, 0, 1], 1, traces[SEVEN, 0, 3], 3, 16))
    held = (2 * 32000 * 4096 + 32 * (4 * 4096 * 4096 + 3 * 4096 * 11008)) // 8 + (2 * 32 + 1) * 4096
    assert total["data", 16, "reduce_scatter", "float32"] == (15, 4 * held)
    assert total["data", 16, "all_gather", "bfloat16"] == (15, 2 * held)
    for kind, each in (("all_gather", 6), ("reduce_scatter", 4)):
        times = 16 * (32 * each + 2)
        assert total["tp", 8, kind, "bfloat16"] == (times, times * 2 * 4096 * 4096)


def test_totals_of_llama_3_70b(traces: Traces) -> None:
    """A stage in the middle: 10 of 80 layers, 8 micro batches of 8192 tokens; a rank has one of 8 kv heads."""
    total = summed(traces[SEVENTY, STAGE, 8])
    held = 10 * ((2 * 8192 * 8192 + 3 * 8192 * 28672) // 32 + 2 * 128 * 8192 + 2 * 8192)
    assert total["data", 2, "reduce_scatter", "float32"] == (6, 4 * held)
    assert total["data", 2, "all_gather", "bfloat16"] == (6, 2 * held)
    assert total["tp", 32, "all_gather", "bfloat16"] == (8 * 10 * 6, 8 * 10 * 6 * 2 * 8192 * 8192)
    assert total["tp", 32, "reduce_scatter", "bfloat16"] == (8 * 10 * 4, 8 * 10 * 4 * 2 * 8192 * 8192)
    for kind in ("send", "receive"):
        assert total["pp", 8, kind, "bfloat16"] == (2 * 8, 2 * 8 * 2 * 8192 * 8192 // 32)


def test_every_micro_batch_costs_the_same(traces: Traces) -> None:
    few, more = traces[SEVENTY, STAGE, 8], traces[SEVENTY, STAGE, 9]
    assert extrapolated(few, 8, more, 9, 512) == expected(configure(SEVENTY, None), STAGE)
    few, more = traces[SEVEN, 0, 1], traces[SEVEN, 0, 3]
    assert extrapolated(few, 1, more, 3, 16) == expected(configure(SEVEN, None), 0)


def test_tensor_parallel_ranks_send_the_same(traces: Traces) -> None:
    first, *others = (traces[SEVENTY, STAGE + tp, 8, SHALLOW] for tp in (0, 5, 31))
    assert others == [first, first]
    first, *others = (traces[SEVEN, rank, 1] for rank in (0, 5, 127))
    assert others == [first, first]


@pytest.mark.parametrize(("recipe", "upper"), [(SEVENTY, 0), (SEVENTY, 6), (RING, 0)])
def test_what_a_stage_sends_its_neighbour_gets(recipe: str, upper: int, traces: Traces) -> None:
    above, below = (traces[recipe, stage * STAGE, 8, SHALLOW] for stage in (upper, upper + 1))

    def between(counts: Counts, kind: str, peer: int) -> Counts:
        return Counter(
            {m._replace(kind="", peer=None): n for m, n in counts.items() if (m.kind, m.peer) == (kind, peer)}
        )

    down, up = between(above, "send", upper + 1), between(below, "send", upper)
    assert down.total() == up.total() == 8 + 1
    assert down == between(below, "receive", upper)
    assert up == between(above, "receive", upper + 1)


# Both shown.


def summed(counts: Counts) -> dict[tuple[str, int, str, str], tuple[int, int]]:
    """(messages, bytes) by group, ranks, kind and dtype."""
    out: dict[tuple[str, int, str, str], tuple[int, int]] = {}
    for message, times in counts.items():
        count, size = out.get(message[:4], (0, 0))
        out[message[:4]] = count + times, size + times * message.size
    return out


def extrapolated(few: Counts, a: int, more: Counts, b: int, wanted: int) -> Counts:
    """Messages with `wanted` micro batches a step, from those with `a` and with `b`."""
    assert few.keys() == more.keys()
    out: Counts = Counter()
    for message, times in few.items():
        each, rest = divmod(more[message] - times, b - a)
        assert rest == 0
        out[message] = times + each * (wanted - a)
    return out


def table(counts: Counts) -> str:
    """Messages of a step, with the sum of their sizes."""
    rows = sorted(summed(counts).items(), key=lambda row: (GROUPS.index(row[0][0]), -row[1][1]))
    lines = [f"{'group':9}{'ranks':>5}  {'kind':16}{'dtype':9}{'messages':>9}{'MiB':>14}"]
    for (group, ranks, kind, dtype), (times, size) in rows:
        lines.append(f"{group:9}{ranks:5}  {kind:16}{dtype:9}{times:9,}{size / MIB:14,.2f}")
    return "\n".join(lines)


def main() -> None:
    shown = [(SEVEN, 0, (1, 2)), *((SEVENTY, stage * STAGE + 32, (8, 9)) for stage in (0, 1, 7)), (RING, STAGE, (8, 9))]
    traces = Traces([(recipe, rank, micro) for recipe, rank, some in shown for micro in some])
    for recipe, rank, (a, b) in shown:
        sizes = Sizes(configure(recipe, None), rank)
        counts = extrapolated(traces[recipe, rank, a], a, traces[recipe, rank, b], b, sizes.micro_batches)
        print(f"\n{recipe}, rank {rank} (pipeline stage {sizes.stage}), step 1, {sizes.micro_batches} micro batches")
        print(table(counts))
    traces.close()


if __name__ == "__main__":
    main()
