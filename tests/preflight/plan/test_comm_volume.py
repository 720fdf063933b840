"""Every message of a dry run is one that the plan derives from shapes, and the other way round.

In a fake process group this process is any one of 512 ranks; its tensors are on the meta device, which has no memory. A
real Trainer runs a real step. As a script this file prints tables of one step of the recipes:

    .venv/bin/python -m tests.preflight.plan.test_comm_volume
"""

from collections import Counter
from functools import cache
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from tests.support.meta_op_mode import MetaOpMode
from trainyard import compat
from trainyard.compat import collectives, supports_zero_bubble
from trainyard.config.load import load
from trainyard.config.schema import Config
from trainyard.core.constants import MIB
from trainyard.devices import DEVICES
from trainyard.devices.cpu import CpuDevice
from trainyard.parallel.layout import Layout
from trainyard.parallel.mesh import Mesh
from trainyard.preflight.dryrun.dry_run import dry_run
from trainyard.preflight.dryrun.op_trace import MESH_GROUPS
from trainyard.preflight.plan.planned_run import PlannedRun
from trainyard.preflight.plan.time.comm_volume import Message, MessageCounts, step_messages
from trainyard.preflight.plan.trace.work_trace import EXPERT_EXCHANGES

NIGHTLY = pytest.mark.nightly
SHAPE_VOTE = int(supports_zero_bubble())
"""In the first step pipeline neighbors exchange a message; since torch 2.13 to agree whether shapes are static."""
FSDP_COLLECTIVES = {
    torch.ops.c10d._allgather_base_.default: "all_gather",
    torch.ops.c10d._reduce_scatter_base_.default: "reduce_scatter",
}
"""Collectives of fully_shard, with arguments (output, input, group)."""
POINT_TO_POINT = {torch.ops.c10d.send.default: "send", torch.ops.c10d.recv_.default: "receive"}
FUNCTIONAL_COLLECTIVES = {
    torch.ops._c10d_functional.all_reduce.default: "all_reduce",
    torch.ops._c10d_functional.all_reduce_.default: "all_reduce",
    torch.ops._c10d_functional.all_gather_into_tensor.default: "all_gather",
    torch.ops._c10d_functional.reduce_scatter_tensor.default: "reduce_scatter",
    torch.ops._c10d_functional.all_to_all_single.default: "all_to_all",
}


class MessageCounter(MetaOpMode):  # type: ignore[no-untyped-call]
    """Counts messages, and the times that the host waits for a value."""

    def __init__(self, mesh: Mesh) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        groups = {name: getattr(mesh, name) for name in MESH_GROUPS}
        self.groups = {group.name: (name, group.size) for name, group in groups.items() if group.size > 1}
        self.counts: MessageCounts = Counter()
        self.host_reads = 0

    def observe(self, function: Any, args: Any, out: Any) -> None:
        if function is torch.ops.aten._local_scalar_dense.default:
            self.host_reads += not args[0].is_cpu  # of the device; batches are in host memory at first
        elif function in FSDP_COLLECTIVES:
            output, tensor, group = args[:3]
            self._count(FSDP_COLLECTIVES[function], dist.ProcessGroup.unbox(group).group_name, tensor, output)
        elif function.namespace == "c10d":
            (tensor,), group, peer = args[:3]
            self._count(POINT_TO_POINT[function], dist.ProcessGroup.unbox(group).group_name, tensor, peer=peer)
        elif function.namespace == "_c10d_functional" and "wait_tensor" not in function.name():
            self._count(FUNCTIONAL_COLLECTIVES[function], args[-1], args[0], out)
        elif function.name() in EXPERT_EXCHANGES:
            self._count("all_to_all", args[-1], args[0])

    def _count(self, kind: str, group: str, *tensors: torch.Tensor, peer: int | None = None) -> None:
        name, size = self.groups[group]
        dtype = str(tensors[0].dtype).removeprefix("torch.")
        self.counts[Message(name, size, kind, dtype, max(tensor.nbytes for tensor in tensors), peer)] += 1


class FakeCpu(CpuDevice):
    """A CPU with memory in a fake process group: fully_shard refuses the meta device."""

    process_group_backend = "cpu:fake"


def make_config(recipe: str, micro_batches: int | None, *overrides: str) -> Config:
    """A recipe with this number of micro batches per step; None keeps its own."""
    config = load(recipe, overrides)
    if micro_batches is None:
        return config
    batch = micro_batches * layout_of(config).dp * config.train.micro_batch
    return load(recipe, [f"train.global_batch={batch}", *overrides])


