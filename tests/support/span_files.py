"""Span files written from their description alone: a line of JSON, then packed records `<IHHQQ`."""

import json
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from trainyard.metrics.spans import read_spans, span_files, step_times

NAMES = ["step", "wait", "forward"]
Record = tuple[int, str, int, int, int]
"""Step, name, depth, start and duration in ns."""


def header_line(rank: int, **values: Any) -> bytes:
    header = {"version": 1, "rank": rank, "host": "node1", "names": NAMES, "start_unix_ns": 10**18, "record_bytes": 24}
    return json.dumps({**header, **values}).encode() + b"\n"


def pack(records: Iterable[Record], names: list[str] = NAMES) -> bytes:
    return b"".join(
        struct.pack("<IHHQQ", step, names.index(name), depth, start, duration)
        for step, name, depth, start, duration in records
    )


def write_span_file(run: Path, rank: int, records: Iterable[Record], suffix: str = "", **header: Any) -> Path:
    path = run / "spans" / f"rank-{rank:05d}.spans{suffix}"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(header_line(rank, **header) + pack(records, header.get("names", NAMES)))
    return path


def read_step_times(run_directory: Path) -> dict[int, list[tuple[int, float]]]:
    """(step, milliseconds) of the steps of every rank that has a readable file, by rank."""
    files = {rank: [read_spans(path, rank) for path in paths] for rank, paths in span_files(run_directory).items()}
    return {rank: list(times.items()) for rank, spans in files.items() if (times := step_times(spans))}
