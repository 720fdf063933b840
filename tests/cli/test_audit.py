"""`trainyard audit` as a person uses it: exit codes, what is on the screen, mistakes in one line."""

import json
import subprocess
import sys
from pathlib import Path

COMMAND = [sys.executable, "-m", "trainyard", "audit"]
SMALL = ["tiny-llama", "model.layers=1", "train.global_batch=2", "train.micro_batch=1", "evaluate.every=0"]
LOSS = """
def loss(output, batch):
    x = output.hidden.float().sort(-1).values
    return x.sum(), (batch["labels"] != -100).sum()
"""


def run(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *words], capture_output=True, text=True, cwd=cwd, timeout=100, check=False)


def test_a_clean_run(tmp_path: Path) -> None:
    done = run(*SMALL, "--workers", "1", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("1 rank of trn1, LNC 1, 16 GiB per rank: tensor 1 x pipeline 1")
    assert lines[1].startswith("traced of each of 1 stage: 2 steps of 2 micro batches")
    assert "peak " in lines[2]
    assert lines[-1] == "clean"
    assert list(tmp_path.iterdir()) == []


def test_a_violation_is_told_with_its_line_and_its_fix(tmp_path: Path) -> None:
    """As a file in the current directory, by several processes; once for people and once for machines."""
    (tmp_path / "mine.py").write_text(LOSS)
    done = run(*SMALL, "train.loss=mine:loss", "--workers", "2", "--json", cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    found = json.loads(done.stdout)
    (violation,) = [each for each in found["violations"] if each["rule"] == "operators"]
    assert (violation["file"], violation["line"]) == ("mine.py", 3)
    assert "aten.sort" in violation["description"]
    assert found["memory_limit_bytes"] == 16 << 30
    assert found["stages"][0]["peak_bytes"] > found["stages"][0]["steady_bytes"] > 0


def test_mistakes_are_one_line(tmp_path: Path) -> None:
    for words, said in (
        (["no-such-recipe"], "no such file or recipe"),
        (["tiny-llama", "--hardware", "trn9"], "--hardware trn9: unknown; known: trn1, trn2, trn3"),
        (["llama2-7b", "layout.ranks=33"], "needs a multiple of 8 ranks"),
        ([*SMALL, "train.loss=nowhere:loss", "--workers", "1"], "cannot import nowhere"),
    ):
        done = run(*words, cwd=tmp_path)
        assert done.returncode == 2, done.stdout + done.stderr
        assert done.stdout == ""
        (line,) = done.stderr.splitlines()
        assert line.startswith("trainyard: ")
        assert said in line
