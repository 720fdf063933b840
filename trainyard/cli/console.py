"""Long work on data as a person sees it: a bar with the time left in a terminal, now and then a line elsewhere."""

import sys
import time
from datetime import timedelta
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from trainyard.core.errors import UserError

EVERY = 10.0
"""Seconds between plain lines."""
SHOWN = 20
"""What cannot be read is told up to so many times, and counted beyond."""


class Skips:
    """Tells what could not be read, in a line each; where that is fatal, the first ends the work."""

    def __init__(self, strict: bool) -> None:
        self.strict, self.count = strict, 0

    def __call__(self, what: object) -> None:
        if self.strict:
            raise UserError(str(what))
        self.count += 1
        if self.count <= SHOWN:
            print(f"skipped: {what}", file=sys.stderr)
        if self.count == SHOWN + 1:
            print("more is skipped and counted", file=sys.stderr)


class Screen:
    """`with Screen("tokenize") as screen: ... screen.show(bytes done, bytes in all, "words")`."""

    def __init__(self, what: str) -> None:
        self.what = what
        self.console = Console(stderr=True, highlight=False)
        self.start = self.said = time.monotonic()
        self.first: int | None = None
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

    def show(self, done: int, total: int, words: str = "") -> None:
        """Bytes read so far and in all. Threads start with the first call: start worker processes before it."""
        if self.first is None:
            self.first = done
            if self.bar:
                self.bar.start()
        if self.bar:
            self.bar.update(self.task, completed=done, total=total, words=words)
            return
        now = time.monotonic()
        if now - self.said >= EVERY:
            self.said = now
            rate = (done - self.first) / (now - self.start)
            left = timedelta(seconds=round((total - done) / rate)) if rate else "?"
            print(f"{self.what}: {done / max(total, 1):.1%}, {left} left, {words}", file=sys.stderr, flush=True)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self.bar:
            self.bar.stop()
