"""The command line as a user sees it: exit codes, one-line errors, plain lines without a terminal."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

import trainyard
from tests.cli.conftest import Call, succeed
from tests.support.forkserver import ForkServer
from trainyard.cli.commands.train import DEFAULT_RECIPE
from trainyard.cli.main import COMMANDS, load_command
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
        (["config", "--keys", "zzz"], 2, "--keys zzz: no key contains it; see trainyard config --keys"),
        (["config", "--keys", "batch_size"], 2, "no key contains it; nearest: train.global_batch"),
        (["train", "TINY-LAMA"], 2, "TINY-LAMA: no such file or recipe; nearest recipe: tiny-llama"),
        (["train", "xyzzy"], 2, "xyzzy: no such file or recipe (trainyard recipes lists those)"),
        (["train", "--smoke", "--nproc", "100000"], 2, "--nproc 100000: too many for the cores and the memory"),
        (
            ["data", "tokenize", "--input", "a", "--output-prefix", "b", "--workers", "5000"],
            2,
            "--workers 5000: too many",
        ),
        (["precompile", "tiny-llama", "--workers", "5000"], 2, "--workers 5000: too many"),
        (["train", "--smoke", "layout.tp=8"], 2, "this run has 1 (use --nproc 8); nearest on 1 rank"),
        (["train", "llama3-70b"], 2, "--smoke shrinks the layout for a trial"),
        (
            ["train", "--smoke", "data.paths=[no/*.txt]"],
            2,
            "no such file; without data.paths, a run reads a built-in text",
        ),
        (["verify", "llama3-70b"], 2, "use --smoke"),
        (["verify", "tiny-llama", "--result", "a"], 2, "--result a: only for the ranks that verify starts"),
        (["plan", "a\nb\x1b[31m"], 2, "a\\nb\\x1b[31m: no such file or recipe"),
    ],
)
def test_errors_are_one_line(arguments: list[str], code: int, message: str, call: Call) -> None:
    found, _, error = call(*arguments)
    assert found == code
    assert error.count("\n") == 1, error
    assert error.startswith("trainyard: ")
    assert message in error


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--lr", "1e-4"], "--lr: no such option; keys have no dashes; nearest: optimizer.lr=1e-4"),
        (["--lr=1e-4"], "--lr: no such option; keys have no dashes; nearest: optimizer.lr=1e-4"),
        (["--steps", "5"], "--steps: no such option; keys have no dashes; nearest: train.steps=5"),
        (["--train.steps", "5"], "--train.steps: no such option; keys have no dashes; nearest: train.steps=5"),
        (["--device", "cuda"], "--device: no such option; keys have no dashes; nearest: device.name=cuda"),
        (["--gpus", "8"], "--gpus: no such option; --nproc N starts N ranks on a host"),
        (["--bf16"], "--bf16: no such option; keys have no dashes; nearest: precision.kind=bf16"),
        (["--max_grad_norm"], "--max_grad_norm: no such option; keys have no dashes; nearest: optimizer.max_grad_norm"),
        (["--epochs", "3"], r"--epochs: no such option; keys have no dashes; nearest: train.steps \(runs are measured"),
        (["--smokee"], r"No such option: --smokee \(Possible options: --smoke\)"),
        (["--zzzzz"], "No such option: --zzzzz"),
    ],
)
@pytest.mark.parametrize("command", ["train", "config"])
def test_option_that_is_a_key_is_named(call: Call, command: str, options: list[str], expected: str) -> None:
    code, _, err = call(command, "tiny-llama", *options)
    assert code == 2
    assert err.count("\n") == 1
    assert re.match(f"trainyard: {expected}", err), err


def test_option_of_a_command_without_keys_is_not_a_key(call: Call) -> None:
    assert "No such option: --lr" in call("data", "tokenize", "--lr", "3")[2]


def test_advice_is_not_what_was_given(call: Call) -> None:
    for mistake in ("layout.tp=8", "data.paths=[no/*.txt]"):
        assert "--smoke" not in call("train", "--smoke", mistake)[2]


def test_keys_are_listed_by_a_word(call: Call) -> None:
    out = succeed(call("config", "--keys", "warmup", "max_grad"))
    assert re.findall(r"^(\S+)  ", out, re.MULTILINE) == ["optimizer.max_grad_norm", "schedule.warmup_steps"]


@pytest.mark.skipif(sys.platform != "linux", reason="setpriv is a command of Linux")
def test_file_of_another_user_is_one_line(tmp_path: Path) -> None:
    """As any user who is not root: without the capabilities that let root read all files."""
    (tmp_path / "own.txt").write_text("text\n")
    (tmp_path / "own.txt").chmod(0)
    shell = ["setpriv", "--bounding-set=-dac_override,-dac_read_search"] if os.geteuid() == 0 else []
    if shell:
        os.chown(tmp_path / "own.txt", 65534, 65534)
    arguments = ["data", "tokenize", "--input", "own.txt", "--tokenizer", "bytes", "--output-prefix", "out"]
    environment = {**os.environ, "PYTHONPATH": str(Path(trainyard.__file__).parents[1])}
    done = subprocess.run(
        [*shell, sys.executable, "-m", "trainyard", *arguments],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env=environment,
    )
    assert (done.returncode, done.stderr) == (2, "trainyard: own.txt: Permission denied\n")


def test_version(call: Call) -> None:
    """`--version` asked for a command."""
    assert call("--version") == (0, f"trainyard {trainyard.__version__}\n", "")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("trainyard tr", {"train", "trace"}),
        ("trainyard train tiny", {"tiny-chat", "tiny-dpo", "tiny-grpo", "tiny-llama", "tiny-long-context"}),
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
    for name, (text, _) in COMMANDS.items():
        assert name in out
        assert text in " ".join(out.replace("│", " ").split())
    assert max(map(len, out.splitlines())) <= 80
    assert not re.search(TYPE_OF_PYTHON, out), out


@pytest.mark.parametrize("name", [name for name in COMMANDS if name != "convert-nxd"])
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
