"""When a transfer or request is tried again: while it raises TransferError, with growing waits, up to a limit."""

import logging
import random
import threading
import time
from collections.abc import Callable
from itertools import count
from typing import TypeVar

from trainyard.core.errors import RunStopped, UserError
from trainyard.core.quantities import counted

MAX_ATTEMPTS = 6
"""Attempts without a new byte."""
FIRST_WAIT_S = 0.5
"""Seconds before the second attempt; they double with each one."""
MAX_WAIT_S = 120.0
"""Most seconds to wait because a server asks for it."""
REPORTED_WAIT_S = 5.0
"""Waits of this many seconds are reported."""
FIRST_PAUSE_S, MAX_PAUSE_S = 0.1, 10.0
"""Where time is the limit: seconds before the second attempt, which double with each one, and the most."""
FIRST_WARNING_S = 2.0
process_ends = threading.Event()
"""Set when the process ends: whoever waits then gives up."""
T = TypeVar("T")
logger = logging.getLogger(__name__)


class TransferError(Exception):
    """A transfer failed in a way that may pass: the connection broke, or the server is busy."""

    def __init__(self, message: str, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.retry_after = retry_after
        """Seconds that the server asks to wait."""


class SourceUnavailable(UserError):
    """The source did not answer, or may not be asked: a copy in a cache can serve."""


class AttemptLimit:
    """Gives up after some attempts: for commands, whose user can start them again."""

    def __init__(self, attempts: int | None = None) -> None:
        self.attempts = attempts

    def delay(self, attempt: int, error: TransferError) -> float:
        """Seconds to wait after attempt number `attempt`. Raises if there shall be no other."""
        delay = delay_before(attempt, error)
        if delay is None or attempt == self.attempts:
            asked = error.retry_after or 0
            after = f", which asks to wait {asked:.0f} s" if asked > MAX_WAIT_S else ""
            raise SourceUnavailable(f"{error}{after}; gave up after {counted(attempt, 'attempt')}") from None
        report_wait(error, delay)
        return delay


class TimeLimit:
    """Gives up after some seconds: for runs, which nobody watches."""

    def __init__(self, url: str, limit_s: float, give_up: type[Exception]) -> None:
        self.url, self.limit_s, self.give_up = url, limit_s, give_up
        self.start = time.monotonic()
        self.warn_after = FIRST_WARNING_S

    def delay(self, attempt: int, error: TransferError) -> float:
        waited = time.monotonic() - self.start
        pause = min(FIRST_PAUSE_S * 2 ** (attempt - 1), MAX_PAUSE_S)
        reason = str(error).removeprefix(f"{self.url}: ")
        if waited + pause > self.limit_s:
            raise self.give_up(f"{self.url}: the store has not answered for {waited:.0f} s: {reason}") from None
        if waited >= self.warn_after:
            logger.warning("%s: trying again since %.0f s, for up to %.0f: %s", self.url, waited, self.limit_s, reason)
            self.warn_after = waited * 3
        return float(pause * random.uniform(0.5, 1.0))  # ranks do not repeat at the same time


def with_retries(request: Callable[[], T], limit: AttemptLimit | TimeLimit | None = None) -> T:
    """The result of a request, tried again while it raises TransferError."""
    limit = limit or AttemptLimit()
    for attempt in count(1):
        try:
            return request()
        except TransferError as error:
            if process_ends.wait(limit.delay(attempt, error)):
                raise RunStopped(f"{error}; not tried again: the process ends") from None
    raise AssertionError


def delay_before(attempt: int, error: TransferError) -> float | None:
    """Seconds to wait before the attempt after number `attempt`; None: give up."""
    if attempt >= MAX_ATTEMPTS or (error.retry_after or 0) > MAX_WAIT_S:
        return None
    if error.retry_after is not None:
        return error.retry_after
    return float(FIRST_WAIT_S * 2 ** (attempt - 1) * random.uniform(0.75, 1.25))


def report_wait(error: TransferError, delay: float) -> None:
    """Tell the user why nothing happens, if it takes long."""
    level = logging.WARNING if delay >= REPORTED_WAIT_S else logging.DEBUG
    logger.log(level, "%s; next attempt in %.0f s", error, delay)