def layout_of(config: Config) -> Layout:
    ranks = config.layout.ranks
    assert ranks
    dp = ranks // (config.layout.tp * config.layout.pp * config.layout.cp)
    if config.train.global_batch % (dp * config.train.micro_batch):  # any batch that the layout allows
        batch = dp * config.train.micro_batch * config.layout.pp
        config = config.model_copy(update={"train": config.train.model_copy(update={"global_batch": batch})})
    return Layout.from_config(config, ranks)


@cache
def traced(recipe: str, rank: int, micro_batches: int | None, *overrides: str) -> MessageCounts:
    """Messages of `rank` in the first step of a dry run."""
    config = make_config(recipe, micro_batches, *overrides)
    assert config.layout.ranks
    device = FakeCpu() if config.layout.zero >= 2 else None
    no_emulation = patch.object(collectives, "_emulate_with_all_reduce", lambda x: False)  # which only gloo needs
    sent_to_itself = patch.object(compat, "all_to_all", lambda x, receive, send, group: x.clone())
    with no_emulation, sent_to_itself, dry_run(config, rank, config.layout.ranks, device) as trainer:
        for model in trainer.models:
            model.train()
        batch = trainer.loader.batch(0, trainer.batch_slice)
        with MessageCounter(trainer.mesh) as counter:
            trainer.train_step(batch, 1, config.optimizer.lr)
            trainer.optimizer.wait_for_weights()  # new weights travel while the next step begins
        if device is None:  # except for the vote on shapes, nothing waits for the device
            votes = (config.layout.pp > 1) * SHAPE_VOTE * len(trainer.models)
            assert counter.host_reads == votes * count_votes(config)
        return counter.counts


def count_votes(config: Config) -> int:
    """Stages vote before the first pass, and again before the first one with backward."""
    return 1 + bool(PlannedRun(config, layout_of(config), DEVICES.find("cpu")).preparation.forward_passes)


def planned(config: Config, rank: int) -> MessageCounts:
    """Planned messages of the first step: those of every step, and the vote of neighboring stages."""
    layout = layout_of(config)
    counts, votes = step_messages(PlannedRun(config, layout, DEVICES.find("cpu")), rank), count_votes(config)
    pp = layout.coords(rank)["pp"]
    for stage in layout.stages_on(pp):
        neighbors = (stage.index - 1,) * (not stage.is_first) + (stage.index + 1,) * (not stage.is_last)
        for peer in map(layout.stage_owner, neighbors):
            for kind in ("send", "receive") if peer != pp else ():
                counts[Message("pp", layout.pp, kind, "int32" if SHAPE_VOTE else "float32", 4, peer)] += votes
    return counts


LLAMA_7B, LLAMA_70B, LLAMA_70B_CP = "llama2-7b", "llama3-70b", "llama3-70b-cp"
STAGE = 64
"""Ranks of a pipeline stage of the two 70B recipes."""
ONE_LAYER = "model.layers=8"
"""One layer in each stage of the 70B recipes."""
Case = tuple[Any, ...]
"""Arguments of `traced`."""
FAST_CASES: list[Case] = [
    *((LLAMA_7B, rank, 1, "model.layers=1") for rank in (0, 127)),
    (LLAMA_7B, 0, 1, "model.layers=2"),
    *((LLAMA_70B, rank, 8, ONE_LAYER) for rank in (0, STAGE, STAGE + 5, 7 * STAGE)),
    (LLAMA_70B, STAGE, 8, "model.layers=16"),
    (LLAMA_70B, STAGE, 9, ONE_LAYER),
    *((LLAMA_70B_CP, rank, 8, ONE_LAYER) for rank in (0, STAGE)),
]
FULL_CASES: list[Case] = [
    (LLAMA_7B, 0, 3),
    *((LLAMA_7B, rank, 1) for rank in (0, 5, 127)),
    *((LLAMA_70B, rank, 8) for rank in (STAGE, 7 * STAGE + 32)),
    (LLAMA_70B, STAGE, 9),
    *((LLAMA_70B, rank, 8, "model.layers=16") for rank in (0, STAGE + 5, STAGE + 31, 6 * STAGE, 7 * STAGE)),
    (LLAMA_70B_CP, STAGE, 8),
    *((LLAMA_70B_CP, rank, 8, "model.layers=16") for rank in (0, STAGE, STAGE + 32 + 5, 7 * STAGE)),
    (LLAMA_70B_CP, STAGE, 8, "model.layers=16", "recompute.kind=none", "recompute.modules=[]"),
]

