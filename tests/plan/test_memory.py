"""Planned memory against what is really held: on a CPU, on a GPU as recorded, and in rehearsals of any size."""

import importlib.util
import json
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.plan.exact_peak import peak
from tests.support import configs
from trainyard.config.load import load
from trainyard.parallel.layout import Layout
from trainyard.plan.memory.peak import RankMemory, estimate_memory

ROOT = Path(__file__).parents[2]
NEAR = 0.05
RESULTS = ROOT / "bench" / "results" / "plan-memory-gpu.json"


def _bench() -> Any:
    """The measurements themselves are those of the published figures."""
    spec = importlib.util.spec_from_file_location("plan_memory", ROOT / "bench" / "plan_memory.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


bench = _bench()


def planned(plan: RankMemory) -> int:
    return plan.total - plan.fragmentation


SLOW = pytest.mark.nightly


@pytest.mark.parametrize(
    "case",
    [
        "llama-fp32",
        "llama",
        "llama-attention",
        "llama-parts",
        "llama-full",
        "llama-sr",
        pytest.param("gpt", marks=SLOW),
        pytest.param("bert", marks=SLOW),
    ],
)
def test_a_cpu_holds_what_was_planned(case: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    config, layout = bench.configure("cpu", case)
    assert planned(estimate_memory(config, layout, 0, "cpu")) == pytest.approx(
        bench.on_cpu(config)["memory_bytes"], rel=NEAR
    )


@pytest.mark.nightly
@pytest.mark.parametrize("case", ["llama-zero1", "llama-zero2", "llama-zero3", "gpt-sequence", "llama-pp", "llama-cp"])
def test_ranks_on_a_cpu_hold_what_was_planned(case: str) -> None:
    """Every rank."""
    config, layout = bench.configure("cpu", case)
    for place, peaks in bench.ranks_on_cpu(case).items():
        plan = planned(estimate_memory(config, layout, int(place), "cpu"))
        assert [plan / peak for peak in peaks] == pytest.approx([1.0] * len(peaks), abs=NEAR)


@pytest.mark.parametrize("case", sorted(json.loads(RESULTS.read_text())))
def test_a_gpu_held_what_is_planned(case: str) -> None:
    found = json.loads(RESULTS.read_text())[case]
    config, layout = bench.configure("gpu", case)
    plan = estimate_memory(config, layout, 0, "gpu")
    assert planned(plan) == pytest.approx(found["memory_bytes"], rel=NEAR)
    assert plan.total == pytest.approx(found["reserved"], rel=NEAR)


def test_runs_that_were_measured_for_speed() -> None:
    """bench/results/gpu-h200.json: other shapes and micro batches, by another script."""
    file = ROOT / "bench" / "results" / "gpu-h200.json"
    config, layout = bench.configure("gpu", "llama-8")
    assert planned(estimate_memory(config, layout, 0, "gpu")) == pytest.approx(
        json.loads(file.read_text())["deepseek-1.3b"]["rows"]["trainyard"]["memory_bytes"], rel=NEAR
    )


WORDS = ["precision.kind=bf16", "model.hidden=256", "model.ffn=704", "model.heads=8", "model.kv_heads=4"]
LONG = ["model.max_positions=2048", "data.seq_len=2048", "model.vocab=2048", "model.layers=4"]
PIPELINE = ["layout.pp=2", "train.micro_batch=4", "train.global_batch=32"]


@pytest.mark.parametrize("recompute", [["recompute.kind=full"], ["recompute.kind=none"]])
@pytest.mark.parametrize(
    "words",
    [
        ["layout.tp=2"],
        ["layout.tp=2", "layout.sequence_parallel=true"],
        ["layout.zero=1"],
        ["layout.cp=2"],
        ["layout.cp=2", "layout.cp_method=all_gather"],
        PIPELINE,
        [*PIPELINE, "layout.vpp=2"],
    ],
    ids=" ".join,
)
def test_a_rehearsed_rank_holds_what_was_planned(words: list[str], recompute: list[str]) -> None:
    config = load("tiny-llama", ["train.global_batch=32", "train.micro_batch=8", *WORDS, *LONG, *words, *recompute])
    layout = Layout.from_config(config, 2)
    for place in range(layout.pp):
        assert planned(estimate_memory(config, layout, place, "trainium")) == pytest.approx(
            peak(config, place, 2), rel=NEAR
        )


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("recipe", "rank", "batch"), [("llama3-70b", 64, 32), ("llama3-70b-trn2", 0, 64)], ids=lambda value: str(value)
)
def test_recipes_at_full_size(recipe: str, rank: int, batch: int) -> None:
    config = load(recipe, [f"train.global_batch={batch}"])
    layout = Layout.from_config(config, 512)
    place = layout.coords(rank)["pp"]
    assert planned(estimate_memory(config, layout, place, "trainium")) == pytest.approx(
        peak(config, rank, 512), rel=NEAR
    )


def test_the_memory_of_70b_is_quickly_known() -> None:
    config = load("llama3-70b", [])
    layout = Layout.from_config(config, 512)
    start = time.process_time()
    for place in range(layout.pp):
        estimate_memory(config, layout, place, "trainium")
    assert time.process_time() - start < 3


FAMILIES = st.sampled_from(sorted(configs.TINY_MODELS))
KINDS = st.sampled_from(["cpu", "gpu", "trainium"])
PRECISIONS = st.sampled_from(["fp32", "bf16", "bf16_sr"])


@settings(deadline=None, max_examples=40)
@given(FAMILIES, KINDS, PRECISIONS, st.sampled_from(["attention", "full"]))
def test_recompute_never_keeps_more(family: str, kind: str, precision: str, recompute: str) -> None:
    # Given a copy of keys and values for each head, attention does not keep what they were copied from. Recomputed it
    # does, and with two heads to a kv head, as here, that is more.
    assume((family, kind, precision, recompute) != ("llama", "gpu", "fp32", "attention"))
    shape = {"data": {"seq_len": 64}, "train": {"global_batch": 512, "micro_batch": 512}}
    base = configs.tiny_config(family, precision={"kind": precision}, **shape)
    other = configs.tiny_config(family, precision={"kind": precision}, recompute={"kind": recompute}, **shape)
    layout = Layout.from_config(base, 1)
    assert estimate_memory(other, layout, 0, kind).total <= estimate_memory(base, layout, 0, kind).total


@settings(deadline=None, max_examples=40)
@given(FAMILIES, KINDS, PRECISIONS, st.sampled_from([2, 4]))
def test_zero_shares_out_the_state(family: str, kind: str, precision: str, ranks: int) -> None:
    plans = []
    for zero in (0, 1):
        config = configs.tiny_config(
            family, precision={"kind": precision}, layout={"zero": zero}, train={"global_batch": 8}
        )
        plans.append(estimate_memory(config, Layout.from_config(config, ranks), 0, kind))
    assert plans[0].weights == plans[1].weights
    assert plans[1].optimizer <= plans[0].optimizer


def test_kinds_are_named() -> None:
    config = configs.tiny_config()
    with pytest.raises(KeyError):
        estimate_memory(config, Layout.from_config(config, 1), 0, "abacus")
