"""One trial of a tuning search: the choice of settings it ran, how it ended, how fast it was.

Its command runs in a session of its own with a timeout, isolated from the crashes, memory and signals of this process.
"""

import os
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from trainyard.metrics.json_lines import read_json_lines

Choice = dict[str, Any]
"""A value for every tuned key, by dotted key."""

WARMUP_STEPS = 2
"""Leading steps of a trial that are not timed: they compile and select kernels and grow the memory pool."""
DONE, OUT_OF_MEMORY, TOO_SLOW = "done", "out of memory", "too slow"
OUT_OF_MEMORY_PATTERNS = ("outofmemory", "out of memory", "allocate memory", "memoryerror")
STOP_SIGNALS = ((signal.SIGTERM, 10.0), (signal.SIGTERM, 20.0), (signal.SIGKILL, None))
"""Signals that stop a command, each with the seconds to wait before the next. The first SIGTERM lets a run finish its
step, the second stops it at once and lets a compiler remove partial output that SIGKILL would leave in its cache."""
STDERR_TAIL_BYTES = 8000
"""Length of the end of stderr that the result keeps, bytes."""


@dataclass(frozen=True)
class Trial:
    """A choice and its measurements."""

    choice: Choice
    outcome: str
    """done, out of memory, too slow, or the reason of the failure."""
    seconds: float
    """Lifetime of the trial's process."""
    tokens_per_second: float = 0.0
    """Median over the timed steps; 0 unless the outcome is done."""
    peak_bytes: int = 0
    """Peak memory of rank 0, bytes."""
    first_step_seconds: float = 0.0
    """Duration of the first step, which includes compilation."""

    @property
    def ran_out_of_memory(self) -> bool:
        return self.outcome == OUT_OF_MEMORY


@dataclass(frozen=True)
class ProcessResult:
    """Exit status of a finished command."""

    returncode: int
    seconds: float
    finished_in_time: bool
    """False if the timeout stopped the command."""
    stderr: str
    """The last STDERR_TAIL_BYTES of stderr."""


def trial_from_process(choice: Choice, result: ProcessResult, metrics: Path) -> Trial:
    """The trial of a finished process, from its exit code, the end of its stderr and its metrics.jsonl."""
    returncode, seconds = result.returncode, result.seconds
    if not result.finished_in_time:
        return Trial(choice, TOO_SLOW, seconds)
    if returncode == 0:
        records = [record for record in read_json_lines(metrics).records if "tokens_per_second" in record]
        timed = records[min(WARMUP_STEPS, len(records) - 1) :]
        return Trial(
            choice,
            DONE,
            seconds,
            tokens_per_second=median(record["tokens_per_second"] for record in timed),
            peak_bytes=max(record["memory_bytes"] for record in records),
            first_step_seconds=records[0]["ms_per_iteration"] / 1000,
        )
    if returncode == -9 or any(pattern in result.stderr.lower() for pattern in OUT_OF_MEMORY_PATTERNS):
        return Trial(choice, OUT_OF_MEMORY, seconds)
    lines = [line for line in result.stderr.splitlines() if line.strip() and "logs of all ranks" not in line]
    reason = lines[-1].strip().removeprefix("trainyard: ") if lines else f"exit code {returncode}"
    return Trial(choice, reason, seconds)


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
