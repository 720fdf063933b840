"""`trainyard new` writes a file that plans and trains: from a dialogue in a terminal, or from options."""

from pathlib import Path

import pytest

from tests.cli.conftest import Call, fail, succeed
from tests.support.forkserver import ForkServer
from tests.support.terminal import run_in_terminal
from tests.support.token_files import write_documents
from trainyard.config.load import load


def test_defaults_are_the_base_and_train(call: Call, tmp_path: Path) -> None:
    out = succeed(call("new", "my.yaml"))
    assert "Next: trainyard train my.yaml --smoke" in out
    config, base = load(tmp_path / "my.yaml"), load("tiny-llama")
    changed = {"hardware": "this machine", "log": base.log.model_copy(update={"name": "my"})}
    assert config == base.model_copy(update=changed)
    text = (tmp_path / "my.yaml").read_text()
    assert all(" # " in line for line in text.splitlines()), text
    code, out, err = call("train", "my.yaml", "--smoke", "train.steps=2", "device.name=cpu")
    assert code == 0, err
    assert (tmp_path / "runs" / "my-smoke" / "config.yaml").is_file()


@pytest.mark.parametrize(
    ("size", "hardware", "ranks"),
    [
        ("tiny", "h200:6", 6),
        ("125m", "h200:8", 8),
        pytest.param("70b", "trn1.32xlarge:16", 512, marks=pytest.mark.nightly),
    ],
)
def test_layout_fits_the_hardware(call: Call, tmp_path: Path, size: str, hardware: str, ranks: int) -> None:
    (tmp_path / "a.txt").write_text("some text\n" * 1000)
    succeed(call("new", "my.yaml", "--data", "*.txt", "--size", size, "--hardware", hardware))
    config = load(tmp_path / "my.yaml")
    name, _, count = hardware.partition(":")
    assert (config.layout.ranks, config.hardware, config.data.paths) == (ranks, f"{count} x {name}", ("*.txt",))
    assert 5 <= len((tmp_path / "my.yaml").read_text().splitlines()) <= 14
    code, out, err = call("plan", "my.yaml")
    assert code == 0, err
    assert f"on {count} x {name}, {ranks} ranks" in out
    code, _, err = call("config", "my.yaml", "--smoke")
    assert code == 0, err


def test_vocabulary_comes_from_token_files(call: Call, tmp_path: Path) -> None:
    write_documents(tmp_path / "tokens", [[[token % 1000 for token in range(4000)]]])
    succeed(call("new", "my.yaml", "--data", "tokens", "--hardware", "cpu:1"))
    config = load(tmp_path / "my.yaml")
    assert (config.data.source, config.data.paths, config.model.vocab) == ("tokens", ("tokens",), 1024)


def test_mistakes_are_one_line_and_write_nothing(call: Call, tmp_path: Path) -> None:
    (tmp_path / "old.yaml").write_text("mine")
    fail(call("new", "old.yaml"), "old.yaml: exists already")
    assert (tmp_path / "old.yaml").read_text() == "mine"
    fail(call("new", "my"), "my: not the name of a YAML file; nearest: my.yaml")
    fail(call("new", "no/my.yaml"), "no/my.yaml: there is no directory no")
    fail(call("new", "my.yaml", "--data", "no.txt"), "--data no.txt: no such file")
    fail(call("new", "my.yaml", "--size", "9b"), "--size 9b: not one of tiny, 125m")
    fail(call("new", "my.yaml", "--hardware", "h201:8"), "--hardware h201: unknown; nearest: h200")
    fail(call("new", "my.yaml", "--size", "70b", "--hardware", "h100:1"), "--size 70b: does not fit 1 x h100")
    assert [path.name for path in tmp_path.iterdir()] == ["old.yaml"]


def test_dialogue_in_a_terminal(cli: ForkServer, tmp_path: Path) -> None:
    """An empty answer takes the default; a wrong one is asked for again."""
    (tmp_path / "a.txt").write_text("some text\n" * 1000)
    answers = ["b.txt", "a.txt", "huge", "TINY", ""]
    code, lines, _ = run_in_terminal(["new", "my.yaml"], cwd=tmp_path, server=cli, answers=answers)
    assert code == 0, lines
    screen = "\n".join(lines)
    assert "Data to train on, a path or glob [built-in text]: b.txt\n--data b.txt: no such file" in screen
    assert "[tiny]: huge\n--size huge: not one of tiny, 125m, 350m, 1b, 8b, 70b\nModel size" in screen
    assert "[cpu:1]:" in screen
    assert load(tmp_path / "my.yaml").data.paths == ("a.txt",)
