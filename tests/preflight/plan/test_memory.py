"""Estimated memory against memory in use: on a CPU, on a GPU as recorded, and in dry runs of any size."""

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import plan_memory
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.preflight.plan.exact_peak import exact_peak
from tests.support import configs
from tests.support.examples import examples
from tests.support.frozen_linear import frozen
from trainyard.config.load import load, parse
from trainyard.config.schema import Config
from trainyard.devices import DEVICES
from trainyard.devices.kind import DeviceKind
from trainyard.parallel.layout import Layout
from trainyard.preflight.plan.memory import pass_memory
from trainyard.preflight.plan.memory.pass_memory import RankMemory
from trainyard.preflight.plan.memory.peak import estimate_memory
from trainyard.preflight.plan.planned_run import PlannedRun

TOLERANCE = 0.05
CPU, GPU, TRAINIUM = map(DEVICES.find, ("cpu", "cuda", "neuron"))
RESULTS = Path(plan_memory.__file__).parent / "results"
GPU_RESULTS = json.loads((RESULTS / "plan-memory-gpu.json").read_text())


def peak_memory(config: Config, layout: Layout, pp: int, device: DeviceKind) -> RankMemory:
    return estimate_memory(PlannedRun(config, layout, device), pp)


def allocated(config: Config, layout: Layout, pp: int, device: DeviceKind) -> int:
    """Estimated bytes, without fragmentation."""
    memory = peak_memory(config, layout, pp, device)
    return memory.total - memory.fragmentation


NIGHTLY = pytest.mark.nightly


def check_on_cpu(case: str, *overrides: str) -> None:
    config, _ = plan_memory.make_config("cpu", case)
    config = parse(config.model_dump(mode="json"), overrides)
    estimate = allocated(config, Layout.from_config(config, 1), 0, CPU)
    assert estimate == pytest.approx(plan_memory.measure_rank_on_cpu(config)["memory_bytes"], rel=TOLERANCE)


