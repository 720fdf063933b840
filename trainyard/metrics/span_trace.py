"""Writes spans as a trace in Chrome's trace event format, which Perfetto and chrome://tracing open.

One process per host, one track per rank; a rank whose device has its own clock has a second track for it.
"""

import gzip
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from trainyard.core.atomic_files import atomic_file
from trainyard.metrics.span_window import RankWindow
from trainyard.metrics.spans import DEVICE_PREFIX

TRACKS_PER_RANK = 2


def write_trace(path: Path, windows: Sequence[RankWindow]) -> int:
    """Write a gzipped trace; returns the number of spans."""
    count = 0
    with atomic_file(path) as file, gzip.GzipFile(fileobj=file, mode="wb", compresslevel=6, mtime=0) as archive:
        archive.write(b'{"displayTimeUnit":"ms","traceEvents":[\n')
        for index, event in enumerate(trace_events(windows)):
            line = json.dumps(event, separators=(",", ":"), ensure_ascii=False)  # Perfetto shows escapes as they are
            archive.write((b",\n" if index else b"") + line.encode(errors="replace"))
            count += event["ph"] == "X"
        archive.write(b"\n]}\n")
    return count


def trace_events(windows: Sequence[RankWindow]) -> Iterator[dict[str, Any]]:
    """Metadata and one complete event ("X") for each span; times in microseconds since the first span."""
    hosts = list(dict.fromkeys(window.header.host for window in windows))
    origin = min(int(window.start.min()) for window in windows)
    for number, host in enumerate(hosts, 1):
        yield _metadata("process_name", number, 0, name=host)
        yield _metadata("process_sort_index", number, 0, sort_index=number)
    for window in windows:
        rank, process = window.header.rank, hosts.index(window.header.host) + 1
        is_device = [name.startswith(DEVICE_PREFIX) for name in window.names]
        on_device = np.array(is_device, bool)[window.name]
        for track, selected in ((0, ~on_device), (1, on_device)):
            if not selected.any():
                continue
            thread = TRACKS_PER_RANK * rank + track + 1
            label = f"rank {rank} device" if track else f"rank {rank}"
            yield _metadata("thread_name", process, thread, name=label)
            yield _metadata("thread_sort_index", process, thread, sort_index=thread)
            for start, duration, name, step in _nested(window, selected):
                yield {
                    "ph": "X",
                    "name": window.names[name].removeprefix(DEVICE_PREFIX),
                    "cat": "device" if track else "host",
                    "pid": process,
                    "tid": thread,
                    "ts": (start - origin) / 1000,
                    "dur": duration / 1000,
                    "args": {"step": step},
                }


def _nested(window: RankWindow, selected: np.ndarray[Any, Any]) -> Iterator[tuple[int, int, int, int]]:
    """(start, duration, name, step) in order of start. A span that ends after the one around it, because of the
    resolution of a device's clock, is cut off: viewers require spans that nest."""
    columns = (window.start, window.duration, window.depth, window.name, window.step)
    rows = np.stack([column[selected] for column in columns], 1)
    rows = rows[np.lexsort((rows[:, 2], -rows[:, 1], rows[:, 0]))]
    ends: list[int] = []
    for start, duration, _, name, step in rows.tolist():
        while ends and ends[-1] <= start:
            ends.pop()
        end = min(start + duration, ends[-1]) if ends else start + duration
        ends.append(end)
        yield start, end - start, name, step


def _metadata(kind: str, process: int, thread: int, **arguments: Any) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": process, "tid": thread, "args": arguments}
