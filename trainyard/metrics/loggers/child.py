"""The process of the loggers. It reads calls from standard input, one JSON array per line, and ends with it.

Python runs one thread at a time, so what a logger computes in the process of the run would delay steps: importing a
library alone takes seconds.
"""

import json
import logging
import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

from trainyard.metrics.loggers.base import LoggedRun
from trainyard.metrics.loggers.thread import LoggerThread

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
"""Signals that a terminal or a scheduler sends to all processes of a run. The run tells its loggers when it ends."""
NICENESS = 5
"""Steps come first where cores are scarce."""
CLOSE_TIMEOUT_S = 75.0
"""Seconds for the loggers to end: the last uploads to W&B get a minute."""


class MessageHandler(logging.Handler):
    """Sends log records to the run, as lines on standard output. What libraries print goes to standard error."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.file = os.fdopen(os.dup(1), "w", buffering=1)
        os.dup2(2, 1)

    def emit(self, record: logging.LogRecord) -> None:
        with suppress(OSError):  # the run has ended
            self.file.write(f"{record.levelno} {' '.join(record.getMessage().split())}\n")


def main() -> None:
    os.nice(NICENESS)
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    logging.getLogger("trainyard").addHandler(MessageHandler())
    logging.getLogger("trainyard").setLevel(logging.INFO)
    threads: list[LoggerThread] = []
    outcome = "failed"  # unless the run says how it ends
    for line in sys.stdin:
        if not line.endswith("\n"):  # the run was killed while it wrote
            break
        method, *arguments = json.loads(line)
        if method == "start":
            names, sys.path[:], run = arguments
            threads = [LoggerThread(name) for name in names]
            arguments = [LoggedRun(**{**run, "directory": Path(run["directory"])})]
        if method == "close":
            (outcome,) = arguments
            break
        for thread in threads:
            thread.submit(method, *arguments)
    deadline = time.monotonic() + CLOSE_TIMEOUT_S
    for thread in threads:
        thread.close(outcome, deadline)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # a logger that hangs must not hold up the end


if __name__ == "__main__":
    main()
