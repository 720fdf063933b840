"""`trainyard tune` as a user meets it: real trials on a CPU, the file it leaves, mistakes in one line, Ctrl-C."""

import os
import signal
import subprocess
import sys
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from tests.support.configs import tiny_config
from trainyard.cli import main
from trainyard.cli import tune as verb
from trainyard.config.load import dump, load
from trainyard.tune.search import TuneSearch
from trainyard.tune.search_space import KEY_COMPILE, KEY_MICRO_BATCH, SearchSpace
from trainyard.tune.trial import OUT_OF_MEMORY, Trial
from trainyard.tune.trial_process import ProcessResult

COMMAND = [sys.executable, "-m", "trainyard"]
SMALL = ["tiny-llama", "--smoke", "compile.enabled=false", "device.name=cpu", "train.global_batch=8"]


def test_real_trials_and_the_file_they_leave(tmp_path: Path) -> None:
    """Two trials or more: the file's micro batch of 4, then 8, and 2 if that was not faster."""
    command = [*COMMAND, "tune", *SMALL, "--budget", "2", "--steps", "4"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=100)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    lines = done.stdout.splitlines()
    assert lines[0] == "trials of 4 steps of 8 x 64 tokens; at most 2 minutes"
    assert lines[1].startswith("trial 1 | the file as it is | ")
    assert lines[2].startswith("trial 2 | train.micro_batch=8 | ")
    for word in ("tokens/s | ", "x | ", " GiB | first step ", " | in all ", " | done"):
        assert word in lines[2]
    assert sum(" best" in line for line in lines) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["tiny-llama.tuned.yaml"]
    tuned = tmp_path / "tiny-llama.tuned.yaml"
    comments = [line for line in tuned.read_text().splitlines() if line.startswith("#")]
    overrides = comments[1].removeprefix("# overrides: ").split()
    assert any("torch" in line and "CPU" in line for line in comments)
    assert sum("tokens/s" in line for line in comments) == sum(line.startswith("trial ") for line in lines[:-1]) - 1
    again = subprocess.run([*COMMAND, "config", str(tuned)], capture_output=True, text=True, timeout=60)
    assert again.returncode == 0, again.stderr
    result = load(tuned)
    assert result.train.global_batch == 8
    assert overrides == ["none"] or overrides == [f"train.micro_batch={result.train.micro_batch}"]


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Path]:
    """Trials without processes: larger micro batches are faster, 8 does not fit. Gives the files that were run."""
    ran: list[Path] = []

    def run(command: list[str], limit: float, log: Path) -> ProcessResult:
        path = Path(command[4])
        ran.append(path)
        micro = load(path).train.micro_batch
        if micro == 8:
            return ProcessResult(1, 1.0, True, "torch.OutOfMemoryError: CUDA out of memory.\n")
        (path.parent / "run").mkdir()
        record = f'{{"ms_per_iteration": 1.0, "tokens_per_second": {micro}, "memory_bytes": {micro}}}\n'
        (path.parent / "run" / "metrics.jsonl").write_text(record * 4)
        return ProcessResult(0, 1.0, True, "")

    monkeypatch.setattr(verb, "run", run)
    monkeypatch.chdir(tmp_path)
    return ran


def call(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *words: str) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["trainyard", "tune", *words])
    with pytest.raises(SystemExit) as caught:
        main.main()
    assert isinstance(caught.value.code, int)
    return caught.value.code, *capfd.readouterr()


