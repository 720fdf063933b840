"""Complete runs on several ranks: evaluation, user losses, exported weights, stopping, skipping, compilation."""

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.support import configs
from tests.support.pool import Pool, RankDied, RankFailed
from trainyard.compat import supports_unsorted_groups
from trainyard.devices.neuron.topology import rank_order
from trainyard.preflight.verify import FP32_TOLERANCES

JOBS = "tests.distributed.rank_jobs"
LAYOUTS: list[tuple[int, dict[str, Any]]] = [
    (8, {"tp": 2, "pp": 2, "zero": 1, "sequence_parallel": True}),
    (4, {"cp": 2, "zero": 3}),
    (4, {"pp": 2, "vpp": 2, "tp": 2}),
]
SLOW = pytest.mark.nightly
RUNS = [
    pytest.param("gpt", False, *LAYOUTS[0]),
    pytest.param("gpt", True, *LAYOUTS[1]),
    pytest.param("gpt", True, 2, {"tp": 2, "sequence_parallel": True, "zero": 1}),
    pytest.param("bert", False, *LAYOUTS[2]),
    pytest.param("moe", False, 4, {"ep": 2, "zero": 1}),
    pytest.param("moe", False, 4, {"ep": 2, "tp": 2, "zero": 0}, marks=SLOW),
    *(pytest.param("gpt", False, *layout, marks=SLOW) for layout in LAYOUTS[1:]),
    *(pytest.param("gpt", True, *layout, marks=SLOW) for layout in (LAYOUTS[0], LAYOUTS[2])),
    *(pytest.param("bert", False, *layout, marks=SLOW) for layout in LAYOUTS[:2]),
]


def configure(tmp_path: Path, model: str | dict[str, Any], layout: dict[str, Any], **sections: dict[str, Any]) -> Any:
    model = {**configs.TINY_MODELS, "moe": configs.MOE}[model] if isinstance(model, str) else model
    base: dict[str, Any] = {
        "train": {"global_batch": 4, "micro_batch": 1, "steps": 2},
        "optimizer": {"eps": 1e-3, "max_grad_norm": 0},  # clipping would hide a wrong divisor of the gradients
        "data": {"validation_fraction": 6e-7},  # 11 samples: the last batch is incomplete
        "evaluate": {"every": 2},
        "checkpoint": {"export_hf": True},
        "log": {"directory": str(tmp_path), "name": f"{model['family']}-{len(layout)}"},
        "layout": layout,
    }
    merged = {name: {**base.get(name, {}), **sections.get(name, {})} for name in {*base, *sections}}
    return configs.tiny_config({**model, "layers": 4}, **merged)


@pytest.mark.parametrize(("family", "user_loss", "ranks", "layout"), RUNS)
def test_run_equals_the_run_of_one_rank(
    pool: Pool, tmp_path: Path, family: str, user_loss: bool, ranks: int, layout: dict[str, Any]
) -> None:
    expected = pool.run(f"{JOBS}:run", (configure(tmp_path, family, {}), user_loss), 1)[0]
    results = pool.run(f"{JOBS}:run", (configure(tmp_path, family, layout), user_loss), ranks)
    assert {result["directory"] for result in results} == {results[0]["directory"]}
    for result in results:
        assert result["losses"] == pytest.approx(expected["losses"], rel=1e-6)
        assert result["grad_norms"] == pytest.approx(expected["grad_norms"], rel=1e-5)
        assert result["evaluation"] == pytest.approx(expected["evaluation"], rel=1e-5)
    exported, reference = (
        load_file(Path(result["directory"]) / "model" / "model.safetensors") for result in (results[0], expected)
    )
    _, rtol, floor = FP32_TOLERANCES
    assert exported.keys() == reference.keys()
    for name, tensor in reference.items():
        assert (exported[name] - tensor).abs().max() <= rtol * max(tensor.abs().max(), floor), name