@pytest.mark.parametrize(
    "case", ["llama-parts", *(pytest.param(name, marks=NIGHTLY) for name in ("llama-fp32", "llama-full", "bert"))]
)
def test_estimate_equals_allocations_on_a_cpu(case: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    check_on_cpu(case, "model.layers=2", "model.hidden=256", "model.ffn=704")


ONE_RANK_CASES = [name for name, (_, ranks, _) in plan_memory.CPU_CASES.items() if ranks == 1]


@pytest.mark.nightly
@pytest.mark.parametrize("case", ONE_RANK_CASES)
def test_estimate_equals_allocations_of_larger_models_on_a_cpu(
    case: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    check_on_cpu(case)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "case", ["llama-zero1", "llama-zero2", "llama-zero3", "gpt-sequence", "llama-pp", "llama-cp", "experts-zero1"]
)
def test_estimate_equals_allocations_of_every_rank_on_a_cpu(case: str) -> None:
    config, layout = plan_memory.make_config("cpu", case)
    for pp, peaks in plan_memory.measure_on_cpu(case).items():
        estimate = allocated(config, layout, int(pp), CPU)
        assert [estimate / peak for peak in peaks] == pytest.approx([1.0] * len(peaks), abs=TOLERANCE)


@pytest.mark.parametrize("case", sorted(GPU_RESULTS))
def test_estimate_equals_recorded_allocations_on_a_gpu(case: str) -> None:
    config, layout = plan_memory.make_config("gpu", case)
    assert allocated(config, layout, 0, GPU) == pytest.approx(GPU_RESULTS[case]["memory_bytes"], rel=TOLERANCE)
    total = peak_memory(config, layout, 0, GPU).total
    assert total == pytest.approx(GPU_RESULTS[case]["reserved"], rel=TOLERANCE)


@pytest.mark.nightly
def test_a_plan_for_a_gpu_does_not_need_triton() -> None:
    """Triton exists for Linux only; a laptop plans for GPUs all the same."""
    code = (
        "import sys; sys.modules['triton'] = None; sys.path.append('bench')\n"
        "import plan_memory\n"
        "from trainyard.devices.builtin.cuda import DEVICE as CUDA\n"
        "from trainyard.preflight.plan.memory.peak import estimate_memory\n"
        "from trainyard.preflight.plan.planned_run import PlannedRun\n"
        "for case in ('llama-8', 'gpt', 'bert', 'llama-fp8'):\n"
        "    run = PlannedRun(*plan_memory.make_config('gpu', case), CUDA)\n"
        "    print(estimate_memory(run, 0).total)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=RESULTS.parents[1], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    cases = [plan_memory.make_config("gpu", case) for case in ("llama-8", "gpt", "bert", "llama-fp8")]
    assert [int(line) for line in done.stdout.split()] == [peak_memory(*case, 0, GPU).total for case in cases]


def test_estimate_equals_memory_of_a_speed_benchmark() -> None:
    """gpu-h200.json: other shapes and micro batches, measured by another script."""
    config, layout = plan_memory.make_config("gpu", "llama-8")
    rows = json.loads((RESULTS / "gpu-h200.json").read_text())["deepseek-1.3b"]["rows"]
    assert allocated(config, layout, 0, GPU) == pytest.approx(rows["trainyard"]["memory_bytes"], rel=TOLERANCE)


SHAPE = (
    "precision.kind=bf16 model.hidden=256 model.ffn=704 model.heads=8 model.kv_heads=4 model.max_positions=2048 "
    "data.seq_len=2048 model.vocab=2048 model.layers=2 train.global_batch=16 train.micro_batch=8"
)
PIPELINE = "layout.pp=2 train.micro_batch=4"
LAYOUTS = [
    "layout.tp=2",
    "layout.tp=2 layout.sequence_parallel=true",
    "layout.zero=1",
    "layout.cp=2",
    "layout.cp=2 layout.cp_method=all_gather",
    PIPELINE,
    f"{PIPELINE} layout.vpp=2 model.layers=4",
]
FAST = {("none", LAYOUTS[1]), ("none", LAYOUTS[3]), ("full", LAYOUTS[0]), ("none", LAYOUTS[-1])}


@pytest.mark.parametrize(
    ("recompute", "layout"),
    [
        pytest.param(recompute, layout, marks=[] if (recompute, layout) in FAST else NIGHTLY)
        for layout in LAYOUTS
        for recompute in ("none", "full")
    ],
)
def test_estimate_equals_exact_peak_of_a_dry_run(recompute: str, layout: str) -> None:
    config = load("tiny-llama", [*SHAPE.split(), *layout.split(), f"recompute.kind={recompute}"])
    sizes = Layout.from_config(config, 2)
    for pp in range(sizes.pp):
        assert allocated(config, sizes, pp, TRAINIUM) == pytest.approx(exact_peak(config, pp, 2), rel=TOLERANCE)


FROZEN = "embedding|norm|output|qkv|gate_up"
"""Parameters that are not trained; the first layer computes no gradient of its input."""


WIDE = "model.layers=12 model.hidden=2048 model.vocab=512 data.seq_len=64 train.micro_batch=1 train.global_batch=1"


def test_estimate_with_a_live_reference_equals_exact_peak() -> None:
    """With wide layers and few tokens, the peak is where its weights take the place of the trained ones."""
    pairs = ["data.source=preference", "train.objective=dpo", "preference.reference=live", "checkpoint.every=0"]
    config = load("tiny-llama", [*SHAPE.split(), *pairs, *WIDE.split()])
    estimate = allocated(config, Layout.from_config(config, 1), 0, TRAINIUM)
    assert estimate == pytest.approx(exact_peak(config, 0, 1), rel=0.01)


@pytest.mark.parametrize(
    "layout",
    [
        "model.layers=6",
        *(pytest.param(layout, marks=NIGHTLY) for layout in ("layout.zero=1", "layout.tp=2", PIPELINE)),
        pytest.param("recompute.kind=full model.layers=5", marks=NIGHTLY),
    ],
)
def test_estimate_with_frozen_weights_equals_exact_peak(layout: str) -> None:
    overrides = [*SHAPE.split(), "train.micro_batch=4", *layout.split()]
    plain = load("tiny-llama", overrides)
    model = frozen(plain.model.model_dump(mode="json"), pattern=FROZEN)
    config = parse({**plain.model_dump(mode="json"), "model": model})
    ranks = 1 if "layout" not in layout else 2
    sizes = Layout.from_config(config, ranks)
    for pp in range(sizes.pp):
        estimate = allocated(config, sizes, pp, TRAINIUM)
        assert estimate == pytest.approx(exact_peak(config, pp, ranks), rel=TOLERANCE)
        assert estimate < 0.9 * allocated(plain, sizes, pp, TRAINIUM)


def recipe_peaks(recipe: str, rank: int, *overrides: str) -> tuple[int, int]:
    """(estimated, exact) bytes of a rank of a recipe for 512 ranks."""
    config = load(recipe, overrides)
    layout = Layout.from_config(config, 512)
    return allocated(config, layout, layout.coords(rank)["pp"], TRAINIUM), exact_peak(config, rank, 512)


def test_each_layer_of_llama_3_70b_adds_what_is_estimated() -> None:
    """Stages of one and of two layers, with 8 micro batches, on the second pipeline rank."""
    shallow, deep = (
        recipe_peaks("llama3-70b", 64, f"model.layers={layers}", "train.global_batch=16") for layers in (8, 16)
    )
    assert deep[0] - shallow[0] == pytest.approx(deep[1] - shallow[1], rel=TOLERANCE)
    assert shallow[0] == pytest.approx(shallow[1], rel=TOLERANCE)


@pytest.mark.nightly
@pytest.mark.parametrize(("recipe", "rank", "batch"), [("llama3-70b", 64, 32), ("llama3-70b-trn2", 0, 64)], ids=str)
def test_estimate_equals_exact_peak_of_recipes_at_full_size(recipe: str, rank: int, batch: int) -> None:
    estimated, exact = recipe_peaks(recipe, rank, f"train.global_batch={batch}")
    assert estimated == pytest.approx(exact, rel=TOLERANCE)


@pytest.mark.parametrize(
    "recipe", ["llama2-7b", *(pytest.param(name, marks=NIGHTLY) for name in ("gpt3-6.7b", "bert-large-phase1"))]
)
@pytest.mark.parametrize("recompute", ["none", "attention", "full"])
def test_layers_beyond_the_traced_ones_add_what_each_adds(
    recipe: str, recompute: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against minutes for a model of thousands of layers: the estimate extrapolates, and equals a full one."""
    overrides = ["model.layers=12", "layout.tp=1", "layout.ranks=null", "train.global_batch=128"]
    config = load(recipe, [*overrides, f"recompute.kind={recompute}"])
    layout = Layout.from_config(config, 8)
    kinds = (CPU, GPU, TRAINIUM)
    full = [peak_memory(config, layout, 0, kind) for kind in kinds]
    monkeypatch.setattr(pass_memory, "TRACED_REPEATS", 12)
    assert [peak_memory(config, layout, 0, kind) for kind in kinds] == full


def test_memory_of_llama_3_70b_is_estimated_in_seconds() -> None:
    config = load("llama3-70b", [])
    layout = Layout.from_config(config, 512)
    start = time.process_time()
    for pp in range(layout.pp):
        peak_memory(config, layout, pp, TRAINIUM)
    assert time.process_time() - start < 12  # a slow machine included; a trace of all 80 layers takes minutes


FAMILIES = st.sampled_from(sorted(configs.TINY_MODELS))
KINDS = st.sampled_from([CPU, GPU, TRAINIUM])
PRECISIONS = st.sampled_from(["fp32", "bf16", "bf16_sr"])


@examples(40)
@given(FAMILIES, KINDS, PRECISIONS, st.sampled_from(["attention", "full"]))
def test_recompute_never_needs_more_memory(family: str, kind: DeviceKind, precision: str, recompute: str) -> None:
    # With a copy of keys and values for each query head, attention does not save what they were copied from. Recomputed
    # it does, and with two query heads per kv head, as here, that is more.
    assume((family, kind, precision, recompute) != ("llama", GPU, "fp32", "attention"))
    sections: dict[str, dict[str, Any]] = {
        "data": {"seq_len": 64},
        "train": {"global_batch": 512, "micro_batch": 512},
        "precision": {"kind": precision},
    }
    base = configs.tiny_config(family, **sections)
    recomputed = configs.tiny_config(family, recompute={"kind": recompute}, **sections)
    layout = Layout.from_config(base, 1)
    assert peak_memory(recomputed, layout, 0, kind).total <= peak_memory(base, layout, 0, kind).total


@examples(40)
@given(FAMILIES, KINDS, PRECISIONS, st.sampled_from([2, 4]))
def test_zero_1_shards_the_optimizer_state(family: str, kind: DeviceKind, precision: str, ranks: int) -> None:
    memories = []
    for zero in (0, 1):
        config = configs.tiny_config(
            family, precision={"kind": precision}, layout={"zero": zero}, train={"global_batch": 8}
        )
        memories.append(peak_memory(config, Layout.from_config(config, ranks), 0, kind))
    assert memories[0].weights == memories[1].weights
    assert memories[1].optimizer <= memories[0].optimizer
