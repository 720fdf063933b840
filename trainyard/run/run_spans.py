"""Records the spans of a rank in its span file while the run trains, with the offset of its clock, so that traces of
several hosts line up."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from trainyard import compat
from trainyard.core.world import host_name
from trainyard.metrics.span_recorder import SpanRecorder
from trainyard.metrics.spans import DEVICE_NAMES, NAMES, SpanHeader, span_path
from trainyard.parallel.mesh import Mesh
from trainyard.parallel.rank_context import RankContext
from trainyard.run.callbacks import Part
from trainyard.train.step import StepResult

ROUNDS = 10
Meeting = tuple[int, int]
"""When a rank entered and left a collective, in ns of its own clock."""


class RunSpans(Part):
    """The span file of a rank, if `enabled`."""

    def __init__(
        self, recorder: SpanRecorder, run_directory: Path, context: RankContext, enabled: bool, compiles: bool
    ) -> None:
        self.recorder, self.mesh, self.device = recorder, context.mesh, context.device
        self.run_directory, self.enabled, self.compiles = run_directory, enabled, compiles
        self.stop_compile_spans: Callable[[], None] = lambda: None

    def open(self) -> None:
        if not self.enabled:
            return
        offset = measure_clock_offset(self.mesh)  # all ranks together
        rank, synchronous = self.mesh.rank_order[self.mesh.layout_rank], self.device.synchronous
        header = SpanHeader(
            rank,
            host_name(),
            NAMES if synchronous else (*NAMES, *DEVICE_NAMES),
            self.recorder.start_unix_ns,
            offset.offset_ns,
            offset.error_ns,
            self.mesh.coords["dp"] if self.mesh.layout.zero < 2 else 0,
            synchronous,
        )
        device_clock = None if synchronous else self.device.stopwatch()
        self.recorder.open(span_path(self.run_directory, rank), header, device_clock)
        if self.compiles:
            self.stop_compile_spans = compat.on_compile(*self.recorder.compile_callbacks())

    def begin_step(self, step: int, logged: bool) -> None:
        self.recorder.begin_step(step, logged=logged)

    def end_step(self, step: int) -> None:
        self.recorder.end_step()

    def add_metrics(self, result: StepResult, record: dict[str, Any]) -> None:
        self.recorder.place_device_spans(self.device.synchronize)

    def end_at_deadline(self, step: int) -> None:
        self.recorder.close()

    def close(self) -> None:
        self.stop_compile_spans()
        self.recorder.close()


class ClockOffset(NamedTuple):
    """What to add to a rank's clock to get that of rank 0."""

    offset_ns: int = 0
    error_ns: int = 0
    """Bound of the error, if neither clock was set in the meantime."""


def measure_clock_offset(mesh: Mesh) -> ClockOffset:
    """The offset of this rank's clock. All ranks call this together."""
    if mesh.world.size == 1:
        return ClockOffset()
    meetings: list[Meeting] = []
    for _ in range(ROUNDS):
        entered = time.time_ns()
        mesh.all_gather_object(None)
        meetings.append((entered, time.time_ns()))
    of_first_rank = dict(zip(mesh.rank_order, mesh.all_gather_object(meetings), strict=True))[0]
    return clock_offset(of_first_rank, meetings)


def clock_offset(reference: Sequence[Meeting], own: Sequence[Meeting]) -> ClockOffset:
    """The offset that follows from the same collectives on two clocks.

    Nobody leaves a collective before everybody has entered it. The moment at which the last rank enters therefore lies
    between entering and leaving on every clock, which bounds the offset in each round.
    """
    lower = max(first[0] - second[1] for first, second in zip(reference, own, strict=True))
    upper = min(first[1] - second[0] for first, second in zip(reference, own, strict=True))
    return ClockOffset((lower + upper) // 2, max(upper - lower, 0) // 2)
