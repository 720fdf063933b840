"""`trainyard eval`: output, several data sets, mistakes, ranks."""

import importlib.util
import json
from pathlib import Path

import pytest
import yaml

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


def test_mistakes_are_one_line(call: Call, checkpoint: Path, texts: list[str]) -> None:
    fail(call("eval", checkpoint), "eval: give either DATA or --tasks")
    fail(call("eval", checkpoint, *texts, "--tasks", "x"), "eval: give either DATA or --tasks")
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
