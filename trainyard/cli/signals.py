"""Signal handling for commands that must clean up before they exit."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def interrupt_on_terminate() -> Iterator[None]:
    """Turn SIGTERM into KeyboardInterrupt, so that a terminated command removes its partial output like Ctrl-C does."""
    previous = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
