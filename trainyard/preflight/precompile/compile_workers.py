"""Compile graphs in parallel, each in a fork of the process that traced it.

A fork inherits the graph in the middle of torch's compiler: nothing is pickled or traced twice. A child that crashes,
runs out of memory or is killed loses only its own graph. Children die with their parent, even if it is killed.
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
"""Interval between polls of the children."""


@dataclass(frozen=True)
class CompileResult:
    """The outcome of compiling one graph; `problem` is None on success."""

    key: str
    seconds: float
    problem: str | None
    log: Path


class ForkPool:
    """At most `workers` forks at a time, each compiling one graph."""

    def __init__(self, workers: int, log_dir: Path, on_result: Callable[[CompileResult], None]) -> None:
        self.workers, self.log_dir, self.on_result = workers, log_dir, on_result
        self.running: dict[int, tuple[str, float]] = {}
        self.parent_pid = os.getpid()
        self.pipe_read, self.pipe_write = os.pipe()  # closed when the parent dies
        log_dir.mkdir(parents=True, exist_ok=True)

    @property
    def is_child(self) -> bool:
        return os.getpid() != self.parent_pid

    def log_path(self, key: str) -> Path:
        return self.log_dir / f"{key}.log"

    def fork(self, key: str) -> bool:
        """Wait for a free worker, then fork. Returns True in the child, which must end with `exit_child`."""
        while len(self.running) >= self.workers:
            self.poll()
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid:
            self.running[pid] = (key, time.time())
            return False
        os.setsid()  # the C++ compilers that it starts die with it
        os.close(self.pipe_write)
        with self.log_path(key).open("wb") as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
        threading.Thread(target=die_with_parent, args=(self.pipe_read,), daemon=True).start()
        return True

    def exit_child(self, problem: str | None = None) -> None:
        """End a child. Inside an `except` block the traceback goes to the log."""
        trace = traceback.format_exc() if sys.exc_info()[0] else ""
        os.write(2, f"{trace}{problem or 'compiled'}\n".encode())
        os._exit(1 if problem else 0)

    def poll(self) -> None:
        """Report the children that have ended."""
        time.sleep(POLL_S)
        for pid, (key, start) in list(self.running.items()):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                del self.running[pid]
                log = self.log_path(key)
                # The child writes the last line of its log at the end, when the parent may be busy.
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
        names = {number.value: number.name for number in signal.Signals}
        hint = "; often the machine ran out of memory" if code == -signal.SIGKILL else ""
        return f"killed by {names.get(-code, f'signal {-code}')}{hint}"
    if code:
        lines = log.read_text(errors="replace").split("\n") if log.exists() else []
        return next((line for line in reversed(lines) if line.strip()), f"exit code {code}")
    return None


def die_with_parent(fd: int) -> None:
    """Kill this process group when the other end of the pipe closes."""
    os.read(fd, 1)
    os.killpg(os.getpgrp(), signal.SIGKILL)
