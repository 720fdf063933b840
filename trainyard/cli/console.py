"""What long commands share: progress, as a bar in a terminal and as plain lines elsewhere, and an orderly end."""

import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from textwrap import TextWrapper
from typing import Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from trainyard.core.errors import UserError
from trainyard.core.quantities import size_text
from trainyard.core.world import World
from trainyard.remote.location import is_url

PROGRESS_INTERVAL_S = 10.0
"""Seconds between plain progress lines."""
RATE_WINDOW_S = 30.0
"""Seconds of progress from which the time left is computed."""
SAMPLE_INTERVAL_S = 0.5
STALL_S = 5.0
"""Seconds without progress after which no time left is shown."""
PHASE_INTERVAL_S = 2.0
MAX_SKIPS_SHOWN = 20
"""Skipped records that are printed; further ones are only counted."""


def print_line(console: Console, line: str, style: str = "") -> None:
    """Print one line that is not interpreted as markup. A terminal wraps it between words, a file has it as it is."""
    if console.is_terminal:
        wrapper = TextWrapper(console.width, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False)
        line = wrapper.fill(line)
    console.print(line, style=style, soft_wrap=True, highlight=False, markup=False)


def terminal_safe(text: str, encoding: str = "utf-8") -> str:
    """Text from a model on one line: control characters, and what the terminal cannot encode, become escapes."""
    escaped = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    return escaped.encode(encoding, "backslashreplace").decode(encoding)


class SkipReporter:
    """Prints each record that could not be read; with `strict`, the first one raises UserError."""

    def __init__(self, strict: bool) -> None:
        self.strict, self.count = strict, 0

    def __call__(self, problem: object) -> None:
        if self.strict:
            raise UserError(str(problem))
        self.count += 1
        if self.count <= MAX_SKIPS_SHOWN:
            print(f"skipped: {problem}", file=sys.stderr)
        if self.count == MAX_SKIPS_SHOWN + 1:
            print("further skipped records are only counted", file=sys.stderr)


class ProgressDisplay:
    """Progress in bytes or items: `with ProgressDisplay("pack") as progress: progress.update(done, total, "3 files")`.

    The bar is drawn by a thread that starts with the first update (of items: with the first item that is done). Fork
    worker processes before it.
    """

    def __init__(self, label: str, items: bool = False) -> None:
        self.label, self.items = label, items
        self.last_printed = self.last_change = time.monotonic()
        self.done = -1
        self.samples: deque[tuple[float, int]] = deque()
        """Time and progress, of the last RATE_WINDOW_S seconds."""
        amounts: list[ProgressColumn] = [MofNCompleteColumn(), TimeElapsedColumn()]
        if not items:
            details = TextColumn("{task.fields[details]}")
            amounts = [DownloadColumn(binary_units=True), TimeRemainingColumn(), details]
        console = Console(stderr=True, highlight=False)
        columns = [TextColumn(f"[bold]{label}"), BarColumn(bar_width=24), *amounts]
        self.bar = Progress(*columns, console=console, transient=items) if console.is_terminal else None
        self.task = self.bar.add_task(label, total=None, details="") if self.bar else TaskID(0)

    def __enter__(self) -> Self:
        return self

    def update(self, done: int, total: int, details: str = "") -> None:
        """Show `done` of `total`."""
        now = time.monotonic()
        if done != self.done:
            self.done, self.last_change = done, now
        if not self.samples or now - self.samples[-1][0] >= SAMPLE_INTERVAL_S:
            self.samples.append((now, done))
        while len(self.samples) > 1 and now - self.samples[1][0] >= RATE_WINDOW_S:
            self.samples.popleft()
        start, first = self.samples[0]
        rate = (done - first) / max(now - start, 1e-9)
        stalled = f"no progress for {now - self.last_change:.0f} s" if now - self.last_change >= STALL_S else ""
        if self.bar:
            if done or not self.items:
                self.bar.start()
            details = stalled or details or (f"{size_text(rate)}/s" if rate else "")
            self.bar.update(self.task, completed=done, total=total, details=details)
            return
        if now - self.last_printed >= PROGRESS_INTERVAL_S:
            self.last_printed = now
            line = f"{done} of {total} {self.label}"
            if not self.items:
                left = f"{timedelta(seconds=round((total - done) / rate))} left" if rate else "? left"
                parts = f"{self.label}: {done / max(total, 1):.1%}", stalled or left, details or f"{size_text(rate)}/s"
                line = ", ".join(parts)
            print(line, file=sys.stderr, flush=True)

    def __exit__(self, *error: object) -> None:
        if self.bar:
            self.bar.stop()


class PhaseDisplay:
    """Prints a line for each phase of a command that takes longer than two seconds:
    `with PhaseDisplay() as report: report("waiting for nodes")`."""

    def __init__(self) -> None:
        self.phase = self.printed = ""
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self._print_phases, daemon=True)

    def __enter__(self) -> Self:
        self.thread.start()
        return self

    def __call__(self, phase: str) -> None:
        self.phase = phase

    def _print_phases(self) -> None:
        while not self.ended.wait(PHASE_INTERVAL_S):
            if self.phase != self.printed:
                self.printed = self.phase
                print(f"trainyard: {self.printed}", file=sys.stderr, flush=True)

    def __exit__(self, *error: object) -> None:
        self.ended.set()
        self.thread.join()


def prefetch_weights(source: str, world: World) -> None:
    """Download a model that is on the Hub or the web. The first rank of each host shows it."""
    from trainyard.remote.local_copies import is_remote_model, local_weights  # the clients of all stores

    if not is_remote_model(source):
        return
    if world.local_rank:
        local_weights(source)
        return
    with ProgressDisplay("download") as progress:
        local_weights(source, progress.update)


def fetch_inputs(inputs: Sequence[str]) -> list[str]:
    """Local paths of data inputs; those at URLs are downloaded into the caches."""
    if not any(map(is_url, inputs)):
        return list(inputs)
    from trainyard.remote.local_copies import local_inputs

    with ProgressDisplay("download") as progress:
        return local_inputs(inputs, progress.update)


@contextmanager
def interrupt_on_terminate() -> Iterator[None]:
    """Turn SIGTERM into KeyboardInterrupt, so that a terminated command removes its partial output like Ctrl-C does."""
    previous = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