@pytest.mark.parametrize(
    ("ranks", "layout"),
    [
        (4, {"tp": 2, "sequence_parallel": True, "zero": 1}),
        pytest.param(4, {"pp": 2, "cp": 2}, marks=SLOW),
        pytest.param(2, {"zero": 3}, marks=SLOW),
    ],
)
def test_named_validation_sets_equal_those_of_one_rank(
    pool: Pool, tmp_path: Path, ranks: int, layout: dict[str, Any]
) -> None:
    """The sets have 13 and 3 samples, and the last sample of each is partial: some ranks have only padding."""
    (tmp_path / "web.txt").write_text("the quick brown fox " * 10)
    (tmp_path / "code.txt").write_text("def main(): return\n" * 2)
    sections: dict[str, Any] = {
        "data": {"source": "text", "validation_fraction": 0.0},
        "evaluate": {"every": 2, "sets": {name: str(tmp_path / f"{name}.txt") for name in ("web", "code")}},
        "checkpoint": {"export_hf": False},
    }
    expected = pool.run(f"{JOBS}:run", (configure(tmp_path, "gpt", {}, **sections),), 1)[0]["evaluation"]
    metrics = ("loss", "perplexity", "accuracy")
    assert list(expected) == [f"{name}/{metric}" for name in ("web", "code") for metric in metrics]
    assert expected["web/loss"] != pytest.approx(expected["code/loss"], rel=1e-4)
    for result in pool.run(f"{JOBS}:run", (configure(tmp_path, "gpt", layout, **sections),), ranks):
        assert result["evaluation"] == pytest.approx(expected, rel=1e-5)


def test_all_ranks_stop_at_the_same_step_if_one_is_asked(pool: Pool, tmp_path: Path) -> None:
    sections: dict[str, Any] = {"train": {"steps": 1000}, "checkpoint": {"export_hf": False}, "evaluate": {"every": 4}}
    config = configure(tmp_path, "llama", {"pp": 2}, **sections)
    results = pool.run(f"{JOBS}:stopped_on_one_rank", (config, 1, 3), 4)
    assert [result["steps"] for result in results] == [3] * 4
    assert all(result["interrupted"] for result in results)


def test_every_rank_names_the_nonfinite_gradient(pool: Pool, tmp_path: Path) -> None:
    config = configure(tmp_path, "llama", {"pp": 2}, train={"steps": 4, "max_skipped_steps": 2})
    for line in pool.run(f"{JOBS}:run_with_nan_gradient", (config, "layers.3.mlp.down.weight"), 2):
        assert "step 2: 2 steps in a row were not finite" in line
        assert "gradient of " in line
        assert "layers.3.mlp.down.weight" in line or "more" in line


@pytest.mark.parametrize(
    ("family", "sequence_parallel"),
    [("llama", True), *(pytest.param(*case, marks=SLOW) for case in (("llama", False), ("gpt", False), ("gpt", True)))],
)
def test_blocks_compile_to_one_graph_on_all_ranks(pool: Pool, family: str, sequence_parallel: bool) -> None:
    layout = {"tp": 2, "sequence_parallel": sequence_parallel}
    config = configs.tiny_config({**configs.TINY_MODELS[family], "layers": 3}, layout=layout)
    results = pool.run(f"{JOBS}:compiled_graphs", (config,), 2)
    assert [result["breaks"] for result in results] == [0, 0]
    assert [len(result["graphs"]) for result in results] == [1, 1]  # one graph for all three blocks
    assert results[0]["graphs"] == results[1]["graphs"]
    assert results[0]["collectives"] == 4  # into and out of attention and MLP
    assert results[0]["losses"] == pytest.approx(results[0]["eager"], rel=1e-5)


