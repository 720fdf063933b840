"""What earlier runs left behind: ranks of this user whose launcher is gone, and copies of their state in memory."""

import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from trainyard.core.constants import GIB
from trainyard.core.finding import Finding

GRACE_S = 5.0
MEMORY_DIRECTORY = Path("/dev/shm")
"""The default of checkpoint.memory_directory."""
ABANDONED_S = 3600.0
"""Age after which a run that makes copies has no processes any more."""


def leftover_findings(memory: Path = MEMORY_DIRECTORY) -> Iterator[Finding]:
    yield from _ranks()
    for run in sorted((memory / f"trainyard-{os.getuid()}").glob("*/")):
        files = [path.stat() for path in run.rglob("*") if path.is_file()]
        age = time.time() - max((file.st_mtime for file in files), default=run.stat().st_mtime)
        if age > ABANDONED_S:
            size = sum(file.st_size for file in files) / GIB
            text = f"{run} has {size:.1f} GiB, copies of the state of a run that has not trained for {age / 3600:.0f} h"
            yield Finding("leftovers", "warning", text, f"rm -r {run}", lambda run=run: _remove(run))  # type: ignore[misc]


def _remove(directory: Path) -> str:
    shutil.rmtree(directory)
    return f"{directory} removed"


def _ranks() -> Iterator[Finding]:
    ranks = [process for process in psutil.process_iter() if _is_orphaned_rank(process)]
    if not ranks:
        yield Finding("leftovers", "ok", "no rank without a launcher")
    for process in ranks:
        text = f"process {process.pid} is a rank whose launcher is gone"
        yield Finding("leftovers", "warning", text, f"kill {process.pid}", lambda process=process: _end(process))  # type: ignore[misc]


def _is_orphaned_rank(process: psutil.Process) -> bool:
    """True for `python -m trainyard` with a rank, of this user, that process 1 has adopted."""
    try:
        is_ours = process.uids().real == os.getuid() and "trainyard" in process.cmdline()[:3]
        return is_ours and process.ppid() == 1 and process.pid != os.getpid() and "RANK" in process.environ()
    except (psutil.Error, OSError):
        return False


def _end(process: psutil.Process) -> str:
    process.terminate()
    deadline = time.monotonic() + GRACE_S
    while process.is_running() and time.monotonic() < deadline:
        time.sleep(0.1)
    if process.is_running():
        process.kill()
    return f"process {process.pid} ended"
