"""`trainyard eval`: output, several data sets, mistakes, ranks."""

import importlib.util
import json
import shutil
from pathlib import Path

import pytest
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.cli.conftest import Call, fail
from tests.support.forkserver import ForkServer
from tests.support.hf_folders import TEXTS, save_hf_folder


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("llama")
    save_hf_folder(directory, "llama")
    return directory


@pytest.fixture
def texts(tmp_path: Path) -> list[str]:
    for name, text in (("a.txt", TEXTS[0]), ("b.txt", TEXTS[1])):
        (tmp_path / name).write_text(text)
    return ["a.txt", "b.txt"]


def test_a_row_for_each_data_set(call: Call, checkpoint: Path, texts: list[str], tmp_path: Path) -> None:
    code, out, err = call("eval", checkpoint, *texts, "data.seq_len=16", "device.name=cpu", "--json")
    assert code == 0, err
    report = json.loads(out)
    assert [row["data"] for row in report["results"]] == texts
    assert (report["format"], report["precision"], report["stride"]) == ("hf", "fp32", None)
    code, table, err = call("eval", checkpoint, *texts, "data.seq_len=16", "device.name=cpu")
    assert code == 0, err
    assert "a Hugging Face directory, llama with" in table
    for row in report["results"]:
        assert f"{row['loss']:.6f}" in table
        assert f"{row['bits_per_byte']:.4f}" in table
    blend = {"model": {"family": "llama"}, "data": {"paths": texts, "weights": [0.5, 0.5]}, "train": {"steps": 1}}
    blend["model"] |= {"vocab": 300, "hidden": 32, "layers": 1, "heads": 2, "ffn": 32, "max_positions": 1024}
    (tmp_path / "blend.yaml").write_text(yaml.safe_dump(blend))
    code, out, err = call("eval", checkpoint, "blend.yaml", "data.seq_len=16", "device.name=cpu", "--json")
    assert [row["loss"] for row in json.loads(out)["results"]] == [row["loss"] for row in report["results"]]


def test_validation_sets_of_a_run(call: Call, tmp_path: Path) -> None:
    """`train` logs each set in the console, metrics.jsonl, TensorBoard and the list of runs, a resumed run too; `eval`
    of the run gives the same losses."""
    for name in ("web.txt", "code-1.txt", "code-2.txt"):
        (tmp_path / name).write_text(f"{name} says {TEXTS[0]}\n" * 3)
    sets = ["evaluate.sets.web=web.txt", "evaluate.sets.code=code-*.txt"]
    keys = ["train.steps=4", "evaluate.every=2", "evaluate.batches=1000", "log.name=mine", "checkpoint.every=2"]
    keys += ["data.validation_fraction=0.001", "checkpoint.export_hf=false"]
    code, out, err = call("train", "tiny-llama", "--smoke", *sets, *keys, "device.name=cpu")
    assert code == 0, err
    shutil.rmtree(tmp_path / "runs/mine/checkpoints/step_00000004")
    code, resumed, err = call("train", "runs/mine", "--continue")
    assert code == 0, err
    run = tmp_path / "runs" / "mine"
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    evaluations = {record["step"]: record for record in records if "evaluate/web/loss" in record}
    assert list(evaluations) == [2, 4]
    names = [f"evaluate/{name}{key}" for name in ("", "web/", "code/") for key in ("loss", "perplexity")]
    assert [name for name in evaluations[4] if name.startswith("evaluate/")] == names
    line = " | ".join(f"{name.removeprefix('evaluate/')} {evaluations[4][name]:.4f}" for name in names)
    assert f"evaluation at step 4 | {line}" in out
    assert f"evaluation at step 4 | {line}" in resumed
    board = EventAccumulator(str(run / "tensorboard"))
    board.Reload()
    for name in names:
        assert {event.step for event in board.Scalars(name)} == {2, 4}, name
    code, out, err = call("eval", "runs/mine", "device.name=cpu", "--json")
    assert code == 0, err
    results = {row["data"]: row["loss"] for row in json.loads(out)["results"]}
    assert results == pytest.approx(
        {name: evaluations[4][f"evaluate/{name}/loss"] for name in ("web", "code")}, rel=1e-6
    )


def test_mistakes_are_one_line(call: Call, checkpoint: Path, texts: list[str]) -> None:
    fail(call("eval", checkpoint), ".*the run has no evaluate.sets; give DATA or --tasks")
    fail(
        call("eval", checkpoint, *texts, "--tasks", "x"), "a.txt: --tasks has its own data; give either DATA or --tasks"
    )
    fail(call("eval", checkpoint, *texts, "layout.tp=3", "--nproc", "3"), "layout.tp=3: does not divide model.heads=4")
    fail(call("eval", checkpoint / "none", *texts), ".*none: no such file or directory")
    fail(call("eval", checkpoint, "a.txt", "train.nothing=1"), "train.nothing")


@pytest.mark.skipif(importlib.util.find_spec("lm_eval") is not None, reason="lm_eval is installed")
def test_tasks_need_the_harness(call: Call, checkpoint: Path) -> None:
    code, _, err = call("eval", checkpoint, "--tasks", "x", "device.name=cpu")
    assert (code, "pip install 'trainyard[lm-eval]'" in err) == (2, True)


@pytest.mark.nightly
def test_ranks_print_one_report(cli: ForkServer, checkpoint: Path, texts: list[str], tmp_path: Path) -> None:
    command = ["eval", str(checkpoint), *texts, "data.seq_len=16", "device.name=cpu", "--stride", "8", "--json"]
    one, two = (
        json.loads(cli.run([*command, *options], cwd=tmp_path).stdout)
        for options in ([], ["layout.tp=2", "--nproc", "2"])
    )
    for expected, found in zip(one["results"], two["results"], strict=True):
        assert found["loss"] == pytest.approx(expected["loss"], rel=1e-6)
        assert (found["bytes"], found["tokens"]) == (expected["bytes"], expected["tokens"])
