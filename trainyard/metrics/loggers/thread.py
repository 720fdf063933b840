"""Runs a logger in a thread, so that a logger that waits does not hold up the others."""

import logging
import queue
import sys
import threading
import time
import traceback
from typing import Any

from trainyard.core.errors import one_line
from trainyard.metrics.loggers.base import Logger
from trainyard.metrics.loggers.build import logger_class

MAX_PENDING = 10_000
"""Calls that may wait for a logger. One that is further behind is disabled, since its calls fill the memory."""
logger = logging.getLogger(__name__)


class LoggerThread:
    """Creates a logger, and calls its methods, in order, in a thread. An error disables it."""

    def __init__(self, name: str) -> None:
        """`name` is the one in log.loggers. The logger is created in the calling thread, since two threads that import
        large libraries can see each other's half-imported modules."""
        self.name = name
        self.disabled = False
        self.target: Logger | None = None
        try:
            self.target = logger_class(name)()
        except BaseException as error:
            self._fail("__init__", error)
        self.pending: queue.SimpleQueue[tuple[str, tuple[Any, ...]] | None] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._work, name=f"logger {name}", daemon=True)
        self.thread.start()

    def submit(self, method: str, *arguments: Any) -> None:
        """Have `method` called after all earlier ones."""
        if not self.disabled and self.pending.qsize() >= MAX_PENDING:
            self._disable(f"is {MAX_PENDING:,} records behind; the run continues without it")
        if not self.disabled:
            self.pending.put((method, arguments))

    def close(self, outcome: str, deadline: float) -> None:
        """Close the logger after all calls that are pending, and wait for that until `deadline` (monotonic)."""
        self.submit("close", outcome)
        self.pending.put(None)
        self.thread.join(max(deadline - time.monotonic(), 0))
        if self.thread.is_alive():
            self._disable("did not end in time: its last records may be missing")

    def _work(self) -> None:
        while (call := self.pending.get()) is not None:
            method, arguments = call
            if self.disabled:
                continue
            try:
                getattr(self.target, method)(*arguments)
            except BaseException as error:  # whatever a library raises, SystemExit included
                self._fail(method, error)

    def _fail(self, method: str, error: BaseException) -> None:
        traceback.print_exception(error, file=sys.stderr)
        self._disable(f"failed in {method}: {type(error).__name__}: {one_line(error)}; the run continues without it")

    def _disable(self, problem: str) -> None:
        if not self.disabled:
            self.disabled = True
            logger.warning("logger %s %s", self.name, problem)
