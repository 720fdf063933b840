"""The context of the training loop: signals end a run after its step, and garbage collection never stalls a step."""

import gc
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class StopSignal:
    """Records the first SIGINT or SIGTERM, after which the run ends with its step. A second signal ends it at once."""

    def __init__(self) -> None:
        self.requested = False

    @contextmanager
    def handle_signals(self) -> Iterator[None]:
        """Handle SIGINT and SIGTERM while the context is active."""

        def handler(signum: int, frame: FrameType | None) -> None:
            if self.requested:
                raise KeyboardInterrupt
            self.requested = True
            os.write(
                2, b"\nstopping after this step (a second signal stops at once)\n"
            )  # print is not safe in a signal handler

        try:
            previous = {signum: signal.signal(signum, handler) for signum in (signal.SIGINT, signal.SIGTERM)}
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
