"""The command line as a user sees it: exit codes, one-line errors, plain lines without a terminal."""

import json
import os
import re
import signal
import time
from pathlib import Path

import pytest
import yaml

import trainyard
from tests.cli.conftest import Call
from tests.support.forkserver import ForkServer
from trainyard.cli.commands.train import DEFAULT_RECIPE
from trainyard.cli.main import COMMAND_HELP, load_command
from trainyard.config.load import load
from trainyard.config.recipes import recipe_names
from trainyard.parallel.layout import Layout

SMALL = [
    "log.every=1",
    "data.seq_len=32",
    "train.global_batch=4",
    "train.micro_batch=4",
    "device.name=cpu",
]


def test_train_without_a_terminal_prints_plain_lines_and_output_paths(cli: ForkServer, tmp_path: Path) -> None:
    done = cli.run(["train", *SMALL, "train.steps=3"], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("step ")]
    assert len(lines) == 3
    for word in ("consumed samples 4", "ms/iteration", "lr ", "global batch 4", "loss ", "grad norm ", "param norm "):
        assert word in lines[0]
    assert re.search(r"[\d.]+ tokens/s \| [\d.]+ seq/s", lines[0])
    assert "\x1b" not in done.stdout
    directory = tmp_path / "runs" / "tiny-llama"
    for name in ("config.yaml", "metrics.jsonl", "tensorboard", "model"):
        assert (directory / name).exists()
        assert f"runs/tiny-llama/{name}" in done.stdout
    assert "Next:" in done.stdout


def test_ctrl_c_stops_after_the_step_and_leaves_no_process(cli: ForkServer, tmp_path: Path) -> None:
    process = cli.start(["train", *SMALL, "train.steps=100000"], cwd=tmp_path)
    assert process.stdout
    output, deadline = "", time.monotonic() + 60
    while "\nstep 5" not in output:
        assert time.monotonic() < deadline
        output += process.stdout.read()
        time.sleep(0.02)
    start = time.monotonic()
    os.killpg(process.pid, signal.SIGINT)
    rest, errors = process.communicate(timeout=240)
    assert process.returncode == 130
    assert time.monotonic() - start < 20
    assert "stopping after this step" in errors
    assert "Stopped early" in rest
    metrics = (tmp_path / "runs" / "tiny-llama" / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in metrics]
    steps = [record["step"] for record in records if "loss" in record]
    assert steps == list(range(1, len(steps) + 1))
    assert records[-1]["checkpoint"].endswith(f"step_{len(steps):08d}")
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["train", "nope.yaml"], 2, "nope.yaml: no such file or recipe"),
        (["train", "model.hiden=1"], 2, "model.hiden=1: unknown key; nearest: model.hidden"),
        (["train", "--what"], 2, "No such option"),
        (["tran"], 2, "No such command 'tran'; nearest: trainyard train"),
        (["tiny-llama", "--smoke"], 2, "nearest: trainyard train tiny-llama --smoke"),
        (["my.yaml"], 2, "nearest: trainyard train my.yaml"),
        (["xyzzy"], 2, "No such command 'xyzzy'; see trainyard --help"),
        (["data", "tokenise"], 2, "Did you mean 'tokenize'"),
        (["train", "llama3-70b"], 2, "needs a multiple of 256 ranks"),
        (["train", "tiny-llama", "--nproc", "3", "layout.tp=2"], 2, "needs a multiple of 2 ranks, this run has 3"),
        (["train", "train.loss=nowhere:f"], 2, "cannot import nowhere"),
        (["train", "log.directory=/proc/x"], 2, "log.directory=/proc/x: cannot be written"),
        (
            ["train", "optimizer.lr=1e30", "schedule.min_lr=0", "train.max_skipped_steps=2", "schedule.warmup_steps=0"],
            1,
            "not finite",
        ),
        (["config"], 2, "name a file or a recipe"),
        (["verify", "llama3-70b"], 2, "use --smoke"),
    ],
)
def test_errors_are_one_line(arguments: list[str], code: int, message: str, call: Call) -> None:
    found, _, error = call(*arguments)
    assert found == code
    assert error.count("\n") == 1, error
    assert error.startswith("trainyard: ")
    assert message in error


def test_version(call: Call) -> None:
    """`--version` asked for a command."""
    assert call("--version") == (0, f"trainyard {trainyard.__version__}\n", "")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("trainyard tr", {"train", "trace"}),
        ("trainyard train tiny", {"tiny-llama"}),
        ("trainyard plan llama2", {"llama2-7b"}),
        ("trainyard plan --sea", {"--search"}),
        ("trainyard data tok", {"tokenize"}),
    ],
)
def test_bash_completes_commands_options_and_recipes(
    words: str, expected: set[str], call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("_TRAINYARD_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", words)
    monkeypatch.setenv("COMP_CWORD", str(len(words.split()) - 1))
    assert set(call()[1].split()) == expected


def test_default_recipe_runs_on_one_to_eight_ranks() -> None:
    """`trainyard train --nproc 2` and `verify tiny-llama` failed: the micro batch was the entire batch."""
    for ranks in (1, 2, 4, 8):
        assert Layout.from_config(load(DEFAULT_RECIPE), ranks).dp == ranks


def test_config_prints_the_resolved_file(call: Call) -> None:
    code, out, _ = call("config", "llama2-7b", "optimizer.lr=1e-4")
    assert code == 0
    data = yaml.safe_load(out)
    assert data["optimizer"]["lr"] == 1e-4
    assert data["schedule"]["kind"] == "linear"
    sections = {"model", "data", "train", "layout", "recompute", "compile", "checkpoint", "evaluate", "log", "device"}
    assert set(data) >= sections
    keys = call("config", "--keys")[1]
    assert "optimizer.lr" in keys
    assert "model[llama].rope_theta" in keys


def test_recipes_lists_all(call: Call) -> None:
    out = call("recipes")[1]
    for name in recipe_names():
        assert any(line.startswith(name) for line in out.splitlines())
    assert "70.55B" in out


TYPE_OF_PYTHON = r"<\w+[^>]*>|list\["
"""<bool> and <list[str]> are no words for users."""


@pytest.mark.parametrize("arguments", [["--help"], []])
def test_help_lists_all_commands_in_80_columns(
    arguments: list[str], call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    code, out, _ = call(*arguments)
    assert code == 0
    for name, text in COMMAND_HELP.items():
        assert name in out
        assert text in " ".join(out.replace("│", " ").split())
    assert max(map(len, out.splitlines())) <= 80
    assert not re.search(TYPE_OF_PYTHON, out), out


@pytest.mark.parametrize("name", [name for name in COMMAND_HELP if name != "convert-nxd"])
def test_help_of_a_command_has_examples_that_fit_80_columns(
    name: str, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    command = load_command(name)
    commands = {f"{name} {sub_name}": sub for sub_name, sub in getattr(command, "commands", {}).items()}
    for full_name, loaded in (commands or {name: command}).items():
        code, out, _ = call(*full_name.split(), "--help")
        assert code == 0
        assert max(map(len, out.splitlines())) <= 80
        assert not re.search(TYPE_OF_PYTHON, out), out
        usage = out.splitlines()[1]
        assert "[[" not in usage, usage
        shown = " ".join(out.split())
        for extra in re.findall(r"'trainyard\[[^]]*\]'", loaded.help):
            assert extra in shown
        examples = [line for line in loaded.help.splitlines() if line.startswith("  ") and "trainyard" in line]
        assert examples or name == "recipes"
        for line in examples:
            assert line.strip() in out, f"wraps: {line}"
