"""`trainyard audit`: exit codes, output, and mistakes as one line."""

import json
import re
from pathlib import Path

import pytest

from tests.support.forkserver import ForkServer

SMALL = ["tiny-llama", "model.layers=1", "train.global_batch=2", "train.micro_batch=1", "evaluate.every=0"]
LOSS = """
def loss(output, batch):
    x = output.hidden.float().sort(-1).values
    return x.sum(), (batch["labels"] != -100).sum()
"""


@pytest.mark.nightly
def test_clean_run_prints_stages_and_writes_no_file(tmp_path: Path, cli: ForkServer) -> None:
    done = cli.run(["audit", *SMALL, "--workers", "1"], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("1 rank of trn1, LNC 1, 16 GiB per rank: tensor 1 x pipeline 1")
    assert lines[1].startswith("traced 1 stage, each with 2 steps of 2 micro batches")
    assert "peak " in lines[2]
    assert lines[-1] == "clean"
    assert list(tmp_path.iterdir()) == []


def test_violation_in_a_custom_loss_has_its_line_and_exit_code_1(tmp_path: Path, cli: ForkServer) -> None:
    """The loss is a file in the current directory, and two processes trace it."""
    (tmp_path / "mine.py").write_text(LOSS)
    done = cli.run(["audit", *SMALL, "train.loss=mine:loss", "--workers", "2", "--json"], cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    report = json.loads(done.stdout)
    (violation,) = [violation for violation in report["violations"] if violation["rule"] == "operators"]
    assert (violation["file"], violation["line"]) == ("mine.py", 3)
    assert "aten.sort" in violation["description"]
    assert report["memory_limit_bytes"] == 16 << 30
    assert report["stages"][0]["peak_bytes"] > report["stages"][0]["steady_bytes"] > 0


@pytest.mark.nightly
def test_smoke_audits_a_small_version_of_a_recipe(tmp_path: Path, cli: ForkServer) -> None:
    """As for `train`: seconds instead of minutes, for a first look at an own loss. The named layout is kept."""
    arguments = ["audit", "llama3-70b", "--smoke", "layout.tp=8", "layout.pp=1", "layout.ranks=32"]
    done = cli.run([*arguments, "--workers", "1"], cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    start = next(
        index for index, line in enumerate(lines) if line.startswith("32 ranks of trn1, LNC 1, 16 GiB per rank")
    )
    assert "tensor 8 x pipeline 1" in lines[start]
    assert re.match(r"traced 1 stage, each with 2 steps of \d+ micro batch", lines[start + 1])
    assert "peak " in lines[start + 2]
    assert lines[-1] == "clean"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["no-such-recipe"], "no such file or recipe"),
        (["tiny-llama", "--hardware", "trn9"], "--hardware trn9: "),
        (["llama2-7b", "layout.ranks=33"], "needs a multiple of 8 ranks"),
        ([*SMALL, "train.loss=nowhere:loss", "--workers", "1"], "cannot import nowhere"),
    ],
)
def test_mistake_is_one_line(arguments: list[str], error: str, tmp_path: Path, cli: ForkServer) -> None:
    done = cli.run(["audit", *arguments], cwd=tmp_path)
    assert done.returncode == 2, done.stdout + done.stderr
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("trainyard: ")
    assert error in line
