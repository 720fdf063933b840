"""Runs one command to its end or to a time limit, apart from this process: its crash, its memory and its signals."""

import os
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

ENDING = ((signal.SIGTERM, 10.0), (signal.SIGTERM, 20.0), (signal.SIGKILL, None))
"""How a command is ended: signal, and seconds until the next. A run stops after its step, then at once; a compiler
removes what it has half written, which SIGKILL would leave in the cache."""
TAIL = 8000
"""Bytes of stderr that are kept."""


@dataclass(frozen=True)
class Ending:
    code: int
    seconds: float
    in_time: bool
    """Whether it ended by itself."""
    errors: str
    """The end of its stderr."""


def run(command: Sequence[str], limit: float, log: Path, ending: Sequence[tuple[int, float | None]] = ENDING) -> Ending:
    """Run `command` for at most `limit` seconds; `log` gets its stderr. An exception here, Ctrl-C, ends it as well."""
    start = time.monotonic()
    in_time = True
    with log.open("wb") as file:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=file, start_new_session=True
        )
    try:
        process.wait(limit)
    except subprocess.TimeoutExpired:
        in_time = False
    finally:
        _end(process, ending)
    errors = log.read_bytes()[-TAIL:].decode(errors="replace")
    return Ending(process.returncode, time.monotonic() - start, in_time, errors)


def _end(process: subprocess.Popen[bytes], ending: Sequence[tuple[int, float | None]]) -> None:
    """Signals to the command's process group until it has ended; a Ctrl-C in the meantime goes on to the next."""
    for number, patience in ending:
        if process.poll() is None:
            os.killpg(process.pid, number)
            with suppress(subprocess.TimeoutExpired, KeyboardInterrupt):
                process.wait(patience)
    with suppress(ProcessLookupError, PermissionError):  # what it started and did not wait for
        os.killpg(process.pid, signal.SIGTERM)
