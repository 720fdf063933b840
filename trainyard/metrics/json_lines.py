"""Reads the files to which a run appends one JSON object per line: metrics.jsonl, samples.jsonl, events.jsonl.

Another process may be writing: a last line without a newline is not complete yet. Lines that a crash cut off, and
whatever else is not an object, are left out.
"""

import json
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

MAX_LINE_BYTES = 1 << 20
"""A longer line is not one that a run wrote."""


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
