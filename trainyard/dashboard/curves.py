"""Curves of runs, read from metrics.jsonl as it grows.

A large file is first shown by lines sampled over its whole length, while a thread reads all of it. After that only new
lines are read. The tables of the runs that were shown last stay in memory, up to a limit.
"""

import os
import queue
import threading
import time
from collections import OrderedDict
from typing import Any

from trainyard.dashboard.metrics_table import MetricsTable
from trainyard.dashboard.run_files import RunDirectoryReader
from trainyard.dashboard.run_summary import tokens_per_sample
from trainyard.metrics.json_lines import MAX_LINE_BYTES, parse_lines

CHUNK_BYTES = 1 << 18
"""Bytes parsed at a time: other requests are answered in between."""
DIRECT_BYTES = 1 << 21
"""Up to this many new bytes are read within the request."""
START_DELAY_S = 0.5
"""Before a large file is read: the answers that the dashboard needs at its start come first."""
SAMPLED_LINES = 400
SAMPLE_BYTES = 1 << 12
MAX_EVALUATIONS_SENT = 1000
MAX_CACHE_BYTES = 200 << 20
"""Memory of the tables of all runs; beyond that, those that were not shown for longest are dropped."""


class RunCurves:
    """The table of one run, and how far its file has been read."""

    def __init__(self, run: RunDirectoryReader, generation: int) -> None:
        self.run, self.generation = run, generation
        """The generation changes when rows that a client has may have changed."""
        self.table = MetricsTable(tokens_per_sample(run))
        self.offset = 0
        self.inode = 0
        self.lock = threading.Lock()
        self.queued = False
        self.sampled: MetricsTable | None = None
        """Lines of the file as it was when it was first asked for, until all of it is read."""

    def read_on(self, max_bytes: int) -> int:
        """Read up to `max_bytes` new bytes, a chunk at a time. Returns the bytes that are left to read."""
        with self.lock:
            state = self.run.state("metrics.jsonl")
            if state is None:
                self._restart(0)
                return 0
            if state.inode != self.inode or state.size < self.offset:
                self._restart(state.inode)
            end = min(self.offset + max_bytes, state.size)
            while self.offset < end:
                before = self.offset
                found = self.run.read_json_lines("metrics.jsonl", offset=before, max_bytes=CHUNK_BYTES)
                if found.next_offset <= before and state.size - before > CHUNK_BYTES:  # a very long line
                    limit = MAX_LINE_BYTES + CHUNK_BYTES
                    found = self.run.read_json_lines("metrics.jsonl", offset=before, max_bytes=limit)
                if found.next_offset <= before:  # the last line is not complete yet
                    return 0
                self._append(found.records)
                self.offset = found.next_offset
            return max(state.size - self.offset, 0)

    def _append(self, records: list[dict[str, Any]]) -> None:
        before = self.table.thinned, len(self.table.names)
        self.table.append(records)
        self.generation += (self.table.thinned, len(self.table.names)) != before

    def _restart(self, inode: int) -> None:
        """Read the file from its start: a resumed run has rewritten it."""
        self.inode, self.offset = inode, 0
        if self.table.count or self.table.evaluations:
            self.generation += 1
        self.table = MetricsTable(tokens_per_sample(self.run))

    def unread_bytes(self) -> int:
        state = self.run.state("metrics.jsonl")
        if state is None:
            return 0
        return state.size - self.offset if state.inode == self.inode and state.size >= self.offset else state.size

    def sample(self) -> MetricsTable:
        self.sampled = self.sampled or self._sample()
        return self.sampled

    def _sample(self) -> MetricsTable:
        """A table of lines at equal distances in the file, and of all of its last ones."""
        table = MetricsTable(tokens_per_sample(self.run))
        try:
            with self.run.open("metrics.jsonl") as file:
                size = file.seek(0, os.SEEK_END)
                for index in range(SAMPLED_LINES):
                    start = size * index // SAMPLED_LINES
                    file.seek(start)
                    lines = file.read(SAMPLE_BYTES).split(b"\n")[1 if start else 0 : -1]
                    table.append(parse_lines(lines[0]) if lines else [])
        except OSError:
            pass
        table.append(parse_lines(self.run.read_tail(SAMPLE_BYTES, "metrics.jsonl").rpartition(b"\n")[0]))
        return table


