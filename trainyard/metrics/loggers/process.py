"""The run's end of the process of its loggers: calls go to a pipe without ever waiting for it."""

import fcntl
import json
import logging
import os
import select
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from trainyard.metrics.loggers.base import LoggedRun

LOG_FILE = "loggers.log"
"""In the run directory: what the libraries of the loggers print, and tracebacks of their errors."""
PIPE_BYTES = 1 << 20
MAX_PENDING_BYTES = 64 << 20
"""Bytes of calls that may wait for the process."""
CHUNK_BYTES = 1 << 16
NOTE_AFTER_S = 2.0
"""Seconds after which the log says that the end of a run waits for its loggers."""
logger = logging.getLogger(__name__)


class LoggerProcess:
    """Loggers in a child process. Nothing here raises, or waits, because of them."""

    def __init__(self, names: Sequence[str], run: LoggedRun) -> None:
        self.pending = bytearray()
        self.disabled = False
        self.log_path = run.directory / LOG_FILE
        command = [sys.executable, "-P", "-m", "trainyard.metrics.loggers.child"]
        with self.log_path.open("ab") as log:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
            )
        assert self.process.stdin
        assert self.process.stdout
        self.calls, self.messages = (os.dup(file.fileno()) for file in (self.process.stdin, self.process.stdout))
        self.process.stdin.close()
        self.process.stdout.close()
        os.set_blocking(self.calls, False)
        os.set_blocking(self.messages, False)
        with suppress(OSError, AttributeError):  # only Linux has this
            fcntl.fcntl(self.calls, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        self.submit("start", list(names), sys.path, {**asdict(run), "directory": str(run.directory)})

    def submit(self, method: str, *arguments: Any) -> None:
        """Have a method of every logger called. Does not wait."""
        if self.disabled:
            return
        self.pending += json.dumps([method, *arguments], default=str).encode() + b"\n"
        self._write()
        self._print_messages()
        if len(self.pending) > MAX_PENDING_BYTES:
            self._disable("are too far behind")

    def close(self, outcome: str, timeout_s: float) -> None:
        """Have the loggers closed, and wait for the end of their process for at most `timeout_s`."""
        self.submit("close", outcome)
        deadline = time.monotonic() + timeout_s
        while self.pending and not self.disabled and time.monotonic() < deadline:
            select.select([], [self.calls], [], 0.1)
            self._write()
        os.close(self.calls)
        if not self._wait(min(NOTE_AFTER_S, timeout_s)):
            logger.info("waiting up to %g s for the loggers to store their last records", timeout_s)
            if not self._wait(deadline - time.monotonic()):
                logger.warning("the loggers are still busy after %g s; their last records may be missing", timeout_s)
        self._print_messages()
        os.close(self.messages)
        with suppress(OSError):
            if not self.log_path.stat().st_size:
                self.log_path.unlink()

    def _wait(self, seconds: float) -> bool:
        """True if the process ends within this time."""
        try:
            self.process.wait(max(seconds, 0))
        except subprocess.TimeoutExpired:
            return False
        return True

    def _write(self) -> None:
        try:
            while self.pending:
                del self.pending[: os.write(self.calls, self.pending[:CHUNK_BYTES])]
        except BlockingIOError:
            return
        except OSError:
            self._print_messages()
            self._disable("have ended")

    def _print_messages(self) -> None:
        with suppress(OSError):
            while content := os.read(self.messages, CHUNK_BYTES):
                for line in content.decode(errors="replace").splitlines():
                    level, _, text = line.partition(" ")
                    logger.log(int(level) if level.isdigit() else logging.WARNING, "%s", text)

    def _disable(self, problem: str) -> None:
        if not self.disabled:
            self.disabled = True
            self.pending.clear()
            logger.warning("the loggers %s; the run continues without them (see %s)", problem, self.log_path)
