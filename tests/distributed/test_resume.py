"""A checkpoint of one layout goes on at any other: the same next losses as the run that was never stopped."""

from pathlib import Path
from typing import Any

import pytest

from tests.support import configs
from tests.support.pool import Pool
from trainyard.config.schema import Config

STEPS, SAVED = 6, 3
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
PAIRS = [
    *[("one", name) for name in LAYOUTS],
    *[(name, "one") for name in LAYOUTS if name != "one"],
    ("tp2-pp2-zero1", "zero3"),
    ("zero3", "tp2-pp2-zero1"),
    ("cp2-zero1", "tp4-kv"),
    ("tp4-kv", "pp2-vpp2"),
    ("pp2-zero2", "zero1-odd"),
]


def configure(directory: Path, name: str, family: str = "llama", **sections: dict[str, Any]) -> Config:
    base: dict[str, Any] = {
        "train": {"global_batch": 12, "micro_batch": 1, "steps": STEPS},
        "optimizer": {"eps": 1e-3, "lr": 1e-2},
        "schedule": {"warmup_steps": 4},
        "checkpoint": {"export_hf": False},
        "log": {"directory": str(directory)},
        "layout": LAYOUTS[name][1],
    }
    merged = {key: {**base.get(key, {}), **sections.get(key, {})} for key in {*base, *sections}}
    model = {**configs.TINY_MODELS[family], "layers": 4} | ({"ffn": 64} if family == "llama" else {})
    return configs.tiny_config(model, **merged)


def run(pool: Pool, config: Config, ranks: int) -> dict[str, Any]:
    return pool.run("tests.distributed.rank_jobs:run", (config, False), ranks)[0]


@pytest.fixture(scope="module")
def saved(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, list[float]]]:
    """For each layout, a checkpoint of step SAVED and the losses of the whole run, made when first asked for."""

    class Saved(dict[str, tuple[Path, list[float]]]):
        def __missing__(self, name: str) -> tuple[Path, list[float]]:
            directory = tmp_path_factory.mktemp(name)
            config = configure(directory, name, checkpoint={"every": SAVED, "export_hf": False})
            found = run(pool, config, LAYOUTS[name][0])
            self[name] = Path(found["directory"]) / "checkpoints" / f"step_{SAVED:08d}", found["losses"]
            return self[name]

    return Saved()


@pytest.mark.parametrize(("before", "after"), PAIRS)
def test_goes_on_at_another_layout(
    pool: Pool, tmp_path: Path, saved: dict[str, tuple[Path, list[float]]], before: str, after: str
) -> None:
    checkpoint, losses = saved[before]
    config = configure(tmp_path, after, checkpoint={"resume": str(checkpoint), "export_hf": False})
    found = run(pool, config, LAYOUTS[after][0])
    assert len(found["losses"]) == STEPS - SAVED
    if before == after:
        assert found["losses"] == losses[SAVED:]  # bit for bit
    else:
        assert found["losses"] == pytest.approx(losses[SAVED:], rel=2e-6)


@pytest.mark.parametrize(("family", "kind"), [("gpt", "bf16"), ("bert", "bf16_sr"), ("llama", "fp8")])
def test_goes_on_bit_for_bit_in_low_precision(pool: Pool, tmp_path: Path, family: str, kind: str) -> None:
    precision = {"kind": kind}
    first = configure(tmp_path, "tp2-sp", family, precision=precision, checkpoint={"every": SAVED})
    whole = run(pool, first, 2)
    where = str(Path(whole["directory"]) / "checkpoints" / f"step_{SAVED:08d}")
    again = run(pool, configure(tmp_path, "tp2-sp", family, precision=precision, checkpoint={"resume": where}), 2)
    assert again["losses"] == whole["losses"][SAVED:]


def test_ranks_of_a_host_take_turns(pool: Pool, tmp_path: Path) -> None:
    config = configure(tmp_path, "zero1-odd", checkpoint={"every": SAVED, "writers_per_host": 2})
    whole = run(pool, config, 3)
    where = str(Path(whole["directory"]) / "checkpoints")
    again = run(pool, configure(tmp_path, "zero1-odd", checkpoint={"resume": where, "export_hf": False}), 3)
    assert again["losses"] == []  # the newest is that of the last step
    assert again["steps"] == STEPS