class CurveStore:
    """The curves of the runs that were asked for last."""

    def __init__(self) -> None:
        self._curves: OrderedDict[str, RunCurves] = OrderedDict()
        self._lock = threading.Lock()
        self._generation = 0
        self._queue: queue.SimpleQueue[RunCurves | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def curves(
        self,
        run: RunDirectoryReader,
        buckets: int,
        axis: str = "step",
        low: float | None = None,
        high: float | None = None,
        after: int | None = None,
        generation: int | None = None,
        only_complete: bool = False,
    ) -> dict[str, Any]:
        """The selection of a run's rows as JSON. With `after` and the current `generation`, only the rows that follow
        the first `after` ones (`is_addition`); with `only_complete`, no rows before all of the file is read."""
        found = self._get(run)
        unread = found.unread_bytes()
        if unread <= DIRECT_BYTES:
            found.read_on(DIRECT_BYTES)
            found.sampled = None
            is_complete = True
        else:
            is_complete = False
            self._read_in_background(found)
        with found.lock:
            table = found.table
            answer: dict[str, Any] = {
                "generation": found.generation,
                "count": table.count,
                "is_complete": is_complete,
                "progress": 1.0 if is_complete else round(found.offset / max(found.offset + unread, 1), 3),
            }
            if is_complete and after is not None and generation == found.generation and (low, high) == (None, None):
                new = table.count - after
                if 0 <= new <= 2 * buckets:
                    return answer | table.select_after(after) | _evaluations(table) | {"is_addition": True}
            if is_complete:
                return answer | table.select(buckets, axis, low, high) | _evaluations(table)
        if only_complete:
            return answer | {"generation": -1}
        sampled = found.sample()
        return answer | sampled.select(buckets, axis, low, high) | _evaluations(sampled) | {"generation": -1}

    def read_all(self, run: RunDirectoryReader) -> None:
        """Read the complete file now."""
        found = self._get(run)
        while found.read_on(DIRECT_BYTES):
            pass

    def close(self) -> None:
        self._queue.put(None)

    def _get(self, run: RunDirectoryReader) -> RunCurves:
        with self._lock:
            found = self._curves.pop(run.name, None)
            if found is None:
                self._generation += 1_000_000
                found = RunCurves(run, self._generation)
            self._curves[run.name] = found
            used = 0
            for name in list(reversed(self._curves)):
                used += self._curves[name].table.nbytes
                if used > MAX_CACHE_BYTES and name != run.name:
                    del self._curves[name]
            return found

    def _read_in_background(self, curves: RunCurves) -> None:
        with self._lock:
            if curves.queued:
                return
            curves.queued = True
            if self._thread is None:
                self._thread = threading.Thread(target=self._read_queued, name="curves", daemon=True)
                self._thread.start()
        self._queue.put(curves)

    def _read_queued(self) -> None:
        while curves := self._queue.get():
            if not curves.offset:
                time.sleep(START_DELAY_S)
            left = curves.read_on(8 * CHUNK_BYTES)
            if left > DIRECT_BYTES:
                self._queue.put(curves)  # the others take their turns
            else:
                curves.queued = False


def _evaluations(table: MetricsTable) -> dict[str, Any]:
    stride = -(-len(table.evaluations) // MAX_EVALUATIONS_SENT) or 1
    return {
        "evaluations": [{"step": step, **values} for step, values in table.evaluations[::stride]],
        "not_finite": [{"step": step, "reason": reason} for step, reason in table.not_finite.items()],
    }
