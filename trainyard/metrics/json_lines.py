"""The files to which a run appends one JSON object per line: metrics.jsonl, samples.jsonl, events.jsonl.

A reader expects that another process is writing: a last line without a newline is not complete yet. Lines that a crash
cut off, and whatever else is not an object, are left out; a run that resumes also removes them from the file.
"""

import json
import math
from collections import deque
from collections.abc import Callable
from io import FileIO
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from trainyard.core.atomic_files import atomic_file

MAX_LINE_BYTES = 1 << 20
"""A longer line is not one that a run wrote."""
TAIL_RECORDS = 256
"""Last records of a file that `repair_json_lines` returns."""
NOT_FINITE = ("nan", "inf", "-inf")
"""The text that a run writes for a number that JSON does not have."""


class JsonLines(NamedTuple):
    """Complete lines of a file, and where to read on."""

    records: list[dict[str, Any]]
    next_offset: int


def read_json_lines(path: Path, offset: int = 0, max_bytes: int | None = None) -> JsonLines:
    """The records from byte `offset` on, of at most `max_bytes` bytes; none if there is no such file.

    A file that is now shorter than `offset`, because a resumed run dropped its end, is read from its start.
    """
    try:
        with path.open("rb") as file:
            return read_open_file(file, offset, max_bytes)
    except OSError:
        return JsonLines([], 0)


def read_open_file(file: BinaryIO, offset: int = 0, max_bytes: int | None = None) -> JsonLines:
    """The records of an open file, as `read_json_lines` returns them."""
    if file.seek(0, 2) < offset:
        offset = 0
    file.seek(offset)
    content = file.read(-1 if max_bytes is None else max_bytes)
    complete, newline, _ = content.rpartition(b"\n")
    if not newline and len(content) > MAX_LINE_BYTES:
        return JsonLines([], offset + len(content))
    return JsonLines(parse_lines(complete), offset + len(complete) + len(newline))


def parse_lines(content: bytes) -> list[dict[str, Any]]:
    """The objects of complete lines."""
    lines = content.splitlines()
    if len(lines) > 1 and len(content) <= MAX_LINE_BYTES:
        # Parsing many lines at once takes half the time. If anything is wrong with one, each is parsed on its own.
        try:
            records = json.loads(b"[" + b",".join(lines) + b"]")
        except (ValueError, RecursionError):
            records = []
        if len(records) == len(lines) and all(isinstance(record, dict) for record in records):
            return records
    return [record for line in lines if (record := _parse(line)) is not None]


def _parse(line: bytes) -> dict[str, Any] | None:
    if len(line) > MAX_LINE_BYTES:
        return None
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None


def as_number(value: Any) -> float | None:
    """A number of a record, also one that is not finite; None for anything else."""
    if isinstance(value, str):
        return float(value) if value in NOT_FINITE else None
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return value if isinstance(value, float) or abs(value) < 2**1000 else None  # a larger int is no float


def to_finite(value: Any) -> float | None:
    number = as_number(value)
    return float(number) if number is not None and math.isfinite(number) else None


def to_count(value: Any) -> int | None:
    """A step or another count; None if it is not one that JavaScript can hold exactly."""
    number = to_finite(value)
    return int(number) if number is not None and 0 <= number < 2**53 else None


class JsonLinesWriter:
    """Appends records to a file, which the first record creates. A record is one write, so that a kill rarely cuts it
    off and a reader rarely sees part of it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.file: FileIO | None = None

    def write(self, *records: dict[str, Any]) -> None:
        if self.file is None:
            self.file = FileIO(self.path, "a")
        for record in records:
            line = json.dumps({name: to_json(value) for name, value in record.items()}).encode() + b"\n"
            while line:
                line = line[self.file.write(line) :]

    def close(self) -> None:
        if self.file:
            self.file.close()
            self.file = None


def to_json(value: Any) -> Any:
    """Non-finite numbers as text, since JSON has no NaN."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def repair_json_lines(path: Path, keep: Callable[[dict[str, Any]], bool]) -> list[dict[str, Any]]:
    """Remove what is not a complete record with a `step`, and records that `keep` rejects, from a file, if it exists.
    Returns the last records that stay.

    A last line that lacks only its newline is complete.
    """
    if not path.is_file():
        return []
    tail: deque[dict[str, Any]] = deque(maxlen=TAIL_RECORDS)
    is_damaged = False
    with path.open("rb") as file:
        for line in file:
            if (record := _record_with_step(line)) is not None and keep(record):
                tail.append(record)
                is_damaged |= not line.endswith(b"\n")
            else:
                is_damaged = True
    if is_damaged:
        with path.open("rb") as file, atomic_file(path) as repaired:
            for line in file:
                if (record := _record_with_step(line)) is not None and keep(record):
                    repaired.write(line.rstrip(b"\n") + b"\n")
    return list(tail)


def _record_with_step(line: bytes) -> dict[str, Any] | None:
    try:
        record: dict[str, Any] = json.loads(line)
        float(record["step"])
    except (ValueError, LookupError, TypeError, RecursionError):
        return None
    return record
