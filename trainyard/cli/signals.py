"""What a signal does to a command that has something to put away."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def interrupt_on_terminate() -> Iterator[None]:
    """SIGTERM ends a command as Ctrl-C does, so that nothing half-done is left behind."""
    old = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, old)
