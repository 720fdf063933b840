"""Appends to the files of a run that hold one JSON object per line, and repairs them when the run resumes."""

import json
import math
from collections import deque
from collections.abc import Callable
from io import FileIO
from pathlib import Path
from typing import Any

from trainyard.core.atomic_files import atomic_file

TAIL_RECORDS = 256
"""Last records of a file that `repair_json_lines` returns."""


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
    tail: deque[dict[str, Any]] = deque(maxlen=TAIL_RECORDS)
    if not path.is_file():
        return []
    dropped = False
    with path.open("rb") as file:
        for line in file:
            record = _parse(line)
            if record is None or not keep(record) or not line.endswith(b"\n"):
                dropped = True
            if record is not None and keep(record):
                tail.append(record)
    if dropped:
        with path.open("rb") as file, atomic_file(path) as repaired:
            for line in file:
                record = _parse(line)
                if record is not None and keep(record):
                    repaired.write(line.rstrip(b"\n") + b"\n")
    return list(tail)


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
        float(record["step"])
    except (ValueError, LookupError, TypeError, RecursionError):
        return None
    return record if isinstance(record, dict) else None
