"""What a step sends: every message of the real recipes at full size, counted on one machine and without weights.

In a fake process group this process is any one of 512 ranks; its tensors are on the meta device, which knows shapes and
has no memory. A real Trainer takes a real step, and each message must be one that `plan.messages` derives from the
model's shapes. As a script this file prints the tables of one whole step:

    .venv/bin/python tests/plan/test_comm_volume.py
"""

from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FakeWork
from torch.utils._python_dispatch import TorchDispatchMode

from trainyard.compat import supports_zero_bubble
from trainyard.config.load import load
from trainyard.config.schema import Config
from trainyard.devices.cpu import CpuDevice
from trainyard.dryrun.dry_run import dry_run
from trainyard.parallel import ring_attention
from trainyard.parallel.layout import Layout
from trainyard.parallel.mesh import Mesh
from trainyard.plan.time.comm_volume import Message, MessageCounts, step_messages

pytestmark = pytest.mark.nightly

MIB = 2**20
LIMIT = 300.0
"""Seconds for one trace; most take three."""
VOTES = int(supports_zero_bubble())
"""In the first step of a pipeline neighbours greet each other; since torch 2.13 to ask whether shapes are fixed."""
GROUPS = ("tp", "cp", "pp", "dp_cp", "dp_cp_tp", "world", "kv_replicas", "tied_embedding")


# What is sent.


# Operators that are opaque, and whose stand-ins on the meta device send nothing: what they really do is run instead.
OPAQUE = {
    torch.ops.trainyard.context_attention.default: ring_attention.context_attention._init_fn,
    torch.ops.trainyard.context_attention_backward.default: ring_attention.context_attention_backward._init_fn,
}
# Those of fully_shard: what comes out, what goes in, the group.
IN_PLACE = {
    torch.ops.c10d._allgather_base_.default: "all_gather",
    torch.ops.c10d._reduce_scatter_base_.default: "reduce_scatter",
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
        self.counts: MessageCounts = Counter()
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
        if function in IN_PLACE:
            out, tensor, group = args[:3]
            self._count(IN_PLACE[function], dist.ProcessGroup.unbox(group).group_name, tensor, out)
            return out, FakeWork().boxed()
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


class Small(CpuDevice):
    """Memory of its own: fully_shard does not take the meta device."""

    process_group_backend = "cpu:fake"


def configure(recipe: str, micro_batches: int | None, *words: str) -> Config:
    """A recipe with so many micro batches a step (None: its own number)."""
    config = load(recipe, words)
    if micro_batches is None:
        return config
    batch = micro_batches * layout_of(config).dp * config.train.micro_batch
    return load(recipe, [f"train.global_batch={batch}", *words])


def layout_of(config: Config) -> Layout:
    assert config.layout.ranks
    sizes = config.layout.ranks // (config.layout.tp * config.layout.pp * config.layout.cp)
    whole = sizes * config.train.micro_batch * config.layout.pp  # any batch that the layout allows
    train = config.train.model_copy(update={"global_batch": whole})
    fitting = config.train.global_batch % (sizes * config.train.micro_batch) == 0
    return Layout.from_config(config if fitting else config.model_copy(update={"train": train}), config.layout.ranks)


def trace(recipe: str, rank: int, micro_batches: int | None, *words: str) -> MessageCounts:
    """What `rank` sends and gets in its first step. For a process of its own: it becomes that rank."""
    config = configure(recipe, micro_batches, *words)
    assert config.layout.ranks
    torch.set_num_threads(1)
    device = Small() if config.layout.zero >= 2 else None
    with dry_run(config, rank, config.layout.ranks, device) as trainer:
        for model in trainer.models:
            model.train()
        batch = trainer.loader.batch(0, trainer.batch_slice)
        with Traffic(trainer.mesh) as traffic:
            trainer.train_step(batch, 1, config.optimizer.lr)
            trainer.optimizer.wait_for_weights()  # new weights travel while the next step begins
        # The first step of a pipeline asks its neighbours whether shapes are fixed. Nothing else waits for the device.
        if device is None:
            assert traffic.questions == (config.layout.pp > 1) * VOTES * len(trainer.models)
        return traffic.counts


def expected(config: Config, rank: int) -> MessageCounts:
    """The messages of the first step: those of every step, and greetings between neighbouring stages."""
    layout = layout_of(config)
    out = step_messages(config, layout, rank, CpuDevice.max_logits_bytes)
    here = layout.coords(rank)["pp"]
    for stage in layout.stages_on(here):
        for other in (stage.index - 1,) * (not stage.is_first) + (stage.index + 1,) * (not stage.is_last):
            peer = layout.stage_owner(other)
            for kind in ("send", "receive") if peer != here else ():
                out[Message("pp", layout.pp, kind, "int32" if VOTES else "float32", 4, peer)] += 1
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
    (RING, STAGE, 8, SHALLOW, "recompute.kind=none", "recompute.modules=[]"),
]


