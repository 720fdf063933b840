"""Runs one command to its end or to a time limit, apart from this process: its crash, its memory and its signals."""

import os
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

STOP_SIGNALS = ((signal.SIGTERM, 10.0), (signal.SIGTERM, 20.0), (signal.SIGKILL, None))
"""How a command is ended: signal, and seconds until the next. A run stops after its step, then at once; a compiler
removes what it has half written, which SIGKILL would leave in the cache."""
STDERR_TAIL_BYTES = 8000
"""Bytes of stderr that are kept."""


@dataclass(frozen=True)
class ProcessResult:
    returncode: int
    seconds: float
    finished_in_time: bool
    """Whether it ended by itself."""
    stderr: str
    """The end of its stderr."""


def run_with_timeout(
    command: Sequence[str], timeout_s: float, log: Path, stop_signals: Sequence[tuple[int, float | None]] = STOP_SIGNALS
) -> ProcessResult:
    """Run `command` for at most `limit` seconds; `log` gets its stderr. An exception here, Ctrl-C, ends it as well."""
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
    errors = log.read_bytes()[-STDERR_TAIL_BYTES:].decode(errors="replace")
    return ProcessResult(process.returncode, time.monotonic() - start, in_time, errors)


def _terminate(process: subprocess.Popen[bytes], stop_signals: Sequence[tuple[int, float | None]]) -> None:
    """Signals to the command's process group until it has ended; a Ctrl-C in the meantime goes on to the next."""
    for number, patience in stop_signals:
        if process.poll() is None:
            os.killpg(process.pid, number)
            with suppress(subprocess.TimeoutExpired, KeyboardInterrupt):
                process.wait(patience)
    with suppress(ProcessLookupError, PermissionError):  # what it started and did not wait for
        os.killpg(process.pid, signal.SIGTERM)
