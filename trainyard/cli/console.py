"""Long work on data as a person sees it: a bar with the time left in a terminal, now and then a line elsewhere."""

import sys
import time
from datetime import timedelta
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from trainyard.core.errors import UserError

PROGRESS_INTERVAL_S = 10.0
"""Seconds between plain lines."""
MAX_SKIPS_SHOWN = 20
"""What cannot be read is told up to so many times, and counted beyond."""


class SkipReporter:
    """Tells what could not be read, in a line each; where that is fatal, the first ends the work."""

    def __init__(self, strict: bool) -> None:
        self.strict, self.count = strict, 0

    def __call__(self, what: object) -> None:
        if self.strict:
            raise UserError(str(what))
        self.count += 1
        if self.count <= MAX_SKIPS_SHOWN:
            print(f"skipped: {what}", file=sys.stderr)
        if self.count == MAX_SKIPS_SHOWN + 1:
            print("more is skipped and counted", file=sys.stderr)


class ProgressDisplay:
    """`with Screen("tokenize") as screen: ... screen.show(bytes done, bytes in all, "words")`."""

    def __init__(self, what: str) -> None:
        self.label = what
        self.console = Console(stderr=True, highlight=False)
        self.started_at = self.last_printed = time.monotonic()
        self.initial_bytes: int | None = None
        self.bar: Progress | None = None
        if self.console.is_terminal:
            self.bar = Progress(
                TextColumn(f"[bold]{what}"),
                BarColumn(bar_width=24),
                DownloadColumn(binary_units=True),
                TimeRemainingColumn(),
                TextColumn("{task.fields[words]}"),
                console=self.console,
            )
            self.task = self.bar.add_task(what, total=None, words="")

    def __enter__(self) -> Self:
        return self

    def update(self, done: int, total: int, words: str = "") -> None:
        """Bytes read so far and in all. Threads start with the first call: start worker processes before it."""
        if self.initial_bytes is None:
            self.initial_bytes = done
            if self.bar:
                self.bar.start()
        if self.bar:
            self.bar.update(self.task, completed=done, total=total, words=words)
            return
        now = time.monotonic()
        if now - self.last_printed >= PROGRESS_INTERVAL_S:
            self.last_printed = now
            rate = (done - self.initial_bytes) / (now - self.started_at)
            left = timedelta(seconds=round((total - done) / rate)) if rate else "?"
            print(f"{self.label}: {done / max(total, 1):.1%}, {left} left, {words}", file=sys.stderr, flush=True)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self.bar:
            self.bar.stop()
