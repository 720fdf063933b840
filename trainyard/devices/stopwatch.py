"""Stopwatches for work on a device that never wait for it: readings are taken in the order of the work, and subtracted
when it is done. They measure what a rank computes, without the time in which it waits for others."""

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class Stopwatch(ABC):
    """Measures one piece of work at a time."""

    def __init__(self) -> None:
        self.running = False
        self.readings: list[Any] = []
        """Where measured time starts, ends, starts again, ..."""

    @abstractmethod
    def read_clock(self) -> Any:
        """A reading of the clock at this point of the work."""

    @abstractmethod
    def seconds_between(self, first: Any, second: Any) -> float:
        """Seconds between two readings; the work must be complete."""

    def start(self) -> None:
        self.running, self.readings = True, [self.read_clock()]

    def stop(self) -> None:
        """End the measurement; without `start`, nothing happens."""
        if self.running:
            self.readings.append(self.read_clock())
        self.running = False

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave out what happens here: a wait for other ranks."""
        if not self.running:
            yield
            return
        self.readings.append(self.read_clock())
        yield
        self.readings.append(self.read_clock())

    def seconds(self) -> float:
        """The measured time of the last work. The work must be complete, which the caller knows from its results."""
        pairs = zip(self.readings[::2], self.readings[1::2], strict=True)
        return sum(self.seconds_between(first, second) for first, second in pairs)


class HostStopwatch(Stopwatch):
    """For devices whose work is complete when a call returns."""

    def read_clock(self) -> float:
        return time.perf_counter()

    def seconds_between(self, first: float, second: float) -> float:
        return second - first


class EventStopwatch(Stopwatch):
    """For devices with a queue: events in it take the time. `package` has them, such as torch.cuda."""

    def __init__(self, package: Any) -> None:
        super().__init__()
        self.package = package

    def read_clock(self) -> Any:
        event = self.package.Event(enable_timing=True)
        event.record()
        return event

    def seconds_between(self, first: Any, second: Any) -> float:
        return float(first.elapsed_time(second)) / 1000
