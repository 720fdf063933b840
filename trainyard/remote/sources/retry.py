"""When to try a transfer again."""

import logging
import random
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from trainyard.core.quantities import counted
from trainyard.remote.sources.remote_file import SourceUnavailable, TransferError

MAX_ATTEMPTS = 6
"""Attempts without a new byte."""
FIRST_WAIT_S = 0.5
"""Seconds before the second attempt; they double with each one."""
MAX_WAIT_S = 120.0
"""Most seconds to wait because a server asks for it."""
REPORTED_WAIT_S = 5.0
"""Waits of this many seconds are reported."""
process_ends = threading.Event()
"""Set when the process ends: whoever waits then gives up."""
T = TypeVar("T")
logger = logging.getLogger(__name__)


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


def with_retries(request: Callable[[], T], attempts: int | None = None) -> T:
    """The result of a request, tried again while it raises TransferError."""
    for attempt in range(1, MAX_ATTEMPTS + 1):
        try:
            return request()
        except TransferError as error:
            delay = delay_before(attempt, error)
            if delay is None or attempt == attempts:
                after = (
                    f", which asks to wait {error.retry_after:.0f} s" if (error.retry_after or 0) > MAX_WAIT_S else ""
                )
                raise SourceUnavailable(f"{error}{after}; gave up after {counted(attempt, 'attempt')}") from None
            report_wait(error, delay)
            time.sleep(delay)
    raise AssertionError
