"""The context of the training loop: signals end a run after its step, and garbage collection never stalls a step."""

import gc
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
"""Ctrl-C; the end of a job, or its preemption; the notice before a time limit."""


class StopSignal:
    """Records the first of STOP_SIGNALS, after which the run ends with its step. A second Ctrl-C ends it at once;
    schedulers repeat their signals while the run saves."""

    def __init__(self) -> None:
        self.requested = False

    @contextmanager
    def handle_signals(self) -> Iterator[None]:
        """Handle STOP_SIGNALS while the context is active."""

        def handler(signum: int, frame: FrameType | None) -> None:
            if self.requested:
                if signum == signal.SIGINT:
                    raise KeyboardInterrupt
                return
            self.requested = True
            hint = b" (a second Ctrl-C stops at once)" if signum == signal.SIGINT else b""
            os.write(2, b"\nstopping after this step" + hint + b"\n")  # print is not safe in a signal handler

        try:
            previous = {signum: signal.signal(signum, handler) for signum in STOP_SIGNALS}
        except ValueError:  # not in the main thread: the caller handles signals
            yield
            return
        try:
            yield
        finally:
            for signum, old_handler in previous.items():
                signal.signal(signum, old_handler)


@contextmanager
def quiet_garbage_collector() -> Iterator[None]:
    """Collect garbage once and exempt all existing objects from later collections, which would stall a step."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
