"""Output of long commands: a progress bar in a terminal, an occasional plain line elsewhere."""

import sys
import time
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

PROGRESS_INTERVAL_S = 10.0
"""Seconds between plain progress lines."""
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
        self.started_at = self.last_printed = time.monotonic()
        self.initial: int | None = None
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
        if self.bar:
            if done or not self.items:
                self.bar.start()
            self.bar.update(self.task, completed=done, total=total, details=details)
            return
        self.initial = done if self.initial is None else self.initial
        now = time.monotonic()
        if now - self.last_printed >= PROGRESS_INTERVAL_S:
            self.last_printed = now
            line = f"{done} of {total} {self.label}"
            if not self.items:
                rate = (done - self.initial) / (now - self.started_at)
                left = timedelta(seconds=round((total - done) / rate)) if rate else "?"
                line = f"{self.label}: {done / max(total, 1):.1%}, {left} left, {details}"
            print(line, file=sys.stderr, flush=True)

    def __exit__(self, *error: object) -> None:
        if self.bar:
            self.bar.stop()
