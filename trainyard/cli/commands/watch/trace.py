"""`trainyard trace`: Write what each rank did as a Perfetto trace; say which rank waits for which."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from rich.console import Console
from rich.table import Table
from typer import Option

from trainyard.cli.console import print_line, terminal_safe
from trainyard.cli.options import ExistingRun
from trainyard.core.errors import UserError
from trainyard.core.quantities import counted
from trainyard.metrics.span_trace import write_trace
from trainyard.metrics.span_window import RankWindow, WaitSummary, mean_parts, read_window, summarize_waits

MAX_ROWS = 20
MAX_HOST_WIDTH = 24


def trace(
    run: ExistingRun,
    steps: Annotated[
        str, Option(metavar="A:B", help="First and last step, such as 100:150. Default: the last 50.")
    ] = "",
    ranks: Annotated[str, Option(metavar="LIST", help="Ranks, such as 0-3,8. Default: all.")] = "",
    out: Annotated[
        Path | None, Option(metavar="FILE", help="Default: trace-A-B.json.gz in RUN.", show_default=False)
    ] = None,
) -> None:
    """Write what each rank did as a trace for Perfetto (ui.perfetto.dev), and print which rank the others wait for.

    Works while the run trains. The file has one process per host and one track per rank.

    Examples:

      trainyard trace runs/my-run

      trainyard trace runs/my-run --steps 100:150 --ranks 0-7 --out slow.json.gz
    """
    windows = read_window(run, parse_steps(steps) if steps else None, parse_ranks(ranks) if ranks else None)
    first = min(int(window.step.min()) for window in windows)
    last = max(int(window.step.max()) for window in windows)
    path = out or run / f"trace-{first}-{last}.json.gz"
    try:
        spans = write_trace(path, windows)
    except OSError as error:
        raise UserError(f"{path}: cannot be written: {error.strerror}") from None
    console = Console(highlight=False)
    on = f"{counted(len(windows), 'rank')} on {counted(len({window.header.host for window in windows}), 'host')}"
    print_line(console, f"{path}: {spans:,} spans of steps {first} to {last}, {on}; open it at https://ui.perfetto.dev")
    print_parts(console, windows)
    print_waits(console, summarize_waits(windows), windows)


def parse_steps(text: str) -> tuple[int, int]:
    """A:B, A:, :B or A as the first and the last step."""
    match = re.fullmatch(r"(\d{0,10})(:?)(\d{0,10})", text)
    if not match or text == ":" or (not match[2] and match[3]):
        raise UserError(f"--steps {text}: not a range of steps; nearest: 100:150")
    first = int(match[1] or 0)
    last = int(match[3]) if match[3] else first if not match[2] else 2**32 - 1
    if first > last:
        raise UserError(f"--steps {text}: ends before it starts; nearest: {last}:{first}")
    return first, last


def parse_ranks(text: str) -> set[int]:
    """A list of ranks and ranges, such as 0-3,8."""
    ranks: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,6})(?:-(\d{1,6}))?\s*", part)
        if not match or int(match[2] or match[1]) < int(match[1]):
            raise UserError(f"--ranks {text}: not a list of ranks; nearest: 0-3,8")
        ranks |= set(range(int(match[1]), int(match[2] or match[1]) + 1))
    return ranks


def print_parts(console: Console, windows: Sequence[RankWindow]) -> None:
    """Print how long the parts of a step take."""
    step, parts = mean_parts(windows)
    if parts:
        shown = ", ".join(f"{terminal_safe(name)} {value:.1f}" for name, value in parts.items() if value >= 0.05)
        print_line(console, f"a step takes {step:.1f} ms, of which: {shown}")


def print_waits(console: Console, summary: WaitSummary, windows: Sequence[RankWindow]) -> None:
    """Print the waits of each rank, and the rank that was last."""
    if len(windows) == 1:
        return
    if not summary.steps:
        print_line(console, "no step was timed on all ranks, so their waits cannot be compared")
        return
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for heading in ("rank", "host", "step ms", "wait ms", f"last of {summary.steps}"):
        table.add_column(heading, justify="left" if heading == "host" else "right", no_wrap=heading != "host")
    rows = sorted(summary.ranks, key=lambda row: (-row.last_steps, row.wait_ms, row.rank))
    for row in rows[:MAX_ROWS]:
        host = terminal_safe(row.host)[:MAX_HOST_WIDTH]
        table.add_row(str(row.rank), host, f"{row.step_ms:.1f}", f"{row.wait_ms:.1f}", str(row.last_steps))
    console.print(table)
    if len(rows) > MAX_ROWS:
        print_line(console, f"and {counted(len(rows) - MAX_ROWS, 'more rank')}")
    last = summary.last
    if not last:
        print_line(console, "these ranks wait for each other in every layer, so none of them is named as the last")
        return
    hosts = terminal_safe(", ".join(last.hosts[:3]) + (", ..." if len(last.hosts) > 3 else ""))
    ranks = [str(rank) for rank in last.ranks[:8]] + (["..."] if len(last.ranks) > 8 else [])
    subject = f"rank {ranks[0]} ({hosts}) was" if len(ranks) == 1 else f"ranks {', '.join(ranks)} ({hosts}) were"
    print_line(
        console,
        f"{subject} last in {last.steps} of {counted(summary.steps, 'step')}; the others waited "
        f"{last.others_wait_ms:.1f} ms of "
        f"{last.step_ms:.1f} ms",
    )
