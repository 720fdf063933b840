"""Running one command in its own process group: normal exit, timeout, and Ctrl-C while it runs."""

import os
import signal
import threading
import time
from pathlib import Path

import pytest

from trainyard.preflight.tune.trial import run_with_timeout

FAST_STOP = ((signal.SIGTERM, 0.5), (signal.SIGTERM, 0.5), (signal.SIGKILL, None))
SLEEP_WITH_CHILD = "sleep 60 & echo $$ > pid; wait"


def shell(code: str, directory: Path) -> list[str]:
    return ["sh", "-c", f"cd '{directory}'; {code}"]


def process_group_is_gone(directory: Path) -> bool:
    """True once the process group whose leader wrote its pid has no process left, background children included."""
    for _ in range(50):
        try:
            os.killpg(int((directory / "pid").read_text()), 0)
        except ProcessLookupError:
            return True
        time.sleep(0.1)
    return False


def test_normal_exit(tmp_path: Path) -> None:
    result = run_with_timeout(shell("echo no >&2; exit 3", tmp_path), 60, tmp_path / "log")
    assert (result.returncode, result.finished_in_time, result.stderr) == (3, True, "no\n")
    assert 0 < result.seconds < 60
    assert run_with_timeout(shell("kill -9 $$", tmp_path), 60, tmp_path / "log").returncode == -signal.SIGKILL


def test_background_children_are_terminated(tmp_path: Path) -> None:
    assert run_with_timeout(shell("sleep 60 & echo $$ > pid", tmp_path), 60, tmp_path / "log").finished_in_time
    assert process_group_is_gone(tmp_path)


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (SLEEP_WITH_CHILD, -signal.SIGTERM),
        (f"trap 'sleep 0.1; exit 130' TERM; {SLEEP_WITH_CHILD}", 130),  # waits for an orderly exit
        (f"trap '' TERM; {SLEEP_WITH_CHILD}", -signal.SIGKILL),
    ],
)
def test_timeout_sends_sigterm_then_sigkill(code: str, expected: int, tmp_path: Path) -> None:
    start = time.monotonic()
    result = run_with_timeout(shell(code, tmp_path), 1, tmp_path / "log", FAST_STOP)
    assert (result.returncode, result.finished_in_time) == (expected, False)
    assert time.monotonic() - start < 30
    assert process_group_is_gone(tmp_path)


def test_keyboard_interrupt_stops_the_command(tmp_path: Path) -> None:
    threading.Timer(1, os.kill, (os.getpid(), signal.SIGINT)).start()
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        run_with_timeout(shell(SLEEP_WITH_CHILD, tmp_path), 60, tmp_path / "log", FAST_STOP)
    assert time.monotonic() - start < 30
    assert process_group_is_gone(tmp_path)
