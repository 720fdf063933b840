"""A checkpoint of any layout resumes at any other layout, with the losses of the run that was never interrupted."""

from pathlib import Path
from typing import Any

import pytest

from tests.support import configs
from tests.support.frozen_linear import frozen
from tests.support.pool import Pool
from tests.support.scaled_linear import scaled
from tests.support.two_kinds import TWO_KINDS
from trainyard.config.schema import Config

STEPS, SAVED_STEP = 3, 1
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "tp2-sp": (2, {"tp": 2, "sequence_parallel": True}),
    "pp2-vpp2": (2, {"pp": 2, "vpp": 2}),
    "cp2-zero1": (4, {"cp": 2, "zero": 1}),
    "zero1-odd": (3, {"zero": 1}),
    "zero3": (2, {"zero": 3}),
    "tp4-kv": (4, {"tp": 4, "zero": 1}),
    "tp2-pp2-zero1": (8, {"tp": 2, "pp": 2, "zero": 1, "sequence_parallel": True}),
    "pp2-zero2": (4, {"pp": 2, "zero": 2}),
}
EXPERT_LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "ep2-zero1": (4, {"ep": 2, "zero": 1}),
    "ep2-tp2": (4, {"ep": 2, "tp": 2}),
    "ep4-zero3": (4, {"ep": 4, "zero": 3}),
    "tp2-pp2": (4, {"tp": 2, "pp": 2}),
    "pp2-cut1": (2, {"pp": 2, "pipeline_cuts": (0,)}),
}
"""Layouts of a mixture of experts."""
FAST_PAIRS = [("one", "one"), ("one", "tp4-kv"), ("cp2-zero1", "pp2-vpp2"), ("cp2-zero1", "zero1-odd")]
ALL_PAIRS = dict.fromkeys(
    [("tp2-pp2-zero1", "zero3"), ("zero3", "tp2-pp2-zero1"), ("cp2-zero1", "tp4-kv"), ("tp4-kv", "pp2-vpp2")]
    + [("pp2-vpp2", "tp2-sp"), ("tp2-sp", "pp2-zero2"), ("pp2-zero2", "zero3"), ("zero3", "zero1-odd")]
    + [("one", name) for name in LAYOUTS]
    + [(name, "one") for name in LAYOUTS]
)
PAIRS = [*FAST_PAIRS, *(pytest.param(*pair, marks=pytest.mark.nightly) for pair in ALL_PAIRS if pair not in FAST_PAIRS)]


def configure(
    directory: Path, layout: str, family: str = "llama", layers: int = 4, **sections: dict[str, Any]
) -> Config:
    base: dict[str, Any] = {
        "train": {"global_batch": 6, "micro_batch": 1, "steps": STEPS, "embedding_noise": 5.0},
        "optimizer": {"eps": 1e-3, "lr": 1e-2},
        "schedule": {"warmup_steps": 3},
        "checkpoint": {"export_hf": False},
        "log": {"directory": str(directory)},
        "layout": {**LAYOUTS, **EXPERT_LAYOUTS}[layout][1],
    }
    merged = {key: {**base.get(key, {}), **sections.get(key, {})} for key in {*base, *sections}}
    wrapped = {"scaled": scaled(TWO_KINDS), "frozen": frozen(TWO_KINDS, lr_scale=2.0)}
    model = {**configs.TINY_MODELS, "moe": configs.MOE, "two_kinds": TWO_KINDS, **wrapped}[family]
    model = {**model, "layers": layers} | ({"ffn": 64} if family == "llama" else {})
    return configs.tiny_config(model, **merged)


def run(pool: Pool, config: Config, ranks: int) -> dict[str, Any]:
    return pool.run("tests.distributed.rank_jobs:run", (config,), ranks)[0]


def run_and_save(pool: Pool, directory: Path, layout: str, **sections: Any) -> tuple[str, list[float]]:
    """Train and save at SAVED_STEP. Returns the checkpoint's path and the losses of all steps."""
    config = configure(directory, layout, checkpoint={"every": SAVED_STEP}, **sections)
    result = run(pool, config, LAYOUTS[layout][0])
    return str(Path(result["directory"]) / "checkpoints" / f"step_{SAVED_STEP:08d}"), result["losses"]


@pytest.fixture(scope="module")
def saved_runs(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, list[float]]]:
    """Checkpoint and losses of each layout, created on first use."""

    class SavedRuns(dict[str, tuple[str, list[float]]]):
        def __missing__(self, layout: str) -> tuple[str, list[float]]:
            self[layout] = run_and_save(pool, tmp_path_factory.mktemp(layout), layout)
            return self[layout]

    return SavedRuns()


