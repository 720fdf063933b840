"""Evaluation of a checkpoint at any layout gives the result of one rank."""

from pathlib import Path

import pytest

from tests.evaluate.conftest import write_sentence_pairs
from tests.support.hf_folders import TEXTS, save_hf_folder
from tests.support.pool import Pool

JOBS = "tests.distributed.evaluation_jobs"
LAYOUTS: dict[str, tuple[int, list[str]]] = {
    "tp-sp-pp": (4, ["layout.tp=2", "layout.sequence_parallel=true", "layout.pp=2"]),
    "cp-dp": (4, ["layout.cp=2", "train.micro_batch=1"]),
    "vpp-dp": (4, ["layout.pp=2", "layout.vpp=2", "train.micro_batch=3"]),
}
CASES = [
    pytest.param("llama", "tp-sp-pp"),
    pytest.param("bert", "cp-dp"),
    pytest.param("gpt", "cp-dp", marks=pytest.mark.nightly),
    *(pytest.param("llama", layout, marks=pytest.mark.nightly) for layout in ("cp-dp", "vpp-dp")),
    *(pytest.param("gpt", layout, marks=pytest.mark.nightly) for layout in ("tp-sp-pp", "vpp-dp")),
    pytest.param("bert", "tp-sp-pp", marks=pytest.mark.nightly),
]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    directories = {family: tmp_path_factory.mktemp(family) for family in ("llama", "gpt", "bert")}
    for family, directory in directories.items():
        save_hf_folder(directory, family)
    return directories


@pytest.mark.parametrize(("family", "layout"), CASES)
def test_result_does_not_depend_on_the_layout(
    pool: Pool, checkpoints: dict[str, Path], tmp_path: Path, family: str, layout: str
) -> None:
    if family == "bert":
        data = [str(tmp_path / "a.hdf5"), str(tmp_path / "b.hdf5")]
        write_sentence_pairs(tmp_path / "a.hdf5", samples=9)
        write_sentence_pairs(tmp_path / "b.hdf5", samples=5, seq_len=24)
        seq_len = []
    else:
        data = [str(tmp_path / "a.txt"), str(tmp_path / "b.txt")]
        (tmp_path / "a.txt").write_text("\n".join(TEXTS))
        (tmp_path / "b.txt").write_text(TEXTS[1])
        seq_len = ["data.seq_len=32"]
    ranks, overrides = LAYOUTS[layout]
    expected = pool.run(f"{JOBS}:run", (str(checkpoints[family]), data, seq_len), 1)[0]
    results = pool.run(f"{JOBS}:run", (str(checkpoints[family]), data, [*seq_len, *overrides]), ranks)
    for rank, result in enumerate(results):
        for found, wanted in zip(result, expected, strict=True):
            names = set(wanted) - {"seconds", "data"} - ({"bytes", "bits_per_byte"} if rank else set())
            assert {name: found[name] for name in names} == pytest.approx(
                {name: wanted[name] for name in names}, rel=1e-6
            )
            assert found["tokens"] == wanted["tokens"]


def test_scores_do_not_depend_on_the_layout(pool: Pool, checkpoints: dict[str, Path]) -> None:
    pairs = [([1, 2, 3], [4, 5]), ([7], [8]), (list(range(40)), [41, 42, 43])]
    arguments = (str(checkpoints["llama"]), pairs)
    (expected,) = pool.run(f"{JOBS}:score", (*arguments, []), 1)
    layout = ["layout.tp=2", "layout.sequence_parallel=true"]
    for scores in pool.run(f"{JOBS}:score", (*arguments, layout), 2):
        for found, wanted in zip(scores, expected, strict=True):
            assert found == (pytest.approx(wanted[0], rel=1e-6), wanted[1])


def test_sums_over_ranks_are_exact_in_fp64(pool: Pool, checkpoints: dict[str, Path]) -> None:
    """Counts above 2^24 and small fractions, of which fp32 would lose digits."""
    values = [2.0**40 + 2.0**-10, 2.0**24 + 1, 0.1, float("inf")]
    for sums in pool.run(f"{JOBS}:sum_values", (str(checkpoints["llama"]), values, ["layout.tp=2"]), 4):
        assert sums == [value + (value + 1) for value in values]