def test_the_best_is_written_whatever_the_recipes_data(
    fake: list[Path], capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    words = ["llama2-7b", "layout.tp=1", "recompute.kind=none", "compile.enabled=false"]
    code, out, err = call(capfd, monkeypatch, *words, "--out", "sub.yaml")
    assert (code, err) == (0, "")
    assert "trials use data.source=synthetic" in out
    assert "8 x 4096 tokens, a part of train.global_batch=256 (which stays)" in out
    assert "fastest: train.micro_batch=4, 4.00 times the file's own speed" in out
    assert f"trainyard train {' '.join(words)} train.micro_batch=4" in out
    assert "train.micro_batch=8 | in all 1 s | out of memory" in out
    own, best = load("llama2-7b", words[1:]), load(tmp_path / "sub.yaml")
    assert best == own.model_copy(update={"train": own.train.model_copy(update={"micro_batch": 4})})
    assert len(fake) == 4


def test_ctrl_c_keeps_the_best_so_far(
    fake: list[Path], capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run = verb.run_with_timeout

    def interrupted(command: list[str], limit: float, log: Path) -> ProcessResult:
        if len(fake) == enough:
            signal.raise_signal(signal.SIGTERM)
        return run(command, limit, log)

    monkeypatch.setattr(verb, "run", interrupted)
    words = ["tiny-llama", "train.global_batch=64", "compile.enabled=false"]
    enough = 1
    code, _, _ = call(capfd, monkeypatch, *words)
    assert code == 130
    assert not list(tmp_path.glob("*.tuned.yaml"))
    fake.clear()
    enough = 2
    code, out, _ = call(capfd, monkeypatch, *words)
    assert code == 130
    assert "interrupted: not all was tried" in out
    assert load(tmp_path / "tiny-llama.tuned.yaml").train.micro_batch == 32
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


@pytest.mark.parametrize(
    ("words", "code", "line"),
    [
        (["nope.yaml"], 2, "nope.yaml: no such file or recipe"),
        (["tiny-llama", "train.micro_batch=3"], 2, "not a multiple of train.micro_batch=3"),
        (["tiny-llama", "layout.tp=2"], 2, "needs a multiple of 2 ranks, this run has 1"),
        (["tiny-llama", "--out", "no/where.yaml"], 2, "--out no/where.yaml: cannot be written"),
        (["mine.yaml", "--out", "mine.yaml"], 2, "nearest: mine.tuned.yaml"),
        (["tiny-llama", "train.micro_batch=8", "recompute.kind=none"], 1, "the last one: out of memory"),
        (["tiny-llama", "--budget", "0"], 2, "greater than or equal to 0.01"),
        ([], 2, "Missing argument"),
    ],
)
def test_mistakes_are_one_line(
    words: list[str],
    code: int,
    line: str,
    fake: list[Path],
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    (tmp_path / "mine.yaml").write_text(dump(tiny_config()))
    found, _, error = call(capfd, monkeypatch, *words)
    assert (found, error.count("\n")) == (code, 1), error
    assert line in error
    assert not list(tmp_path.glob("*.tuned.yaml"))


def test_a_mistake_that_only_a_run_finds(tmp_path: Path) -> None:
    command = [*COMMAND, "tune", *SMALL, "train.loss=nowhere:f"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=60)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "cannot import nowhere" in done.stderr
    assert not os.listdir(tmp_path)


def test_a_terminal_shows_a_table_that_grows() -> None:
    space = SearchSpace(tiny_config("llama", train={"global_batch": 8, "micro_batch": 2}), 1)
    search = TuneSearch(space)
    console = Console(file=StringIO(), force_terminal=True, width=140)
    screen = verb.TuneTable(console, search, 600)
    assert screen.live
    search.trials += [Trial(space.initial_choice, "done", 5.0, 100.0, 2**30, 0.5)]
    search.trials += [Trial(space.initial_choice | {KEY_COMPILE: True}, "done", 9.0, 150.0, 2**30, 4.0)]
    search.trials += [Trial(space.initial_choice | {KEY_COMPILE: True, KEY_MICRO_BATCH: 4}, OUT_OF_MEMORY, 3.0)]
    search.best_choice, search.best_speed = space.initial_choice | {KEY_COMPILE: True}, 150.0
    screen.on_trial_start(
        space.initial_choice | {KEY_COMPILE: True, "recompute.kind": "selective", "recompute.modules": ["activation"]}
    )
    with console.capture() as captured:
        console.print(screen.render())
    text = captured.get()
    assert text.index("the file as it is") < text.index("compile.enabled=true")
    for word in ("1.50x", "best", "out of memory", "recompute.modules=[activation]", "running", "of the budget left"):
        assert word in text


def test_help_teaches(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    code, out, _ = call(capfd, monkeypatch, "--help")
    assert code == 0
    for word in ("trainyard tune my.yaml --nproc 8 --budget 30", "recompute", "--steps", "--out"):
        assert word in out
