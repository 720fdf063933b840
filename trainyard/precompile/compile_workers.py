"""Graphs compiled side by side, each in a fork of the process that has traced it.

A fork has the graph as it is, in the midst of torch's compiler: nothing is pickled, and nothing is traced twice. A
child that crashes, runs out of memory or is killed takes only its own graph with it. Children end when their parent
does, however that comes.
"""

import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

POLL_S = 0.02
"""Seconds between two looks at the children."""


@dataclass(frozen=True)
class CompileResult:
    """How the compilation of a graph ended."""

    key: str
    seconds: float
    problem: str | None
    log: Path


class ForkPool:
    def __init__(self, workers: int, log_dir: Path, on_result: Callable[[CompileResult], None]) -> None:
        self.workers, self.log_dir, self.on_result = workers, log_dir, on_result
        self.running: dict[int, tuple[str, float]] = {}
        self.parent_pid = os.getpid()
        self.pipe_read, self.pipe_write = os.pipe()  # closed by the parent's end
        log_dir.mkdir(parents=True, exist_ok=True)

    @property
    def is_child(self) -> bool:
        return os.getpid() != self.parent_pid

    def log_path(self, key: str) -> Path:
        return self.log_dir / f"{key}.log"

    def fork(self, key: str) -> bool:
        """Wait for a free place, then fork; whether this is the child, which ends by `leave`."""
        while len(self.running) >= self.workers:
            self.poll()
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid:
            self.running[pid] = (key, time.time())
            return False
        os.setsid()  # the compilers that it starts are ended with it
        os.close(self.pipe_write)
        with self.log_path(key).open("wb") as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
        threading.Thread(target=_die_with_parent, args=(self.pipe_read,), daemon=True).start()
        return True

    def exit_child(self, problem: str | None = None) -> None:
        """The end of a child; inside an `except` its traceback goes to the log."""
        said = traceback.format_exc() if sys.exc_info()[0] else ""
        os.write(2, f"{said}{problem or 'compiled'}\n".encode())
        os._exit(1 if problem else 0)

    def poll(self) -> None:
        """Tell of the children that have ended."""
        time.sleep(POLL_S)
        for pid, (key, start) in list(self.running.items()):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                del self.running[pid]
                log = self.log_path(key)
                # The last line of the log is written at the end, when the parent may have been busy.
                seconds = log.stat().st_mtime - start if log.exists() else 0.0
                problem = _failure_reason(os.waitstatus_to_exitcode(status), log)
                self.on_result(CompileResult(key, max(seconds, 0.0), problem, log))
                if problem is None:
                    log.unlink(missing_ok=True)

    def wait_all(self) -> None:
        while self.running:
            self.poll()


def _failure_reason(code: int, log: Path) -> str | None:
    if code < 0:
        names = {known.value: known.name for known in signal.Signals}
        why = "; often the machine ran out of memory" if code == -signal.SIGKILL else ""
        return f"killed by {names.get(-code, f'signal {-code}')}{why}"
    if code:
        lines = log.read_text(errors="replace").split("\n") if log.exists() else []
        return next((line for line in reversed(lines) if line.strip()), f"exit code {code}")
    return None


def _die_with_parent(fd: int) -> None:
    os.read(fd, 1)
    os.killpg(os.getpgrp(), signal.SIGKILL)