# Small models in every other way to share them out, each as one rank.
LLAMA = (
    "model.hidden=256 model.heads=8 model.kv_heads=2 model.ffn=512 model.layers=4 model.vocab=1000 data.seq_len=128 "
    "train.micro_batch=1 layout.bucket_mib=1 precision.kind=bf16 layout.ranks=8"
)
ODD = "layout.ranks=6 model.heads=12 model.hidden=768 model.kv_heads=4 model.ffn=1536 data.seq_len=96"
OTHER = "model.hidden=256 model.heads=8 model.layers=4 train.micro_batch=2 layout.bucket_mib=1 layout.ranks=8"
SMALL: list[Case] = [
    (recipe, rank, 4, *f"{base} {words}".split())
    for recipe, base, rank, words in (
        ("tiny-llama", LLAMA, 1, "layout.tp=2 layout.sequence_parallel=true layout.zero=0"),
        ("tiny-llama", LLAMA, 5, "layout.tp=4 layout.sequence_parallel=true layout.zero=1 recompute.kind=full"),
        ("tiny-llama", LLAMA, 5, "layout.tp=4 recompute.kind=full"),
        (
            "tiny-llama",
            LLAMA,
            2,
            "layout.tp=4 recompute.kind=selective recompute.modules=[attention,mlp] model.vocab=997",
        ),
        (
            "tiny-llama",
            LLAMA,
            3,
            "layout.tp=2 layout.sequence_parallel=true precision.kind=fp8 precision.bf16_first_layers=1",
        ),
        ("tiny-llama", LLAMA, 3, "layout.pp=2 layout.vpp=2 model.tie_embeddings=false layout.zero=1"),
        ("tiny-llama", LLAMA, 7, "layout.pp=2 layout.vpp=2 layout.pipeline_schedule=zbv"),
        ("tiny-llama", LLAMA, 3, "layout.pp=2 layout.zero=2"),
        ("tiny-llama", LLAMA, 5, "layout.pp=2 layout.vpp=2 layout.zero=3"),
        ("tiny-llama", LLAMA, 2, "layout.cp=4 layout.cp_method=all_gather recompute.kind=full layout.zero=1"),
        ("tiny-llama", LLAMA, 2, "layout.cp=4 recompute.kind=full"),
        ("tiny-llama", LLAMA, 2, "layout.cp=2 recompute.kind=attention data.document_mask=true"),
        ("tiny-llama", LLAMA, 2, f"layout.tp=3 layout.cp=2 layout.zero=1 {ODD}"),
        ("gpt3-6.7b", OTHER, 6, "layout.tp=2 layout.pp=2 layout.zero=1 precision.reduce_dtype=fp32"),
        ("gpt3-6.7b", OTHER, 1, "layout.tp=4 layout.sequence_parallel=true"),
        ("bert-large-phase1-lamb", OTHER, 1, "layout.tp=4 layout.sequence_parallel=true"),
        ("bert-large-phase1-lamb", OTHER, 1, "layout.tp=2 layout.pp=2 layout.zero=1"),
        ("bert-large-phase1", OTHER, 1, "layout.cp=2 layout.tp=2"),
    )
]


