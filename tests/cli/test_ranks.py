"""`trainyard train --nproc N` and `trainyard verify` with real rank processes and real signals.

Each rank imports torch, which takes seconds. tests/launch has the same failures with ranks that import nothing, so most
of these run nightly.
"""

import os
import signal
import time
from pathlib import Path

import pytest

from tests.support.forkserver import ForkedProcess, ForkServer

TRAIN = ["train", "tiny-llama", "--smoke", "--nproc", "2", "checkpoint.export_hf=false", "log.loggers=[]"]


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def start_long_run(cli: ForkServer, tmp_path: Path) -> tuple[ForkedProcess, list[int]]:
    """Start a long run on two ranks; returns after its first steps, with the process ids of its ranks."""
    arguments = [*TRAIN, "train.steps=1000000", "evaluate.every=0", f"log.directory={tmp_path}"]
    process = cli.start(arguments, forks_ranks=False)
    assert process.stdout
    output, deadline = "", time.monotonic() + 120
    while "step 3/" not in output:
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline
        output += process.stdout.read()
        time.sleep(0.02)
    ranks = children(process.pid)
    assert len(ranks) == 2
    return process, ranks


def all_gone(pids: list[int], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if not any(is_alive(pid) for pid in pids):
            return True
        time.sleep(0.1)
    return False


def test_two_ranks_train_and_only_rank_0_prints(cli: ForkServer, tmp_path: Path) -> None:
    arguments = [*TRAIN, f"log.directory={tmp_path}", "layout.tp=2", "layout.sequence_parallel=true"]
    done = cli.run(arguments)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("step 8/8") == 1
    assert "2 ranks: tensor 2 x pipeline 1 x context 1 x data 1" in done.stdout
    assert done.stderr == ""
    assert [path.name for path in tmp_path.iterdir()] == ["tiny-llama-smoke"]


@pytest.mark.nightly
def test_a_user_error_that_only_ranks_detect_is_shown_once(cli: ForkServer, tmp_path: Path) -> None:
    done = cli.run([*TRAIN, "train.loss=no_such_module:loss", f"log.directory={tmp_path}"])
    assert done.returncode == 2
    assert done.stderr.count("cannot import no_such_module") == 1
    assert "Traceback" not in done.stderr


@pytest.mark.nightly
@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_rank_ends_the_run(cli: ForkServer, tmp_path: Path, victim: int) -> None:
    process, ranks = start_long_run(cli, tmp_path)
    os.kill(ranks[victim], signal.SIGKILL)
    start = time.monotonic()
    _, errors = process.communicate(timeout=240)
    assert time.monotonic() - start < 30
    assert process.returncode == 1
    assert errors.count("was killed by signal 9") == 1
    assert f"rank {victim} was killed" in errors
    assert "Traceback" not in errors
    assert all_gone(ranks, 30)


@pytest.mark.nightly
def test_ctrl_c_stops_all_ranks_after_the_step(cli: ForkServer, tmp_path: Path) -> None:
    process, ranks = start_long_run(cli, tmp_path)
    process.send_signal(signal.SIGINT)
    out, errors = process.communicate(timeout=240)
    assert process.returncode == 130
    assert out.count("Stopped early") == 1
    assert errors.count("stopping after this step") == 1
    assert "Traceback" not in errors
    assert all_gone(ranks, 30)


@pytest.mark.nightly
def test_a_killed_launcher_leaves_no_rank(cli: ForkServer, tmp_path: Path) -> None:
    process, ranks = start_long_run(cli, tmp_path)
    process.kill()
    process.communicate()
    assert all_gone(ranks, 30)


@pytest.mark.nightly
def test_default_recipe_trains_on_two_ranks_and_is_verified(cli: ForkServer, tmp_path: Path) -> None:
    """Neither worked without more arguments: the micro batch of the recipe was its entire batch."""
    small = ["train.steps=2", "evaluate.every=0", "log.loggers=[]", f"log.directory={tmp_path}"]
    done = cli.run(["train", "--nproc", "2", *small])
    assert done.returncode == 0, done.stderr
    done = cli.run(["verify", "tiny-llama", "--steps", "1"])
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("recipe", "ranks"), [("tiny-llama", "2"), pytest.param("llama2-7b", "4", marks=pytest.mark.nightly)]
)
def test_verify_prints_a_table_and_passes(cli: ForkServer, recipe: str, ranks: str) -> None:
    done = cli.run(["verify", recipe, "--smoke", "--nproc", ranks])
    assert done.returncode == 0, done.stdout + done.stderr
    for quantity in ("initial weights", "batches", "loss", "gradients", "weights after"):
        assert quantity in done.stdout
    assert "pass: the same training" in done.stdout
    assert "fail" not in done.stdout


@pytest.mark.nightly
def test_verify_fails_if_ranks_differ(cli: ForkServer, tmp_path: Path) -> None:
    """A loss that depends on the rank violates layout invariance."""
    (tmp_path / "rank_loss.py").write_text(
        "import os\n"
        "def loss(output, batch):\n"
        "    return output.logits().square().sum() * (1 + int(os.environ.get('RANK', 0))), batch['labels'].numel()\n"
    )
    arguments = ["verify", "tiny-llama", "--smoke", "--nproc", "2", "train.loss=rank_loss:loss"]
    done = cli.run(arguments, cwd=tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "fail: not the same training" in done.stdout
