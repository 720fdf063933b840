"""Span files: where the time of each rank goes. Their format, and how to read them.

`spans/rank-00003.spans` in a run directory begins with one line of JSON, the header, followed by packed records: step,
name, depth, start and duration. Every rank writes its own file while it trains (span_recorder.py). When a file is full,
or when a resumed run begins a new one, it is renamed to `rank-00003.spans.old`.

Readers take whatever they find: a torn last record, a truncated file and malformed headers are left out.
"""

import json
import re
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

VERSION = 1
DIRECTORY = "spans"
OLD_SUFFIX = ".old"
MAX_FILE_BYTES = 16 << 20
"""Size at which a file is renamed and a new one starts."""
MAX_HEADER_BYTES = 1 << 16
MAX_DURATION_NS = 10**9 * 3600 * 24 * 366
"""A span of more than a year is not one that a run wrote."""

STEP = "step"
"""The outermost span of every step."""
WAIT = "wait"
"""The span in which a rank waits for other ranks: inside a collective."""
DEVICE_PREFIX = "device "
"""Begins the names of spans that a device with a queue has timed with its own clock."""
NAMES = (
    STEP,
    "data wait",
    "forward",
    "backward",
    "forward and backward",
    "backward of weights",
    "pipeline",
    "reduce",
    WAIT,
    "optimizer",
    "compile",
    "log",
    "save",
    "evaluate",
    "samples",
    "rollout",
    "reward",
)
DEVICE_NAMES = tuple(DEVICE_PREFIX + name for name in NAMES)

RECORD = np.dtype([("step", "<u4"), ("name", "<u2"), ("depth", "<u2"), ("start", "<u8"), ("duration", "<u8")])
"""The packed record, also of struct's format `<IHHQQ`. `start` is in ns since the header's start_unix_ns."""
FILE_NAME = re.compile(r"rank-(\d{5,7})\.spans")


@dataclass(frozen=True)
class SpanHeader:
    """The first line of a span file."""

    rank: int
    host: str
    names: tuple[str, ...]
    start_unix_ns: int
    """The host's clock at time 0 of the records."""
    clock_offset_ns: int = 0
    """The clock of rank 0 minus that of this rank, as measured when the run started."""
    clock_error_ns: int = 0
    """Bound of the error of clock_offset_ns."""
    replica: int = 0
    """Ranks with the same number wait for each other in every layer: those of a model replica; under ZeRO-2 and 3,
    all."""
    synchronous: bool = True
    """True if spans of the host contain the work itself; False if the device has a queue, which the host only fills."""

    def to_line(self) -> bytes:
        values = {"version": VERSION, **vars(self), "record_bytes": RECORD.itemsize}
        return json.dumps(values).encode() + b"\n"

    @classmethod
    def from_line(cls, line: bytes, rank: int) -> "SpanHeader | None":
        """Parse the header of the file of `rank`; None if it is malformed. Optional keys may be missing."""
        try:
            values = json.loads(line)
        except (ValueError, RecursionError):
            return None
        if not isinstance(values, dict) or values.get("version") != VERSION:
            return None
        if values.get("record_bytes") != RECORD.itemsize:
            return None
        names, start = values.get("names"), values.get("start_unix_ns")
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            return None
        if not isinstance(start, int) or not _is_int64(start):
            return None
        return cls(
            rank,
            str(values.get("host", "?")),
            tuple(names),
            start,
            _int_or_zero(values.get("clock_offset_ns")),
            _int_or_zero(values.get("clock_error_ns")),
            _int_or_zero(values.get("replica")),
            values.get("synchronous") is not False,
        )


@dataclass(frozen=True)
class RankSpans:
    """Spans of one rank, of one file."""

    header: SpanHeader
    records: np.ndarray[Any, Any] = field(repr=False)
    """An array of RECORD, in the order in which the spans ended."""

    def named(self, name: str) -> np.ndarray[Any, Any]:
        """The records with this name."""
        index = self.header.names.index(name) if name in self.header.names else len(self.header.names)
        return self.records[self.records["name"] == index]

    def first_step(self) -> int | None:
        """The first step of the file; None if it has no complete step. An older file's records of this step, and of
        later ones, are those of a run that was resumed before them."""
        steps = self.named(STEP)["step"]
        return int(steps[0]) if len(steps) else None


def span_path(run_directory: Path, rank: int) -> Path:
    return run_directory / DIRECTORY / f"rank-{rank:05d}.spans"


def span_files(run_directory: Path) -> dict[int, list[Path]]:
    """The files of each rank, oldest first."""
    files: dict[int, list[Path]] = {}
    try:
        entries = sorted((run_directory / DIRECTORY).iterdir())
    except OSError:
        return {}
    for path in entries:
        name = path.name.removesuffix(OLD_SUFFIX)
        if match := FILE_NAME.fullmatch(name):
            files.setdefault(int(match[1]), []).append(path)
    for paths in files.values():
        paths.sort(key=lambda path: not path.name.endswith(OLD_SUFFIX))
    return dict(sorted(files.items()))


def read_spans(path: Path, rank: int, last_bytes: int = MAX_FILE_BYTES) -> RankSpans | None:
    """The spans of a file, or of its last `last_bytes` bytes; None if it is not a span file or cannot be read."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            return None
        with path.open("rb") as file:
            return read_open_spans(file, rank, last_bytes)
    except OSError:
        return None


def read_open_spans(file: BinaryIO, rank: int, last_bytes: int = MAX_FILE_BYTES) -> RankSpans | None:
    """The same of an open file."""
    line = file.readline(MAX_HEADER_BYTES)
    header = SpanHeader.from_line(line, rank) if line.endswith(b"\n") else None
    if header is None:
        return None
    records = (file.seek(0, 2) - len(line)) // RECORD.itemsize
    skipped = max(records - last_bytes // RECORD.itemsize, 0)
    file.seek(len(line) + skipped * RECORD.itemsize)
    content = file.read((records - skipped) * RECORD.itemsize)
    spans = np.frombuffer(content[: len(content) // RECORD.itemsize * RECORD.itemsize], RECORD)
    valid = (spans["name"] < len(header.names)) & (spans["duration"] < MAX_DURATION_NS)
    valid &= spans["start"] < 100 * MAX_DURATION_NS
    return RankSpans(header, spans[valid])


def iter_spans(
    run_directory: Path, ranks: Iterable[int] | None = None, last_bytes: int = MAX_FILE_BYTES
) -> Iterator[RankSpans]:
    """The spans of all files of a run, one file at a time: by rank, and of each rank the oldest first."""
    selected = None if ranks is None else set(ranks)
    for rank, paths in span_files(run_directory).items():
        for path in paths if selected is None or rank in selected else ():
            if spans := read_spans(path, rank, last_bytes):
                yield spans


def step_times(files: Iterable[RankSpans | None]) -> dict[int, float]:
    """Milliseconds of the steps of a rank, by step, from its files, oldest first. Steps that a resumed run repeats, or
    has yet to repeat, count once or not at all."""
    times: dict[int, float] = {}
    for spans in files:
        if spans and (first := spans.first_step()) is not None:
            times = {step: milliseconds for step, milliseconds in times.items() if step < first}
            steps = spans.named(STEP)
            times |= zip(steps["step"].tolist(), (steps["duration"] / 1e6).tolist(), strict=True)
    return dict(sorted(times.items()))


def _int_or_zero(value: object) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and _is_int64(value) else 0


def _is_int64(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and -(2**63) <= value < 2**63