# Small models in every other layout, each as one rank.
LLAMA = (
    "model.hidden=256 model.heads=8 model.kv_heads=2 model.ffn=512 model.layers=2 model.vocab=1000 data.seq_len=128 "
    "train.micro_batch=1 layout.bucket_mib=1 precision.kind=bf16 layout.ranks=8"
)
ODD = "layout.ranks=6 model.heads=12 model.hidden=768 model.kv_heads=4 model.ffn=1536 data.seq_len=96"
OTHER = "model.hidden=256 model.heads=8 model.layers=2 train.micro_batch=2 layout.bucket_mib=1 layout.ranks=8"
MOE = (
    "model.hidden=256 model.heads=8 model.kv_heads=2 model.ffn=512 model.layers=2 model.vocab=1000 data.seq_len=128 "
    "model.experts=4 train.micro_batch=1 layout.bucket_mib=1 layout.ranks=8 layout.tp=1 layout.pp=1 "
    "layout.sequence_parallel=false recompute.kind=none recompute.modules=[]"
)
SHARED = f"{MOE} model.shared_ffn=384 model.router_scores=sigmoid model.router_bias=true model.dense_layers=0"
BIASED = f"{MOE} model.family=gpt_oss model.sliding_window=32 model.head_dim=32"
MIXED = MOE.replace("model.layers=2", "model.layers=6") + (
    " model.family=tests.support.two_kinds:FAMILY model.dense_ffn=768 model.window=32 model.top_k=2"
)
"""Two dense layers, then four with experts; every other layer has a window."""


PAIRS = "data.source=preference train.objective"
PROMPTS = (
    "data.source=prompts train.objective=grpo rollout.rewards=[trainyard.run.rollouts.rewards:exact] "
    "rollout.completions=2 rollout.max_new_tokens=32"
)


def freeze(pattern: str) -> str:
    """Parameters whose names match are not trained, some others have a learning rate of their own."""
    keys = f'{{"lr_scale":2.0,"pattern":"{pattern}"}}'
    return f'model.linear={{"tests.support.frozen_linear:WRAPPER":{keys}}}'


