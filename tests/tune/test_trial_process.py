"""One command in its own process group: its end, its limit, and a Ctrl-C while it runs."""

import os
import signal
import threading
import time
from pathlib import Path

import pytest

from trainyard.tune.trial_process import run_with_timeout

QUICK = ((signal.SIGTERM, 0.5), (signal.SIGTERM, 0.5), (signal.SIGKILL, None))
LONG = "sleep 60 & echo $$ > pid; wait"


def shell(code: str, where: Path) -> list[str]:
    return ["sh", "-c", f"cd '{where}'; {code}"]


def nobody_left(where: Path) -> bool:
    """Whether the group that wrote its number is gone, sleepers included."""
    for _ in range(50):
        try:
            os.killpg(int((where / "pid").read_text()), 0)
        except ProcessLookupError:
            return True
        time.sleep(0.1)
    return False


def test_a_command_that_ends_by_itself(tmp_path: Path) -> None:
    end = run_with_timeout(shell("echo no >&2; exit 3", tmp_path), 60, tmp_path / "log")
    assert (end.returncode, end.finished_in_time, end.stderr) == (3, True, "no\n")
    assert 0 < end.seconds < 60
    assert run_with_timeout(shell("kill -9 $$", tmp_path), 60, tmp_path / "log").returncode == -signal.SIGKILL


def test_what_it_leaves_running_is_ended(tmp_path: Path) -> None:
    assert run_with_timeout(shell("sleep 60 & echo $$ > pid", tmp_path), 60, tmp_path / "log").finished_in_time
    assert nobody_left(tmp_path)


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (LONG, -signal.SIGTERM),
        (f"trap 'sleep 0.1; exit 130' TERM; {LONG}", 130),  # an orderly end is waited for
        (f"trap '' TERM; {LONG}", -signal.SIGKILL),
    ],
)
def test_past_its_limit_it_is_asked_then_made_to_end(code: str, expected: int, tmp_path: Path) -> None:
    start = time.monotonic()
    end = run_with_timeout(shell(code, tmp_path), 1, tmp_path / "log", QUICK)
    assert (end.returncode, end.finished_in_time) == (expected, False)
    assert time.monotonic() - start < 30
    assert nobody_left(tmp_path)


def test_an_interrupt_ends_the_command_first(tmp_path: Path) -> None:
    threading.Timer(1, os.kill, (os.getpid(), signal.SIGINT)).start()
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        run_with_timeout(shell(LONG, tmp_path), 60, tmp_path / "log", QUICK)
    assert time.monotonic() - start < 30
    assert nobody_left(tmp_path)
