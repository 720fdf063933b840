"""Records spans of one rank and writes them to its span file (spans.py has the format).

A span costs a few microseconds: records are kept in a list, which a thread packs and writes about once a second.
Nothing here can end or change a run: a file that cannot be written disables the recorder with one warning.
"""

import logging
import os
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from queue import Full, Queue
from struct import Struct
from typing import Any

from trainyard.core.errors import one_line
from trainyard.devices.stopwatch import Stopwatch
from trainyard.metrics.spans import DEVICE_NAMES, MAX_FILE_BYTES, NAMES, OLD_SUFFIX, STEP, WAIT, SpanHeader

WRITE_EVERY_NS = 10**9
MAX_RECORDS = 10_000
"""This many records are written before WRITE_EVERY_NS have passed."""
MAX_BLOCKS = 16
"""Blocks that wait for a slow disk; further ones are dropped."""
CLOSE_TIMEOUT_S = 5.0
"""Limit of the wait for a slow disk at the end of a run."""
logger = logging.getLogger(__name__)

pack_record = Struct("<IHHQQ").pack
read_clock_ns = time.perf_counter_ns
SpanRecord = tuple[int, int, int, int, int]
"""Step, index of the name, depth, start and end on the clock of `read_clock_ns`."""
INDEX = {name: index for index, name in enumerate((*NAMES, *DEVICE_NAMES))}


class SpanRecorder:
    """Records what this rank does. Without a file (before `open`, or after a failure) spans cost little and are lost.

    with spans("forward"):
        ...
    """

    def __init__(self) -> None:
        self.step = self.depth = 0
        self.origin_ns = read_clock_ns()
        """Time 0 of the records."""
        self.start_unix_ns = time.time_ns()
        self.records: list[SpanRecord] | None = None
        """Records that are not written yet; None while nothing is recorded."""
        self.writer: SpanWriter | None = None
        self.last_write_ns = self.origin_ns
        self.device_clock: Stopwatch | None = None
        """Reads the clock of a device with a queue."""
        self.device_spans: list[tuple[int, int, Any, Any]] | None = None
        """(name, depth, first reading, last reading) of the step in progress, if the device times it."""
        self.step_start = 0
        self.device_step_start: Any = None
        self.spans = {name: _Span(self, index) for name, index in INDEX.items()}

    def __call__(self, name: str) -> "_Span":
        """A context whose duration is recorded under `name`, one of NAMES. A span is never inside one of its name."""
        return self.spans[name]

    def open(self, path: Path, header: SpanHeader, device_clock: Stopwatch | None = None) -> None:
        """Start to record, in a new file. `device_clock`, if given, times the logged steps on the device."""
        self.writer = SpanWriter(path, header, self.origin_ns)
        if self.writer.is_open:
            self.records, self.device_clock = [], device_clock

    def close(self) -> None:
        """Write what is left, and stop recording."""
        records, self.records = self.records, None
        if self.writer:
            self.writer.close(records or [])

    def begin_step(self, step: int, logged: bool = False) -> None:
        """The step `step` begins. `logged`: its spans are timed on the device, too, if that has its own clock."""
        self.step, self.depth, self.device_spans = step, 1, None
        if logged and self.device_clock:
            self.device_spans, self.device_step_start = [], self.device_clock.read_clock()
        self.step_start = read_clock_ns()

    def end_step(self) -> None:
        """The step ends on the host. Hands the records to the writer from time to time."""
        now, self.depth = read_clock_ns(), 0
        if self.records is None:
            return
        self.records.append((self.step, INDEX[STEP], 0, self.step_start, now))
        if self.device_spans is not None and self.device_clock:
            self.device_spans.append((INDEX[STEP], 0, self.device_step_start, self.device_clock.read_clock()))
        if self.writer and (now - self.last_write_ns > WRITE_EVERY_NS or len(self.records) > MAX_RECORDS):
            self.last_write_ns = now
            self.writer.put(self.records)
            self.records = [] if self.writer.is_open else None

    def place_device_spans(self, synchronize: Callable[[], None]) -> None:
        """Place the device's spans of a logged step, which is complete, on the host's clock. `synchronize` waits for
        the device, which has nothing left to do."""
        spans, self.device_spans = self.device_spans, None
        if not spans or not self.device_clock or self.records is None:
            return
        now_on_device = self.device_clock.read_clock()
        synchronize()
        now = read_clock_ns()
        for index, depth, first, last in spans:
            start = now - int(self.device_clock.seconds_between(first, now_on_device) * 1e9)
            duration = int(self.device_clock.seconds_between(first, last) * 1e9)
            self.records.append((self.step, index + len(NAMES), depth, start, start + max(duration, 0)))

    def compile_callbacks(self) -> tuple[Callable[[], None], Callable[[], None]]:
        """Functions to call when a compilation starts and when it ends, inside whatever span is open."""
        open_spans: list[_Span] = []

        def started() -> None:
            open_spans.append(_Span(self, INDEX["compile"]))
            open_spans[-1].__enter__()

        def ended() -> None:
            if open_spans:
                open_spans.pop().__exit__(None, None, None)

        return started, ended

    def waiting(self, stopwatch: Stopwatch | None, ranks: int) -> Callable[[], AbstractContextManager[object]]:
        """Makes the context in which this rank waits for others: it records a span, and pauses `stopwatch`. One of
        `ranks` = 1 has nobody to wait for."""
        if ranks == 1:
            return nullcontext
        if stopwatch is None:
            return lambda: self.spans[WAIT]
        return lambda: _PausedSpan(self, stopwatch)