SMALL_CASES: list[Case] = [
    (recipe, rank, 4 if "layout.pp" in layout else 2, *f"{base} {layout}".split())
    for recipe, base, rank, layout in (
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
        ("tiny-llama", LLAMA, 3, "layout.pp=2 layout.vpp=2 model.layers=4 model.tie_embeddings=false layout.zero=1"),
        ("tiny-llama", LLAMA, 7, "layout.pp=2 layout.vpp=2 model.layers=4 layout.pipeline_schedule=zbv"),
        ("tiny-llama", LLAMA, 3, "layout.pp=2 layout.zero=2"),
        ("tiny-llama", LLAMA, 3, "layout.tp=2 layout.zero=1 optimizer.kind=muon"),
        ("tiny-llama", LLAMA, 2, "layout.tp=4 layout.pp=2 layout.zero=0 optimizer.kind=muon"),
        ("tiny-llama", LLAMA, 1, "layout.zero=0 optimizer.kind=muon"),
        ("tiny-llama", LLAMA, 5, "layout.tp=2 layout.zero=3 optimizer.kind=muon"),
        ("tiny-llama", LLAMA, 5, "layout.pp=2 layout.vpp=2 model.layers=4 layout.zero=3"),
        ("tiny-llama", LLAMA, 2, "layout.cp=4 layout.cp_method=all_gather recompute.kind=full layout.zero=1"),
        ("tiny-llama", LLAMA, 2, "layout.cp=4 recompute.kind=full"),
        ("tiny-llama", LLAMA, 2, "layout.cp=2 recompute.kind=attention data.document_mask=true"),
        ("tiny-llama", LLAMA, 2, f"layout.tp=3 layout.cp=2 layout.zero=1 {ODD}"),
        ("gpt3-6.7b", OTHER, 6, "layout.tp=2 layout.pp=2 layout.zero=1 precision.reduce_dtype=fp32"),
        ("gpt3-6.7b", OTHER, 1, "layout.tp=4 layout.sequence_parallel=true"),
        ("bert-large-phase1-lamb", OTHER, 1, "layout.tp=4 layout.sequence_parallel=true"),
        ("bert-large-phase1-lamb", OTHER, 1, "layout.tp=2 layout.pp=2 layout.zero=1"),
        ("bert-large-phase1", OTHER, 1, "layout.cp=2 layout.tp=2"),
        ("mixtral-8x7b", MOE, 3, "layout.ep=2 layout.zero=0"),
        ("mixtral-8x7b", MOE, 5, "layout.ep=4 layout.tp=2 layout.zero=1 layout.sequence_parallel=true"),
        ("mixtral-8x7b", MOE, 5, "layout.ep=2 layout.pp=2 layout.zero=3"),
        ("mixtral-8x7b", MOE, 2, "layout.ep=4 layout.cp=2 layout.zero=1 recompute.kind=full"),
        ("mixtral-8x7b", MOE, 6, "layout.ep=2 layout.zero=1 optimizer.kind=muon"),
        ("mixtral-8x7b", SHARED, 5, "layout.ep=2 layout.tp=2 layout.zero=1 layout.sequence_parallel=true"),
        ("mixtral-8x7b", SHARED, 2, "layout.ep=2 layout.tp=2 layout.zero=3 recompute.kind=full"),
        ("mixtral-8x7b", BIASED, 5, "layout.ep=2 layout.tp=2 layout.zero=1 layout.sequence_parallel=true"),
        ("tiny-llama", MIXED, 1, "layout.ep=2 layout.pp=2 layout.pipeline_cuts=[1] layout.zero=3"),
        ("tiny-llama", MIXED, 5, "layout.ep=2 layout.tp=2 layout.pp=2 layout.zero=1"),
        ("tiny-llama", MIXED, 3, "layout.tp=2 layout.cp=2 layout.zero=1 recompute.kind=full"),
        ("tiny-llama", LLAMA, 5, f"layout.tp=2 layout.zero=3 {freeze('')}"),
        ("tiny-llama", LLAMA, 1, f"layout.tp=2 layout.sequence_parallel=true layout.zero=1 {freeze('')}"),
        (
            "tiny-llama",
            LLAMA,
            1,
            f"layout.tp=2 layout.sequence_parallel=true layout.zero=1 {freeze('embedding|norm|gate_up|output')}",
        ),
        (
            "tiny-llama",
            LLAMA,
            3,
            f"layout.tp=4 layout.pp=2 model.layers=4 layout.zero=0 {freeze('embedding|norm|attention')}",
        ),
        (
            "tiny-llama",
            LLAMA,
            7,
            f"layout.tp=4 layout.pp=2 model.layers=4 layout.zero=1 {freeze('embedding|norm|down')}",
        ),
        ("gpt3-6.7b", OTHER, 1, f"layout.tp=2 layout.zero=2 {freeze('weight')}"),
        ("tiny-llama", LLAMA, 1, f"layout.tp=2 layout.cp=2 layout.zero=1 {PAIRS}=orpo"),
        ("mixtral-8x7b", MOE, 5, f"layout.ep=2 layout.pp=2 layout.zero=3 {freeze('experts|embedding')}"),
    )
]
OBJECTIVE_CASES: list[Case] = [
    (recipe, rank, 4 if "layout.pp" in layout else 2, *f"{base} {layout}".split())
    for recipe, base, rank, layout in (
        ("tiny-llama", LLAMA, 6, f"layout.tp=2 layout.cp=2 layout.zero=1 {PAIRS}=dpo preference.variant=aot"),
        ("tiny-llama", LLAMA, 1, f"layout.zero=3 layout.cp=2 recompute.kind=full {PAIRS}=dpo preference.variant=aot"),
        ("tiny-llama", LLAMA, 1, f"layout.pp=2 model.layers=4 {PAIRS}=kto"),
        ("tiny-llama", LLAMA, 6, f"layout.tp=2 layout.sequence_parallel=true {PAIRS}=kto preference.reference=live"),
        ("tiny-llama", LLAMA, 1, f"layout.zero=2 {PAIRS}=kto"),
        ("tiny-llama", LLAMA, 6, f"layout.tp=2 {PAIRS}=kto preference.variant=apo_zero_unpaired"),
        ("tiny-llama", LLAMA, 1, f"layout.pp=2 layout.tp=2 model.layers=4 {PAIRS}=dpo preference.reference=live"),
        ("tiny-llama", LLAMA, 6, f"layout.tp=2 layout.sequence_parallel=true {PAIRS}=reward"),
        ("mixtral-8x7b", MOE, 5, f"layout.ep=2 layout.tp=2 layout.zero=1 {PAIRS}=kto"),
        ("tiny-llama", LLAMA, 6, f"layout.tp=2 {PROMPTS} policy.kl=0.1"),
        ("tiny-llama", LLAMA, 6, f"layout.cp=2 {PAIRS}=reward"),
    )
]
"""Losses with passes before the step, and with metrics or a head of their own."""


