"""Kills at random instants (bench/kills.py): nothing is lost, and a loss is found."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run_kills(kills: int, *options: str) -> tuple[int, str]:
    """In a process of its own, without threads, that forks the commands."""
    command = [sys.executable, "-m", "bench.kills", "--kills", str(kills), *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1200)
    assert done.returncode in (0, 1), done.stderr
    return done.returncode, done.stdout


def test_a_kill_loses_nothing() -> None:
    code, output = run_kills(8, "--only", "train-tokenizer --overwrite,tokenize --overwrite")
    assert code == 0, output
    assert "kinds 2, kills 8" in output
    assert "lost 0" in output


def test_a_write_in_place_is_found() -> None:
    """The commands write files and directories under their final names: some kill leaves a part of one."""
    code, output = run_kills(6, "--only", "train-tokenizer --overwrite", "--plant")
    assert code == 1, output
    assert "LOST: train-tokenizer --overwrite, killed at" in output


@pytest.mark.nightly
def test_kills_of_everything_that_writes(tmp_path: Path) -> None:
    code, output = run_kills(150, "--seed", "7", "--out", str(tmp_path / "result.json"))
    assert code == 0, output
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["kills"], result["lost"]) == (150, 0)
    assert result["while_writing"] > 15
    assert result["kinds"] > 20