class _Span:
    """Records the time between its start and its end. Code that follows a long operator of torch finds cold caches, so
    every instruction here counts."""

    __slots__ = ("depth", "device_start", "index", "recorder", "start")

    def __init__(self, recorder: SpanRecorder, index: int) -> None:
        self.recorder, self.index = recorder, index

    def __enter__(self) -> None:
        recorder = self.recorder
        self.depth = depth = recorder.depth
        recorder.depth = depth + 1
        if recorder.device_spans is not None and recorder.device_clock:
            self.device_start = recorder.device_clock.read_clock()
        self.start = read_clock_ns()

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        end, recorder = read_clock_ns(), self.recorder
        recorder.depth = depth = self.depth
        if recorder.records is not None:
            recorder.records.append((recorder.step, self.index, depth, self.start, end))
        if recorder.device_spans is not None and recorder.device_clock:
            recorder.device_spans.append((self.index, depth, self.device_start, recorder.device_clock.read_clock()))


class _PausedSpan(_Span):
    """A span in which a stopwatch pauses."""

    __slots__ = ("pause",)

    def __init__(self, recorder: SpanRecorder, stopwatch: Stopwatch) -> None:
        super().__init__(recorder, INDEX[WAIT])
        self.pause = stopwatch.paused()

    def __enter__(self) -> None:
        super().__enter__()
        self.pause.__enter__()

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        self.pause.__exit__(None, None, None)
        super().__exit__(kind, error, traceback)


class SpanWriter:
    """Appends blocks of records to a span file, in a thread, and starts a new file when it is full."""

    def __init__(self, path: Path, header: SpanHeader, origin_ns: int) -> None:
        """Begins a new file; the one of an earlier run becomes the old one. `origin_ns` is time 0 of the file."""
        self.path, self.header_line, self.origin_ns = path, header.to_line(), origin_ns
        self.size, self.handle = 0, -1
        self.is_open = True
        """False once a write has failed."""
        self.blocks: Queue[list[SpanRecord] | None] = Queue(MAX_BLOCKS)
        self.thread = threading.Thread(target=self._write_blocks, name="spans", daemon=True)
        try:
            path.parent.mkdir(exist_ok=True)
            self._start_file()
        except OSError as error:
            self._fail(error)
            return
        self.thread.start()

    def put(self, records: list[SpanRecord]) -> None:
        """Write records soon. They are dropped if the disk does not keep up."""
        try:
            self.blocks.put_nowait(records)
        except Full:
            return

    def close(self, records: list[SpanRecord]) -> None:
        """Write the last records and close the file."""
        if not self.is_open:
            return
        self.put(records)
        try:
            self.blocks.put(None, timeout=CLOSE_TIMEOUT_S)
        except Full:
            return
        self.thread.join(CLOSE_TIMEOUT_S)

    def _write_blocks(self) -> None:
        while (records := self.blocks.get()) is not None:
            block = b"".join(
                pack_record(step & 0xFFFFFFFF, index, depth, max(start - self.origin_ns, 0), max(end - start, 0))
                for step, index, depth, start, end in records
            )
            try:
                if self.size + len(block) > MAX_FILE_BYTES:
                    self._start_file()
                self._write(block)
            except OSError as error:
                self._fail(error)
                return
        os.close(self.handle)
        self.handle = -1

    def _start_file(self) -> None:
        if self.handle >= 0:
            os.close(self.handle)
            self.handle = -1
        if self.path.exists():
            os.replace(self.path, self.path.with_name(self.path.name + OLD_SUFFIX))
        self.handle = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        self.size = 0
        self._write(self.header_line)

    def _write(self, data: bytes) -> None:
        self.size += len(data)
        while data:
            data = data[os.write(self.handle, data) :]

    def _fail(self, error: OSError) -> None:
        self.is_open = False
        if self.handle >= 0:
            with suppress(OSError):
                os.close(self.handle)
            self.handle = -1
        logger.warning("%s: cannot be written (%s); this rank records no more spans", self.path, one_line(error))