@pytest.mark.parametrize(
    "case",
    [
        *FAST_CASES,
        *SMALL_CASES[::2],
        *OBJECTIVE_CASES[:5],
        *(pytest.param(case, marks=NIGHTLY) for case in (*SMALL_CASES[1::2], *OBJECTIVE_CASES[5:], *FULL_CASES)),
    ],
    ids=lambda case: "-".join(map(str, case)),
)
def test_messages_follow_from_shapes(case: Case) -> None:
    recipe, rank, micro_batches, *overrides = case
    assert traced(*case) == planned(make_config(recipe, micro_batches, *overrides), rank)


LINEAR_KINDS = ("all_gather", "reduce_scatter", "send", "receive", "all_to_all")


def per_layer(counts: MessageCounts) -> MessageCounts:
    """Messages whose number is linear in the layers, unlike buckets of the data-parallel group and single sums."""
    return Counter(
        {message: n for message, n in counts.items() if message.kind in LINEAR_KINDS and message.group != "dp_cp"}
    )


@pytest.mark.parametrize(
    ("recipe", "rank", "micro_batches", "layers"), [(LLAMA_7B, 0, 1, (1, 2)), (LLAMA_70B, STAGE, 8, (8, 16))]
)
def test_layers_add_up_to_the_messages_at_full_size(
    recipe: str, rank: int, micro_batches: int, layers: tuple[int, int]
) -> None:
    shallow, deep = (per_layer(traced(recipe, rank, micro_batches, f"model.layers={count}")) for count in layers)
    full = make_config(recipe, micro_batches)
    assert extrapolate(shallow, layers[0], deep, layers[1], full.model.layers) == per_layer(planned(full, rank))


@pytest.mark.nightly
def test_totals_of_llama_2_7b() -> None:
    """The recipe: 32 layers, 16 micro batches of 4096 tokens, each matrix over 8 ranks."""
    totals = sum_by_kind(extrapolate(traced(LLAMA_7B, 0, 1), 1, traced(LLAMA_7B, 0, 3), 3, 16))
    weights = (2 * 32000 * 4096 + 32 * (4 * 4096 * 4096 + 3 * 4096 * 11008)) // 8 + (2 * 32 + 1) * 4096
    assert totals["dp_cp", 16, "reduce_scatter", "float32"] == (15, 4 * weights)
    assert totals["dp_cp", 16, "all_gather", "bfloat16"] == (15, 2 * weights)
    for kind, per_block in (("all_gather", 6), ("reduce_scatter", 4)):
        times = 16 * (32 * per_block + 2)
        assert totals["tp", 8, kind, "bfloat16"] == (times, times * 2 * 4096 * 4096)


