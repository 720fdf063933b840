"""Tables of `trainyard tune`: a live table in a terminal, one plain line per trial elsewhere."""

import shlex
import time
from datetime import datetime, timedelta
from importlib.metadata import version
from io import StringIO

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from trainyard import devices
from trainyard.core.quantities import counted
from trainyard.preflight.tune.search import TuneSearch
from trainyard.preflight.tune.trial import Choice, Trial

COLUMNS = ("trial", "changes", "speed", "ratio", "memory", "first step", "total", "state")
LEFT_ALIGNED = ("changes", "state")
LABELED_COLUMNS = ("trial", "first step", "total")
"""Columns that plain lines prefix with their heading."""


class TuneTable:
    """Shows the trials while the search runs."""

    def __init__(self, console: Console, search: TuneSearch, budget_s: float) -> None:
        self.console, self.search = console, search
        self.running_choice: Choice | None = None
        self.trial_started_at = time.monotonic()
        self.deadline = self.trial_started_at + budget_s
        live = Live(get_renderable=self.render, console=console, refresh_per_second=2, transient=True)
        self.live = live if console.is_terminal else None

    def on_trial_start(self, choice: Choice) -> None:
        self.running_choice, self.trial_started_at = choice, time.monotonic()

    def on_trial_end(self, trial: Trial) -> None:
        self.running_choice = None
        if not self.live:
            cells = zip(COLUMNS, trial_cells(self.search, trial), strict=True)
            line = " | ".join(f"{name} {cell}" if name in LABELED_COLUMNS else cell for name, cell in cells if cell)
            self.console.print(line, soft_wrap=True, markup=False)

    def render(self) -> Group:
        now = time.monotonic()
        table = trials_table(self.search)
        if self.running_choice is not None:
            running = Trial(self.running_choice, "running", now - self.trial_started_at)
            table.add_row(*map(Text, trial_cells(self.search, running)), style="dim")
        left = timedelta(seconds=max(round(self.deadline - now), 0))
        return Group(table, Text(f"{left} of the budget left; Ctrl-C ends the search and keeps the best so far"))


def trial_cells(search: TuneSearch, trial: Trial) -> list[str]:
    """Return the cells of a trial, one per column."""
    number = next((index for index, other in enumerate(search.trials) if other is trial), len(search.trials))
    finished = number < len(search.trials)
    trials = search.trials if finished else [*search.trials, trial]
    baseline, speed, state = trials[0].tokens_per_second, trial.tokens_per_second, trial.outcome
    if finished and speed and speed >= search.best_speed:
        state = "best" if trial.choice == search.best_choice else "gains under 1%"
    return [
        str(number + 1),
        " ".join(search.space.overrides(trial.choice)) or ("unchanged again" if number else "unchanged"),
        f"{speed:,.0f} tokens/s" if speed else "",
        f"{speed / baseline:.2f}x" if speed and baseline else "",
        f"{trial.peak_bytes / 2**30:.2f} GiB" if trial.peak_bytes else "",
        f"{trial.first_step_seconds:.1f} s" if speed else "",
        f"{trial.seconds:.0f} s",
        state,
    ]


def trials_table(search: TuneSearch, by_speed: bool = False) -> Table:
    """Return all trials in order, or the fastest first; the best so far in bold."""
    table = Table(box=None, pad_edge=False)
    for heading in COLUMNS:
        left = heading in LEFT_ALIGNED
        table.add_column(heading, justify="left" if left else "right", no_wrap=not left)
    for trial in sorted(search.trials, key=lambda trial: -trial.tokens_per_second) if by_speed else search.trials:
        cells = trial_cells(search, trial)
        table.add_row(*map(Text, cells), style="bold" if cells[-1] == "best" else None)
    return table


def file_header(search: TuneSearch, arguments: list[str], nproc: int) -> str:
    """Return YAML comments that say where the file comes from and what was measured."""
    space, text = search.space, StringIO()
    Console(file=text, width=160).print(trials_table(search, by_speed=True))
    device = devices.select(space.base_config.device.name).describe()
    lines = [
        f"{shlex.join(['trainyard', 'tune', *arguments])}: the complete configuration with the fastest settings tried",
        f"overrides: {' '.join(space.overrides(search.best_choice)) or 'none'}",
        f"{datetime.now():%Y-%m-%d %H:%M}; {device}; {counted(nproc, 'rank')}; torch {version('torch')}; "
        f"steps of {space.trial_batch} x {space.base_config.data.seq_len} tokens",
        *text.getvalue().splitlines(),
    ]
    return "".join(f"# {line}".rstrip() + "\n" for line in lines)
