"""Opens and closes the span file of a rank around its run."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from trainyard import compat
from trainyard.config.schema import Config
from trainyard.core.world import host_name
from trainyard.devices import Device
from trainyard.metrics.span_recorder import SpanRecorder
from trainyard.metrics.spans import DEVICE_NAMES, NAMES, SpanHeader, span_path
from trainyard.parallel.mesh import Mesh
from trainyard.train.timing.clock_offset import measure_clock_offset


@contextmanager
def recorded_spans(
    spans: SpanRecorder, config: Config, run_directory: Path, mesh: Mesh, device: Device, completed_steps: int
) -> Iterator[None]:
    """Record spans while the context is active, if log.spans says so and steps are left to run. All ranks enter it
    together."""
    if not config.log.spans or completed_steps >= config.train.steps:
        yield
        return
    offset = measure_clock_offset(mesh)
    rank, synchronous = mesh.rank_order[mesh.layout_rank], device.synchronous
    header = SpanHeader(
        rank,
        host_name(),
        NAMES if synchronous else (*NAMES, *DEVICE_NAMES),
        spans.start_unix_ns,
        offset.offset_ns,
        offset.error_ns,
        mesh.coords["dp"] if config.layout.zero < 2 else 0,
        synchronous,
    )
    spans.open(span_path(run_directory, rank), header, None if synchronous else device.stopwatch())
    stop = compat.on_compile(*spans.compile_callbacks()) if config.compile.enabled else lambda: None
    try:
        yield
    finally:
        stop()
        spans.close()