@pytest.mark.parametrize(("before", "after"), PAIRS)
def test_resume_at_another_layout(
    pool: Pool, tmp_path: Path, saved_runs: dict[str, tuple[str, list[float]]], before: str, after: str
) -> None:
    checkpoint, losses = saved_runs[before]
    resumed = run(pool, configure(tmp_path, after, checkpoint={"resume": checkpoint}), LAYOUTS[after][0])
    if before == after:
        assert resumed["losses"] == losses[SAVED_STEP:]  # bit for bit
    else:
        assert resumed["losses"] == pytest.approx(losses[SAVED_STEP:], rel=2e-6)


@pytest.mark.parametrize(
    ("before", "after"),
    [pytest.param("tp2-pp2-zero1", "one", marks=pytest.mark.nightly), ("zero1-odd", "tp4-kv")],
)
def test_resume_muon_at_another_layout(pool: Pool, tmp_path: Path, before: str, after: str) -> None:
    muon = {"kind": "muon"}
    checkpoint, losses = run_and_save(pool, tmp_path, before, optimizer=muon)
    config = configure(tmp_path, after, optimizer=muon, checkpoint={"resume": checkpoint})
    assert run(pool, config, LAYOUTS[after][0])["losses"] == pytest.approx(losses[SAVED_STEP:], rel=2e-6)


@pytest.mark.parametrize(
    ("before", "after"), [("tp4-kv", "zero3"), pytest.param("zero1-odd", "pp2-vpp2", marks=pytest.mark.nightly)]
)
def test_resume_a_rule_of_the_user_at_another_layout(pool: Pool, tmp_path: Path, before: str, after: str) -> None:
    rule = {"kind": "tests.support.user_code:Momentum"}
    checkpoint, losses = run_and_save(pool, tmp_path, before, optimizer=rule)
    config = configure(tmp_path, after, optimizer=rule, checkpoint={"resume": checkpoint})
    assert run(pool, config, LAYOUTS[after][0])["losses"] == pytest.approx(losses[SAVED_STEP:], rel=2e-6)


@pytest.mark.parametrize(
    ("family", "before", "after"),
    [
        ("moe", "ep2-zero1", "ep2-tp2"),
        ("two_kinds", "pp2-cut1", "ep2-tp2"),
        ("frozen", "tp2-pp2", "ep2-zero1"),
        *(
            pytest.param(*names, marks=pytest.mark.nightly)
            for names in (
                ("moe", "ep2-tp2", "ep4-zero3"),
                ("moe", "ep4-zero3", "tp2-pp2"),
                ("moe", "tp2-pp2", "ep2-zero1"),
                ("two_kinds", "ep4-zero3", "pp2-cut1"),
                ("two_kinds", "tp2-pp2", "ep4-zero3"),
                ("scaled", "tp2-pp2", "ep4-zero3"),
                ("frozen", "ep4-zero3", "tp2-pp2"),
                ("frozen", "ep2-zero1", "ep4-zero3"),
            )
        ),
    ],
)
def test_resume_experts_at_another_layout(pool: Pool, tmp_path: Path, family: str, before: str, after: str) -> None:
    def config(layout: str, **checkpoint: Any) -> Config:
        return configure(tmp_path, layout, family, train={"global_batch": 8}, checkpoint=checkpoint)

    first = run(pool, config(before, every=SAVED_STEP), EXPERT_LAYOUTS[before][0])
    checkpoint = str(Path(first["directory"]) / "checkpoints" / f"step_{SAVED_STEP:08d}")
    resumed = run(pool, config(after, resume=checkpoint), EXPERT_LAYOUTS[after][0])
    assert resumed["losses"] == pytest.approx(first["losses"][SAVED_STEP:], rel=2e-6)


LOW_PRECISION = [("gpt", "bf16"), ("llama", "fp8"), pytest.param("bert", "bf16_sr", marks=pytest.mark.nightly)]


@pytest.mark.parametrize(("family", "kind"), LOW_PRECISION)
def test_resume_in_low_precision_is_bitwise(pool: Pool, tmp_path: Path, family: str, kind: str) -> None:
    sections: dict[str, Any] = {"family": family, "layers": 2, "precision": {"kind": kind}}
    checkpoint, losses = run_and_save(pool, tmp_path, "tp2-sp", **sections)
    resumed = run(pool, configure(tmp_path, "tp2-sp", checkpoint={"resume": checkpoint}, **sections), 2)
    assert resumed["losses"] == losses[SAVED_STEP:]


def test_ranks_of_a_host_write_in_turns(pool: Pool, tmp_path: Path) -> None:
    config = configure(tmp_path, "zero1-odd", checkpoint={"every": SAVED_STEP, "writers_per_host": 2})
    checkpoints = str(Path(run(pool, config, 3)["directory"]) / "checkpoints")
    resumed = run(pool, configure(tmp_path, "zero1-odd", checkpoint={"resume": checkpoints}), 3)
    assert resumed["losses"] == []  # the latest checkpoint is that of the last step
    assert resumed["steps"] == STEPS