@pytest.mark.parametrize("family", ["llama", "gpt", "bert"])
def test_sequence_parallel_ranks_save_no_full_activation(pool: Pool, family: str) -> None:
    """The gathered input of a column-parallel layer is gathered again in backward instead of being saved."""
    model = {**configs.TINY_MODELS[family], "ffn": 96}  # half of it differs from the hidden size
    config = configs.tiny_config(model, layout={"tp": 2, "sequence_parallel": True})
    shapes = pool.run(f"{JOBS}:saved_activation_shapes", (config,), 2)[0]
    batch, tokens, hidden = config.train.micro_batch, config.data.seq_len, config.model.hidden
    assert (batch, tokens // 2, hidden) in shapes
    assert (batch, tokens, hidden) not in shapes


COMPILED_LAYOUTS = [{"tp": 2, "sequence_parallel": True}, {"zero": 3}, {"pp": 2}, {"cp": 2}]
COMPILED = [
    *(pytest.param("aot_eager", layout, id=f"aot_eager-{layout}") for layout in COMPILED_LAYOUTS[:1]),
    *(pytest.param("aot_eager", layout, id=f"aot_eager-{layout}", marks=SLOW) for layout in COMPILED_LAYOUTS[1:]),
    *(pytest.param("inductor", layout, id=f"inductor-{layout}", marks=SLOW) for layout in COMPILED_LAYOUTS),
]


@pytest.mark.parametrize(("backend", "layout"), COMPILED)
def test_compiled_run_equals_eager_run(pool: Pool, tmp_path: Path, backend: str, layout: dict[str, Any]) -> None:
    """In the fast tier only tests of precompilation use inductor, which starts a C++ compiler."""
    sections: dict[str, Any] = {"checkpoint": {"export_hf": False}, "evaluate": {"every": 0}}
    eager = pool.run(f"{JOBS}:run", (configure(tmp_path, "llama", {}, **sections),), 1)[0]
    config = configure(tmp_path, "llama", layout, compile={"enabled": True}, **sections)
    compiled = pool.run(f"{JOBS}:run", (config, False, backend), 2)[0]
    assert compiled["losses"] == pytest.approx(eager["losses"], rel=1e-5)


@SLOW  # tests/models/test_moe.py compiles one layer
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("capacity", [pytest.param(None, id="all"), pytest.param(0.75, id="capacity")])
def test_compiled_experts_equal_eager_ones(pool: Pool, tmp_path: Path, backend: str, capacity: float | None) -> None:
    """One graph for all numbers of rows that a rank receives."""
    model = {**configs.MOE, "capacity_factor": capacity}
    sections: dict[str, Any] = {"checkpoint": {"export_hf": False}, "evaluate": {"every": 0}}
    eager = pool.run(f"{JOBS}:run", (configure(tmp_path, model, {}, **sections),), 1)[0]
    config = configure(tmp_path, model, {"ep": 2, "zero": 1}, compile={"enabled": True}, **sections)
    compiled = pool.run(f"{JOBS}:run", (config, False, backend), 2)[0]
    assert compiled["losses"] == pytest.approx(eager["losses"], rel=1e-5)


def test_ranks_in_another_order(pool: Pool) -> None:
    """As on an instance whose tensor-parallel ranks are not adjacent."""
    layout = {"tp": 4, "zero": 1, "sequence_parallel": True}
    config = configs.tiny_config(layout=layout, optimizer={"eps": 1e-3})
    job = (f"{JOBS}:compare_reordered", (config, [0, 1, 6, 7, 2, 3, 4, 5]), 8)
    if not supports_unsorted_groups():
        with pytest.raises(RankFailed, match=r"needs torch 2\.13"):
            pool.run(*job)
        return
    assert pool.run(*job)[0] == []


def test_strided_rank_order_works_with_any_torch(pool: Pool) -> None:
    """As on trn1 for tp=4 with torch 2.9: the ranks of every group that gathers or scatters are in ascending order."""
    order = rank_order("trn1", 1, 4, 32)
    assert order[:6] == [0, 8, 16, 24, 1, 9]
    eight_ranks = [order[index] // 4 for index in range(32) if order[index] % 4 == 0]
    assert eight_ranks == [0, 2, 4, 6, 1, 3, 5, 7]
    for layout in ({"tp": 4, "zero": 1, "sequence_parallel": True}, {"tp": 4, "pp": 2}):
        config = configs.tiny_config(layout=layout, optimizer={"eps": 1e-3})
        assert pool.run(f"{JOBS}:compare_reordered", (config, eight_ranks, False), 8)[0] == []


def test_pool_reports_the_error_of_a_rank(pool: Pool) -> None:
    config = configs.tiny_config(layout={"pp": 3}, model={**configs.LLAMA, "layers": 3})
    with pytest.raises(RankFailed, match="needs a multiple of 3 ranks"):
        pool.run(f"{JOBS}:run", (config,), 2)


def test_pool_reports_where_a_rank_crashed(pool: Pool) -> None:
    with pytest.raises(RankDied, match=r"rank 1's process died with exit code -6; (.|\n)*in abort_on_rank_1"):
        pool.run(f"{JOBS}:abort_on_rank_1", (), 2)
