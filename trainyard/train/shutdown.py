"""What surrounds the steps: an orderly end when a signal comes, and no garbage collection in between."""

import gc
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class StopSignal:
    """Set by the first Ctrl-C or SIGTERM: the run ends after the step. A second signal ends it at once."""

    def __init__(self) -> None:
        self.requested = False

    @contextmanager
    def handle_signals(self) -> Iterator[None]:
        def handler(number: int, frame: FrameType | None) -> None:
            if self.requested:
                raise KeyboardInterrupt
            self.requested = True
            os.write(2, b"\nstopping after this step (a second signal stops at once)\n")  # print is not safe here

        try:
            old = {number: signal.signal(number, handler) for number in (signal.SIGINT, signal.SIGTERM)}
        except ValueError:  # not in the main thread: the caller handles signals
            yield
            return
        try:
            yield
        finally:
            for number, previous in old.items():
                signal.signal(number, previous)


@contextmanager
def quiet_garbage_collector() -> Iterator[None]:
    """A collection in the middle of a step stalls it; what exists now stays, so it need not be scanned again."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
