"""What a user sees in a terminal of 80 columns, read through a terminal emulator that others wrote (pyte)."""

import io
import re
from pathlib import Path

import pytest
from rich.console import Console

from tests.support.forkserver import ForkServer
from tests.support.terminal import run_in_terminal
from trainyard.cli.commands.verify import findings_table
from trainyard.cli.console import ProgressDisplay
from trainyard.cli.train_console import screen_line
from trainyard.config.load import load
from trainyard.config.recipes import recipe_names
from trainyard.preflight.verify import VerifyFinding

BAR = re.compile(r"step +(\d+)/6 [━╸╺ ]+ \d:\d\d:\d\d elapsed(, \d:\d\d:\d\d left|, first step .*)?")


def test_train_in_80_columns(tmp_path: Path) -> None:
    """The step number vanished when the time left appeared, and loss and speed of earlier steps were overwritten.

    Also the one test that starts `python -m trainyard train` for real.
    """
    arguments = ["train", "--smoke", "train.steps=6", "device.name=cpu", "device.threads=1", "log.name=a-longer-name"]
    screens: list[list[str]] = []
    code, lines, broken_words = run_in_terminal(arguments, cwd=tmp_path, on_screen=screens.append)
    assert code == 0, lines
    for step in range(1, 7):
        logged = [line for line in lines if re.match(rf"step {step}/6  loss \d", line)]
        assert len(logged) == 1, lines
        assert re.search(r"tok/s  \d+\.\d GiB  grad .* lr ", logged[0])
    bars = [line for screen in screens for line in screen if "━" in line]
    assert bars
    assert all(BAR.fullmatch(line) for line in bars), [line for line in bars if not BAR.fullmatch(line)]
    assert any("left" in line for line in bars)
    assert sum("━" in line for line in lines) == 1  # the bar is redrawn in place
    assert not broken_words
    assert any("CPU, 1 thread;" in line for line in lines)


@pytest.mark.parametrize("columns", [80, 100, 200])
def test_a_logged_step_fits_the_terminal(columns: int) -> None:
    record = {"step": 123_456, "loss": 12.3456, "tokens_per_second": 12_345_678.9, "memory_bytes": 123 * 2**30}
    record |= {"grad_norm": 1234.5, "lr": 1e-5, "mfu": 0.512}
    line = screen_line(record, 1_000_000, columns)
    assert len(line) <= columns
    assert line.startswith("step  123456/1000000  loss 12.3456  12,345,679 tok/s  123.0 GiB")
    assert ("MFU 51%" in line) == (columns > 80)
    rewarded = screen_line({**record, "rewards/accuracy": 0.8125}, 1_000_000, columns)
    assert len(rewarded) <= columns
    assert "loss 12.3456  reward accuracy 0.812" in rewarded
    assert "loss 12.3456  reward mean -1.000" in screen_line({**record, "rewards/total": -1.0}, 1_000_000, columns)


@pytest.mark.parametrize("columns", [80, 132, 200])
def test_recipes_do_not_wrap(cli: ForkServer, columns: int) -> None:
    code, lines, broken_words = run_in_terminal(["recipes"], columns, server=cli)
    assert code == 0
    text = " ".join(" ".join(lines).split())
    for name in recipe_names():
        config = load(name)
        (row,) = [line for line in lines if line.startswith(f"{name} ")]
        assert config.hardware in row
        assert str(config.train.global_batch) in row
        assert columns < 200 or config.description in text
    assert "…" not in text
    assert not broken_words


@pytest.mark.parametrize(
    "recipe", ["llama3-70b", *(pytest.param(name, marks=pytest.mark.nightly) for name in ("gpt3-6.7b", "tiny-llama"))]
)
def test_plan_fits_80_columns(cli: ForkServer, recipe: str) -> None:
    hardware = ["--hardware", "h200:8"] if recipe == "tiny-llama" else []
    code, lines, broken_words = run_in_terminal(["plan", recipe, *hardware], server=cli)
    assert code == 0, lines
    heading = next(line for line in lines if line.startswith("pp ranks"))
    assert heading.split()[-1] == "total"
    assert "…" not in "".join(lines)
    assert not broken_words


def test_verify_never_cuts_the_name_of_a_tensor() -> None:
    """Without a terminal, a table is 80 columns wide."""
    name = "layers.31.attention.output_projection.weight"
    output = io.StringIO()
    Console(file=output, width=80).print(findings_table([VerifyFinding("new weights", 3e-4, name, 1e-5)]))
    cells = [line.split("│")[4].strip() for line in output.getvalue().splitlines() if line.count("│") == 6]
    assert "".join(cells) == name


def test_no_time_left_is_promised_while_nothing_comes(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that answers 429 after the first megabyte of 100 GiB; then it sends 100 MiB per second."""
    clock = [0.0]
    monkeypatch.setattr("trainyard.cli.console.time.monotonic", lambda: clock[0])
    with ProgressDisplay("download") as progress:
        done, total = 2**20, 100 * 2**30
        progress.update(0, total)
        for clock[0] in (1.0, 11.0, 21.0):
            progress.update(done, total)
        for clock[0] in (22.0, 32.0, 42.0, 52.0, 62.0):
            done += 1000 * 2**20
            progress.update(done, total)
    lines = capfd.readouterr().err.splitlines()
    assert [line.split(", ")[1] for line in lines[:2]] == ["no progress for 10 s", "no progress for 20 s"]
    assert lines[-1].split(", ")[1:] == ["0:16:14 left", "100.0 MiB/s"]
