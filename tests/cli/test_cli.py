"""The command as a person uses it: exit codes, one-line errors, plain lines without a terminal, a bar with one."""

import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from trainyard.cli import main
from trainyard.config.recipes import recipe_names

SMALL = [
    "train.steps=3",
    "log.every=1",
    "data.seq_len=32",
    "train.global_batch=4",
    "train.micro_batch=4",
    "device.name=cpu",
]


def run(*words: str, cwd: Path, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "trainyard", *words]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, timeout=timeout, check=False)


def test_train_without_a_terminal_prints_plain_lines_and_where_things_are(tmp_path: Path) -> None:
    done = run("train", *SMALL, cwd=tmp_path)
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


def test_train_in_a_terminal_shows_a_bar(tmp_path: Path) -> None:
    master, slave = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "160"}
    process = subprocess.Popen(
        [sys.executable, "-m", "trainyard", "train", *SMALL],
        stdin=slave,
        stdout=slave,
        stderr=slave,
        cwd=tmp_path,
        env=environment,
    )
    os.close(slave)
    seen = b""
    while True:
        try:
            piece = os.read(master, 65536)
        except OSError:  # the other end closed
            break
        if not piece:
            break
        seen += piece
    assert process.wait() == 0
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", seen.decode())
    assert re.search(r"step\s+3/3\s+━+", text)
    for word in ("loss", "lr", "grad", "tok/s", "MFU", "left"):
        assert word in text
    assert "consumed samples" not in text


def test_ctrl_c_ends_after_the_step_and_leaves_no_process(tmp_path: Path) -> None:
    words = [word for word in SMALL if "steps" not in word] + ["train.steps=100000"]
    process = subprocess.Popen(
        [sys.executable, "-m", "trainyard", "train", *words],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path, start_new_session=True,
    )  # fmt: skip
    assert process.stdout
    for line in process.stdout:
        if line.startswith("step 5"):
            break
    start = time.monotonic()
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert time.monotonic() - start < 20
    assert "stopping after this step" in err
    assert "Stopped early" in out
    metrics = (tmp_path / "runs" / "tiny-llama" / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in metrics]
    steps = [record["step"] for record in records if "loss" in record]
    assert steps == list(range(1, len(steps) + 1))
    assert records[-1]["checkpoint"].endswith(f"step_{len(steps):08d}")  # what there was is there to go on from
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)


@pytest.mark.parametrize(
    ("words", "code", "line"),
    [
        (["train", "nope.yaml"], 2, "nope.yaml: no such file or recipe"),
        (["train", "model.hiden=1"], 2, "model.hiden=1: unknown key; nearest: model.hidden"),
        (["train", "--what"], 2, "No such option"),
        (["tran"], 2, "No such command"),
        (["train", "llama3-70b"], 2, "needs a multiple of 256 ranks"),
        (["train", "train.loss=nowhere:f"], 2, "cannot import nowhere"),
        (["train", "log.directory=/proc/x"], 2, "log.directory=/proc/x: cannot be written"),
        (
            ["train", "optimizer.lr=1e30", "schedule.min_lr=0", "train.max_skipped_steps=2", "schedule.warmup_steps=0"],
            1,
            "not finite",
        ),
        (["config"], 2, "name a file or a recipe"),
    ],
)
def test_mistakes_are_one_line(
    words: list[str],
    code: int,
    line: str,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["trainyard", *words])
    with pytest.raises(SystemExit) as caught:
        main.main()
    assert caught.value.code == code
    error = capfd.readouterr().err
    assert error.count("\n") == 1, error
    assert error.startswith("trainyard: ")
    assert line in error


def call(words: list[str], capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(sys, "argv", ["trainyard", *words])
    with pytest.raises(SystemExit) as caught:
        main.main()
    out, err = capfd.readouterr()
    assert caught.value.code == 0, err
    return out


def test_config_prints_the_resolved_file(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    data = yaml.safe_load(call(["config", "llama2-7b", "optimizer.lr=1e-4"], capfd, monkeypatch))
    assert data["optimizer"]["lr"] == 1e-4
    assert data["schedule"]["kind"] == "linear"
    assert set(data) >= {
        "model",
        "data",
        "train",
        "layout",
        "recompute",
        "compile",
        "checkpoint",
        "evaluate",
        "log",
        "device",
    }
    keys = call(["config", "--keys"], capfd, monkeypatch)
    assert "optimizer.lr" in keys
    assert "model[llama].rope_theta" in keys


def test_recipes_lists_them_all(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    out = call(["recipes"], capfd, monkeypatch)
    for name in recipe_names():
        assert any(line.startswith(name) for line in out.splitlines())
    assert "70.55B" in out


@pytest.mark.parametrize("words", [["--help"], ["train", "--help"], []])
def test_help_teaches(words: list[str], capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert "train" in call(words, capfd, monkeypatch)
