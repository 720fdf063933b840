"""Progress output of long commands: a bar in a terminal, an occasional plain line elsewhere."""

import sys
import time
from datetime import timedelta
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from trainyard.core.errors import UserError

PROGRESS_INTERVAL_S = 10.0
"""Seconds between plain progress lines."""
MAX_SKIPS_SHOWN = 20
"""Skipped records that are printed; further ones are only counted."""


def print_dim(console: Console, line: str) -> None:
    """Print a secondary message on one line, without interpreting markup."""
    console.print(line, style="dim", soft_wrap=True, markup=False)


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
    """Progress in bytes: `with ProgressDisplay("pack") as progress: progress.update(done, total, "5 documents")`."""

    def __init__(self, label: str) -> None:
        self.label = label
        self.console = Console(stderr=True, highlight=False)
        self.started_at = self.last_printed = time.monotonic()
        self.initial_bytes: int | None = None
        self.bar: Progress | None = None
        if self.console.is_terminal:
            self.bar = Progress(
                TextColumn(f"[bold]{label}"),
                BarColumn(bar_width=24),
                DownloadColumn(binary_units=True),
                TimeRemainingColumn(),
                TextColumn("{task.fields[details]}"),
                console=self.console,
            )
            self.task = self.bar.add_task(label, total=None, details="")

    def __enter__(self) -> Self:
        return self

    def update(self, done: int, total: int, details: str = "") -> None:
        """Show `done` of `total` bytes. The first call starts a thread: fork worker processes before it."""
        if self.initial_bytes is None:
            self.initial_bytes = done
            if self.bar:
                self.bar.start()
        if self.bar:
            self.bar.update(self.task, completed=done, total=total, details=details)
            return
        now = time.monotonic()
        if now - self.last_printed >= PROGRESS_INTERVAL_S:
            self.last_printed = now
            rate = (done - self.initial_bytes) / (now - self.started_at)
            left = timedelta(seconds=round((total - done) / rate)) if rate else "?"
            print(f"{self.label}: {done / max(total, 1):.1%}, {left} left, {details}", file=sys.stderr, flush=True)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self.bar:
            self.bar.stop()


class CountDisplay:
    """Progress in items: `with CountDisplay("traces") as progress: progress.update(done, total)`."""

    def __init__(self, label: str) -> None:
        self.label = label
        console = Console(stderr=True, highlight=False)
        self.bar: Progress | None = None
        if console.is_terminal:
            columns = TextColumn(f"[bold]{label}"), BarColumn(bar_width=24), MofNCompleteColumn(), TimeElapsedColumn()
            self.bar = Progress(*columns, console=console, transient=True)
            self.task = self.bar.add_task(label, total=None)
        self.last_printed = time.monotonic()

    def __enter__(self) -> Self:
        return self

    def update(self, done: int, total: int) -> None:
        """Show `done` of `total` items. The first item starts a thread: fork worker processes before it."""
        if self.bar and done:
            self.bar.start()
            self.bar.update(self.task, completed=done, total=total)
        elif not self.bar and time.monotonic() - self.last_printed >= PROGRESS_INTERVAL_S:
            self.last_printed = time.monotonic()
            print(f"{done} of {total} {self.label}", file=sys.stderr, flush=True)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self.bar:
            self.bar.stop()