@pytest.mark.nightly
def test_totals_of_llama_3_70b() -> None:
    """A middle stage: 10 of 80 layers, 8 micro batches of 8192 tokens; a rank has one of 8 kv heads."""
    totals = sum_by_kind(traced(LLAMA_70B, STAGE, 8))
    weights = 10 * ((2 * 8192 * 8192 + 3 * 8192 * 28672) // 32 + 2 * 128 * 8192 + 2 * 8192)
    assert totals["dp_cp", 2, "reduce_scatter", "float32"] == (6, 4 * weights)
    assert totals["dp_cp", 2, "all_gather", "bfloat16"] == (6, 2 * weights)
    assert totals["tp", 32, "all_gather", "bfloat16"] == (8 * 10 * 6, 8 * 10 * 6 * 2 * 8192 * 8192)
    assert totals["tp", 32, "reduce_scatter", "bfloat16"] == (8 * 10 * 4, 8 * 10 * 4 * 2 * 8192 * 8192)
    for kind in ("send", "receive"):
        assert totals["pp", 8, kind, "bfloat16"] == (2 * 8, 2 * 8 * 2 * 8192 * 8192 // 32)


def test_every_micro_batch_sends_the_same() -> None:
    few, more = (traced(LLAMA_70B, STAGE, count, ONE_LAYER) for count in (8, 9))
    assert extrapolate(few, 8, more, 9, 512) == planned(make_config(LLAMA_70B, None, ONE_LAYER), STAGE)


@pytest.mark.nightly
def test_every_micro_batch_sends_the_same_at_full_size() -> None:
    few, more = (traced(LLAMA_70B, STAGE, count) for count in (8, 9))
    assert extrapolate(few, 8, more, 9, 512) == planned(make_config(LLAMA_70B, None), STAGE)
    few, more = (traced(LLAMA_7B, 0, count) for count in (1, 3))
    assert extrapolate(few, 1, more, 3, 16) == planned(make_config(LLAMA_7B, None), 0)


def test_tensor_parallel_ranks_send_the_same() -> None:
    assert traced(LLAMA_70B, STAGE, 8, ONE_LAYER) == traced(LLAMA_70B, STAGE + 5, 8, ONE_LAYER)
    assert traced(LLAMA_7B, 0, 1, "model.layers=1") == traced(LLAMA_7B, 127, 1, "model.layers=1")


@pytest.mark.parametrize(
    ("recipe", "upper", "layers"),
    [
        (LLAMA_70B, 0, ONE_LAYER),
        (LLAMA_70B_CP, 0, ONE_LAYER),
        pytest.param(LLAMA_70B, 6, "model.layers=16", marks=NIGHTLY),
    ],
)
def test_a_stage_receives_what_its_neighbor_sends(recipe: str, upper: int, layers: str) -> None:
    above, below = (traced(recipe, stage * STAGE, 8, layers) for stage in (upper, upper + 1))

    def between(counts: MessageCounts, kind: str, peer: int) -> MessageCounts:
        return Counter(
            {m._replace(kind="", peer=None): n for m, n in counts.items() if (m.kind, m.peer) == (kind, peer)}
        )

    down, up = between(above, "send", upper + 1), between(below, "send", upper)
    assert down.total() == up.total() == 8 + 1
    assert down == between(below, "receive", upper)
    assert up == between(above, "receive", upper + 1)


def sum_by_kind(counts: MessageCounts) -> dict[tuple[str, int, str, str], tuple[int, int]]:
    """(messages, bytes) by group, group size, kind and dtype."""
    totals: dict[tuple[str, int, str, str], tuple[int, int]] = {}
    for message, times in counts.items():
        key = message[:4]
        count, size = totals.get(key, (0, 0))
        totals[key] = count + times, size + times * message.nbytes
    return totals


def extrapolate(few: MessageCounts, a: int, more: MessageCounts, b: int, wanted: int) -> MessageCounts:
    """Messages with `wanted` micro batches or layers, from those with `a` and with `b`."""
    assert few.keys() == more.keys()
    counts: MessageCounts = Counter()
    for message, times in few.items():
        increment, rest = divmod(more[message] - times, b - a)
        assert rest == 0
        counts[message] = times + increment * (wanted - a)
    return counts


def format_table(counts: MessageCounts) -> str:
    """The messages of a step with the sum of their sizes."""
    rows = sorted(sum_by_kind(counts).items(), key=lambda row: (MESH_GROUPS.index(row[0][0]), -row[1][1]))
    lines = [f"{'group':15}{'ranks':>5}  {'kind':16}{'dtype':9}{'messages':>9}{'MiB':>14}"]
    for (group, ranks, kind, dtype), (times, size) in rows:
        lines.append(f"{group:15}{ranks:5}  {kind:16}{dtype:9}{times:9,}{size / MIB:14,.2f}")
    return "\n".join(lines)


def main() -> None:
    for recipe, rank, (a, b) in (
        (LLAMA_7B, 0, (1, 2)),
        *((LLAMA_70B, stage * STAGE + 32, (8, 9)) for stage in (0, 1, 7)),
        (LLAMA_70B_CP, STAGE, (8, 9)),
    ):
        layout = layout_of(make_config(recipe, None))
        counts = extrapolate(traced(recipe, rank, a), a, traced(recipe, rank, b), b, layout.micro_batches)
        stage = layout.coords(rank)["pp"]
        print(f"\n{recipe}, rank {rank} (pipeline stage {stage}), step 1, {layout.micro_batches} micro batches")
        print(format_table(counts))


if __name__ == "__main__":
    main()
