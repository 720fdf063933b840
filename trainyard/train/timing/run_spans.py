"""Records the spans of a rank in its span file while the run trains."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from trainyard import compat
from trainyard.config.schema import Config
from trainyard.core.world import host_name
from trainyard.devices import Device
from trainyard.metrics.span_recorder import SpanRecorder
from trainyard.metrics.spans import DEVICE_NAMES, NAMES, SpanHeader, span_path
from trainyard.parallel.mesh import Mesh
from trainyard.train.callbacks import Part
from trainyard.train.step import StepResult
from trainyard.train.timing.clock_offset import measure_clock_offset


class RunSpans(Part):
    """The span file of a rank, if log.spans asks for it and steps are left to run."""

    def __init__(
        self,
        recorder: SpanRecorder,
        config: Config,
        run_directory: Path,
        mesh: Mesh,
        device: Device,
        completed_steps: int,
    ) -> None:
        self.recorder, self.mesh, self.device = recorder, mesh, device
        self.run_directory, self.zero, self.compiles = run_directory, config.layout.zero, config.compile.enabled
        self.enabled = config.log.spans and completed_steps < config.train.steps
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
            self.mesh.coords["dp"] if self.zero < 2 else 0,
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
