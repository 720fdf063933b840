"""Runs one command in its own session with a timeout, isolated from the crashes, memory and signals of this process."""

import os
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

STOP_SIGNALS = ((signal.SIGTERM, 10.0), (signal.SIGTERM, 20.0), (signal.SIGKILL, None))
"""Signals that stop a command, each with the seconds to wait before the next. The first SIGTERM lets a run finish its
step, the second stops it at once and lets a compiler remove partial output that SIGKILL would leave in its cache."""
STDERR_TAIL_BYTES = 8000
"""Length of the end of stderr that the result keeps, bytes."""


@dataclass(frozen=True)
class ProcessResult:
    """Exit status of a finished command."""

    returncode: int
    seconds: float
    finished_in_time: bool
    """False if the timeout stopped the command."""
    stderr: str
    """The last STDERR_TAIL_BYTES of stderr."""


def run_with_timeout(
    command: Sequence[str], timeout_s: float, log: Path, stop_signals: Sequence[tuple[int, float | None]] = STOP_SIGNALS
) -> ProcessResult:
    """Run `command` for at most `timeout_s` seconds and write its stderr to `log`. An exception in this process, such
    as Ctrl-C, stops the command too."""
    start = time.monotonic()
    in_time = True
    with log.open("wb") as file:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=file, start_new_session=True
        )
    try:
        process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        in_time = False
    finally:
        _terminate(process, stop_signals)
    stderr = log.read_bytes()[-STDERR_TAIL_BYTES:].decode(errors="replace")
    return ProcessResult(process.returncode, time.monotonic() - start, in_time, stderr)


def _terminate(process: subprocess.Popen[bytes], stop_signals: Sequence[tuple[int, float | None]]) -> None:
    """Signal the command's process group until it exits. A Ctrl-C in the meantime skips to the next signal."""
    for signum, wait_s in stop_signals:
        if process.poll() is None:
            os.killpg(process.pid, signum)
            with suppress(subprocess.TimeoutExpired, KeyboardInterrupt):
                process.wait(wait_s)
    with suppress(ProcessLookupError, PermissionError):  # background children of the command
        os.killpg(process.pid, signal.SIGTERM)
