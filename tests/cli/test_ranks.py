"""`trainyard train --nproc N` and `trainyard verify` as a user meets them: real processes, real signals."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

COMMAND = [sys.executable, "-m", "trainyard"]
TRAIN = ["train", "tiny-llama", "--smoke", "--nproc", "2", "checkpoint.export_hf=false", "log.tensorboard=false"]


def run(*words: str, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *words], capture_output=True, text=True, timeout=timeout)


def children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def started(tmp_path: Path, *words: str) -> tuple[subprocess.Popen[str], list[int]]:
    """A long run on two ranks that has made its first steps, and its ranks' process ids."""
    process = subprocess.Popen(
        [*COMMAND, *TRAIN, "train.steps=1000000", "evaluate.every=0", f"log.directory={tmp_path}", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("step 3/"):
            break
    else:
        raise AssertionError(process.communicate()[1])
    return process, children(process.pid)


def gone(pids: list[int], seconds: float) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if not any(alive(pid) for pid in pids):
            return True
        time.sleep(0.1)
    return False


def test_two_ranks_train_and_one_speaks(tmp_path: Path) -> None:
    done = run(*TRAIN, f"log.directory={tmp_path}", "layout.tp=2", "layout.sequence_parallel=true")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("step 8/8") == 1
    assert "2 ranks: tensor 2 x pipeline 1 x context 1 x data 1" in done.stdout
    assert done.stderr == ""
    assert [path.name for path in tmp_path.iterdir()] == ["tiny-llama-smoke"]


def test_a_layout_that_cannot_be_is_one_line_before_any_process() -> None:
    start = time.monotonic()
    done = run("train", "tiny-llama", "--nproc", "3", "layout.tp=2")
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "needs a multiple of 2 ranks, this run has 3" in done.stderr
    assert time.monotonic() - start < 30


def test_a_user_error_that_only_ranks_find_is_shown_once(tmp_path: Path) -> None:
    done = run(*TRAIN, "train.loss=no_such_module:loss", f"log.directory={tmp_path}")
    assert done.returncode == 2
    assert done.stderr.count("cannot import no_such_module") == 1
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_rank_brings_the_others_down(tmp_path: Path, victim: int) -> None:
    process, ranks = started(tmp_path)
    assert len(ranks) == 2
    os.kill(ranks[victim], signal.SIGKILL)
    start = time.monotonic()
    _, errors = process.communicate(timeout=60)
    assert time.monotonic() - start < 30
    assert process.returncode == 1
    assert errors.count("was killed by signal 9") == 1
    assert f"rank {victim} was killed" in errors
    assert "Traceback" not in errors
    assert gone(ranks, 5)


def test_ctrl_c_stops_all_ranks_after_the_step(tmp_path: Path) -> None:
    process, ranks = started(tmp_path)
    process.send_signal(signal.SIGINT)
    out, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert out.count("Stopped early") == 1
    assert errors.count("stopping after this step") == 1
    assert "Traceback" not in errors
    assert gone(ranks, 5)


def test_a_killed_launcher_leaves_no_rank(tmp_path: Path) -> None:
    process, ranks = started(tmp_path)
    process.kill()
    process.communicate()
    assert gone(ranks, 5)


def test_verify_prints_a_table_and_passes() -> None:
    done = run("verify", "llama2-7b", "--smoke", "--nproc", "4")
    assert done.returncode == 0, done.stdout + done.stderr
    for what in ("initial weights", "batches", "loss", "gradients", "weights after"):
        assert what in done.stdout
    assert "pass: the same training" in done.stdout
    assert "fail" not in done.stdout


def test_verify_fails_where_ranks_differ(tmp_path: Path) -> None:
    """A loss that depends on the rank is what no layout may have."""
    (tmp_path / "rank_loss.py").write_text(
        "import os\n"
        "def loss(output, batch):\n"
        "    return output.logits().square().sum() * (1 + int(os.environ.get('RANK', 0))), batch['labels'].numel()\n"
    )
    done = subprocess.run(
        [*COMMAND, "verify", "tiny-llama", "--smoke", "--nproc", "2", "train.loss=rank_loss:loss"],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=tmp_path,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert "fail: not the same training" in done.stdout


def test_verify_says_when_one_rank_cannot_hold_the_model() -> None:
    done = run("verify", "llama3-70b")
    assert done.returncode == 2
    assert "use --smoke" in done.stderr
