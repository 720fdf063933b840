"""`trainyard tune`: trials on a CPU, the file it writes, one-line errors, Ctrl-C."""

import os
import signal
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from tests.cli.conftest import Call
from tests.support.configs import tiny_config
from tests.support.forkserver import ForkServer
from trainyard.cli.commands import tune as command
from trainyard.cli.commands.tune import TuneTable
from trainyard.config.load import dump, load
from trainyard.preflight.tune.search import TuneSearch
from trainyard.preflight.tune.search_space import KEY_COMPILE, KEY_MICRO_BATCH, SearchSpace
from trainyard.preflight.tune.trial import OUT_OF_MEMORY, ProcessResult, Trial

SMALL = ["tiny-llama", "--smoke", "compile.enabled=false", "device.name=cpu", "train.global_batch=8"]


@pytest.mark.nightly
def test_real_trials_and_the_file_they_write(cli: ForkServer, tmp_path: Path) -> None:
    """Runs the file's micro batch of 2, then 4, and others if that was faster."""
    done = cli.run(["tune", *SMALL, "--budget", "2", "--steps", "4"], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    lines = done.stdout.splitlines()
    assert lines[0] == "trials of 4 steps of 8 x 64 tokens; at most 2 minutes"
    assert lines[1].startswith("trial 1 | unchanged | ")
    assert lines[2].startswith("trial 2 | train.micro_batch=4 | ")
    for word in ("tokens/s | ", "x | ", " GiB | first step ", " | total ", " | done"):
        assert word in lines[2]
    assert sum(" best" in line for line in lines) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["tiny-llama.tuned.yaml"]
    tuned = tmp_path / "tiny-llama.tuned.yaml"
    comments = [line for line in tuned.read_text().splitlines() if line.startswith("#")]
    overrides = comments[1].removeprefix("# overrides: ").split()
    assert any("torch" in line and "CPU" in line for line in comments)
    assert sum("tokens/s" in line for line in comments) == sum(line.startswith("trial ") for line in lines[:-1]) - 1
    assert cli.run(["config", tuned]).returncode == 0
    result = load(tuned)
    assert result.train.global_batch == 8
    assert overrides == ["none"] or overrides == [f"train.micro_batch={result.train.micro_batch}"]


@pytest.fixture
def trial_files(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Replace trial processes: larger micro batches are faster, 8 does not fit. Returns the files that were run."""
    files: list[Path] = []

    def run(arguments: list[str], timeout: float, log: Path) -> ProcessResult:
        path = Path(arguments[4])
        files.append(path)
        micro_batch = load(path).train.micro_batch
        if micro_batch == 8:
            return ProcessResult(1, 1.0, True, "torch.OutOfMemoryError: CUDA out of memory.\n")
        (path.parent / "run").mkdir()
        record = f'{{"ms_per_iteration": 1.0, "tokens_per_second": {micro_batch}, "memory_bytes": {micro_batch}}}\n'
        (path.parent / "run" / "metrics.jsonl").write_text(record * 4)
        return ProcessResult(0, 1.0, True, "")

    monkeypatch.setattr(command, "run_with_timeout", run)
    return files


def test_the_best_settings_are_written_even_if_the_data_is_missing(
    trial_files: list[Path], call: Call, tmp_path: Path
) -> None:
    arguments = ["llama2-7b", "layout.tp=1", "recompute.kind=none", "compile.enabled=false"]
    code, out, err = call("tune", *arguments, "--out", "sub.yaml")
    assert (code, err) == (0, "")
    assert "trials use data.source=synthetic" in out
    assert "8 x 4096 tokens (train.global_batch=256 is unchanged)" in out
    assert "fastest: train.micro_batch=4, 4.00 times the speed of the file" in out
    assert f"trainyard train {' '.join(arguments)} train.micro_batch=4" in out
    assert "train.micro_batch=8 | total 1 s | out of memory" in out
    unchanged, best = load("llama2-7b", arguments[1:]), load(tmp_path / "sub.yaml")
    assert best == unchanged.model_copy(update={"train": unchanged.train.model_copy(update={"micro_batch": 4})})
    assert len(trial_files) == 5
    assert "trial 5 | unchanged again | 1 tokens/s | 1.00x" in out


def test_ctrl_c_keeps_the_best_so_far(
    trial_files: list[Path], call: Call, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run = command.run_with_timeout

    def interrupted(arguments: list[str], timeout: float, log: Path) -> ProcessResult:
        if len(trial_files) == finished_trials:
            signal.raise_signal(signal.SIGTERM)
        return run(arguments, timeout, log)

    monkeypatch.setattr(command, "run_with_timeout", interrupted)
    arguments = ["llama2-7b", "layout.tp=1", "recompute.kind=none", "compile.enabled=false"]
    finished_trials = 1
    assert call("tune", *arguments)[0] == 130
    assert not list(tmp_path.glob("*.tuned.yaml"))
    trial_files.clear()
    finished_trials = 2
    code, out, _ = call("tune", *arguments)
    assert code == 130
    assert "interrupted: not everything was tried" in out
    assert load(tmp_path / "llama2-7b.tuned.yaml").train.micro_batch == 2
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
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
@pytest.mark.usefixtures("trial_files")
def test_errors_are_one_line(arguments: list[str], code: int, message: str, call: Call, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(dump(tiny_config()))
    found, _, error = call("tune", *arguments)
    assert (found, error.count("\n")) == (code, 1), error
    assert message in error
    assert not list(tmp_path.glob("*.tuned.yaml"))


@pytest.mark.nightly
def test_an_error_that_only_a_run_detects_is_one_line(cli: ForkServer, tmp_path: Path) -> None:
    done = cli.run(["tune", *SMALL, "train.loss=nowhere:f"], cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "cannot import nowhere" in done.stderr
    assert not os.listdir(tmp_path)


def test_a_terminal_shows_a_growing_table() -> None:
    space = SearchSpace(tiny_config("llama", train={"global_batch": 8, "micro_batch": 2}), 1)
    search = TuneSearch(space)
    console = Console(file=StringIO(), force_terminal=True, width=140)
    display = TuneTable(console, search, 600)
    assert display.live
    search.trials += [Trial(space.initial_choice, "done", 5.0, 100.0, 2**30, 0.5)]
    search.trials += [Trial(space.initial_choice | {KEY_COMPILE: True}, "done", 9.0, 150.0, 2**30, 4.0)]
    search.trials += [Trial(space.initial_choice | {KEY_COMPILE: True, KEY_MICRO_BATCH: 4}, OUT_OF_MEMORY, 3.0)]
    search.best_choice, search.best_speed = space.initial_choice | {KEY_COMPILE: True}, 150.0
    display.on_trial_start(
        space.initial_choice | {KEY_COMPILE: True, "recompute.kind": "selective", "recompute.modules": ["activation"]}
    )
    with console.capture() as captured:
        console.print(display.render())
    text = captured.get()
    assert text.index("unchanged") < text.index("compile.enabled=true")
    for word in ("1.50x", "best", "out of memory", "recompute.modules=[activation]", "running", "of the budget left"):
        assert word in text