class Traces:
    """Made side by side, in processes of their own: a fake process group must not leak."""

    def __init__(self, cases: list[Case]) -> None:
        self.pool = ProcessPoolExecutor(2, get_context("spawn"))
        self.made: dict[Case, Future[MessageCounts]] = {case: self.pool.submit(trace, *case) for case in cases}

    def __getitem__(self, case: Case) -> MessageCounts:
        return self.made[case].result(LIMIT)

    def close(self) -> None:
        self.pool.shutdown(cancel_futures=True)


@pytest.fixture(scope="module")
def traces() -> Iterator[Traces]:
    made = Traces(CASES + SMALL)
    yield made
    made.close()


@pytest.mark.parametrize("case", CASES + SMALL, ids=lambda case: "-".join(map(str, case)))
def test_each_message_follows_from_the_shapes(case: Case, traces: Traces) -> None:
    recipe, rank, micro_batches, *words = case
    assert traces[case] == expected(configure(recipe, micro_batches, *words), rank)


def test_totals_of_llama_2_7b(traces: Traces) -> None:
    """The recipe as it is: 32 layers, 16 micro batches of 4096 tokens, each matrix over 8 ranks."""
    total = summed(extrapolated(traces[SEVEN, 0, 1], 1, traces[SEVEN, 0, 3], 3, 16))
    held = (2 * 32000 * 4096 + 32 * (4 * 4096 * 4096 + 3 * 4096 * 11008)) // 8 + (2 * 32 + 1) * 4096
    assert total["dp_cp", 16, "reduce_scatter", "float32"] == (15, 4 * held)
    assert total["dp_cp", 16, "all_gather", "bfloat16"] == (15, 2 * held)
    for kind, each in (("all_gather", 6), ("reduce_scatter", 4)):
        times = 16 * (32 * each + 2)
        assert total["tp", 8, kind, "bfloat16"] == (times, times * 2 * 4096 * 4096)


def test_totals_of_llama_3_70b(traces: Traces) -> None:
    """A stage in the middle: 10 of 80 layers, 8 micro batches of 8192 tokens; a rank has one of 8 kv heads."""
    total = summed(traces[SEVENTY, STAGE, 8])
    held = 10 * ((2 * 8192 * 8192 + 3 * 8192 * 28672) // 32 + 2 * 128 * 8192 + 2 * 8192)
    assert total["dp_cp", 2, "reduce_scatter", "float32"] == (6, 4 * held)
    assert total["dp_cp", 2, "all_gather", "bfloat16"] == (6, 2 * held)
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

    def between(counts: MessageCounts, kind: str, peer: int) -> MessageCounts:
        return Counter(
            {m._replace(kind="", peer=None): n for m, n in counts.items() if (m.kind, m.peer) == (kind, peer)}
        )

    down, up = between(above, "send", upper + 1), between(below, "send", upper)
    assert down.total() == up.total() == 8 + 1
    assert down == between(below, "receive", upper)
    assert up == between(above, "receive", upper + 1)


# Both shown.


def summed(counts: MessageCounts) -> dict[tuple[str, int, str, str], tuple[int, int]]:
    """(messages, bytes) by group, ranks, kind and dtype."""
    out: dict[tuple[str, int, str, str], tuple[int, int]] = {}
    for message, times in counts.items():
        count, size = out.get(message[:4], (0, 0))
        out[message[:4]] = count + times, size + times * message.nbytes
    return out


def extrapolated(few: MessageCounts, a: int, more: MessageCounts, b: int, wanted: int) -> MessageCounts:
    """Messages with `wanted` micro batches a step, from those with `a` and with `b`."""
    assert few.keys() == more.keys()
    out: MessageCounts = Counter()
    for message, times in few.items():
        each, rest = divmod(more[message] - times, b - a)
        assert rest == 0
        out[message] = times + each * (wanted - a)
    return out


def table(counts: MessageCounts) -> str:
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
        layout = layout_of(configure(recipe, None))
        counts = extrapolated(traces[recipe, rank, a], a, traces[recipe, rank, b], b, layout.micro_batches)
        stage = layout.coords(rank)["pp"]
        print(f"\n{recipe}, rank {rank} (pipeline stage {stage}), step 1, {layout.micro_batches} micro batches")
        print(table(counts))
    traces.close()


if __name__ == "__main__":
    main()
