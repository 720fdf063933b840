"""A plan as a person sees it, in 100 columns."""

import math
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

from trainyard.models import family_of
from trainyard.plan.compare_measured import ComparisonRow
from trainyard.plan.preflight import PlanProblem
from trainyard.plan.report import ConfigChange, Plan
from trainyard.plan.search import LayoutRanking
from trainyard.plan.time.step_time import distinct_pipeline_ranks

TABLE_WIDTH = 100
INDENT = 10
GIB = 2**30
MEMORY_COLUMNS = ("weights", "gradients", "optimizer", "activations", "logits", "buffers", "fragmentation")
AXIS_LABELS = {"tp": "tensor", "cp": "context", "pp": "pipeline", "dp": "data", "all": "all ranks"}
STEP_PART_LABELS = {
    "products": "matrix products",
    "attention": "attention",
    "memory": "other passes over memory",
    "tp": "tensor parallel",
    "cp": "context parallel",
    "pp": "between stages",
    "bubble": "pipeline bubble",
    "dp": "data parallel",
    "update": "update",
    "all": "sums over all ranks",
}


def _console() -> Console:
    return Console(width=TABLE_WIDTH, highlight=False)


def _table(*headings: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for number, heading in enumerate(headings):
        table.add_column(heading, justify="right" if number else "left", no_wrap=True)
    return table


@contextmanager
def count_progress(what: str) -> Iterator[Callable[[int, int], None]]:
    """A bar, in a terminal, that is told how many are done of how many."""
    console = Console(stderr=True)
    columns = (TextColumn(f"[bold]{what}"), BarColumn(bar_width=24), MofNCompleteColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def format_number(value: float) -> str:
    """Three digits that count."""
    if value == 0:
        return "0"
    return f"{value:,.{max(0, 2 - math.floor(math.log10(abs(value))))}f}"


def format_gib(size: float) -> str:
    if 0 < size < GIB / 100:
        return "<0.01"
    return f"{size / GIB:.{1 if size >= GIB / 10 else 2 if size else 0}f}"


def print_plan(plan: Plan, source: str, changes: list[ConfigChange], wrong: list[PlanProblem]) -> None:
    console = _console()

    def say(line: str = "") -> None:
        console.print(Text(textwrap.fill(line, TABLE_WIDTH, subsequent_indent=" " * INDENT)))

    config, layout, on = plan.config, plan.layout, plan.hardware
    weights = family_of(config.model).blueprint(config.model).parameter_count()
    size = f"{weights / 1e9:.2f}B" if weights > 1e9 else f"{weights / 1e6:.1f}M"
    say(f"{source}, {size} weights, on {on.describe()}")
    say(layout.describe())
    if config.layout.ranks and config.layout.ranks != on.ranks:
        say(f"(the file was written for layout.ranks={config.layout.ranks})")
    say()
    say(f"memory of a rank, GiB of {on.memory / GIB:.1f}")
    shown = [name for name in MEMORY_COLUMNS if any(getattr(each, name) for each in plan.stage_memory)]
    table = _table("pipeline ranks", *shown, "total")
    for first, group in distinct_pipeline_ranks(layout).items():
        most = plan.stage_memory[max(group, key=lambda pp: plan.stage_memory[pp].total)]
        name = f"{first}" if len(group) == 1 else f"{first} to {group[-1]}, the most"
        table.add_row(name, *(format_gib(getattr(most, part)) for part in shown), format_gib(most.total))
    console.print(table)
    if plan.traffic:
        say()
        say(f"messages of a step, of a rank{f' of pipeline rank {plan.step_time.slowest_pp}' if layout.pp > 1 else ''}")
        table = _table("axis", "messages", "GiB", "seconds", "hidden")
        for axis, wire in sorted(plan.traffic.items(), key=lambda item: list(AXIS_LABELS).index(item[0])):
            table.add_row(
                AXIS_LABELS[axis],
                f"{wire.messages:,}",
                format_gib(wire.nbytes),
                format_number(wire.seconds),
                f"{wire.overlapped / max(wire.seconds, 1e-12):.0%}",
            )
        console.print(table)
    say()
    table = _table("a step", "seconds", "share")
    for name, words in STEP_PART_LABELS.items():
        if share := plan.step_time.components.get(name, 0.0) / plan.step_time.seconds:
            table.add_row(words, format_number(plan.step_time.components[name]), f"{share:.1%}")
    table.add_row("in all", format_number(plan.step_time.seconds), "")
    console.print(table)
    say()
    _print_cost(plan, say)
    for change in changes:
        gain = f"{change.speedup:.2f} times as fast, " if plan.fits else f"fits, {change.speedup:.2f} times as fast, "
        say(f"  try     {change.overrides}: {gain}{change.memory / GIB:.1f} GiB a rank")
    for problem in wrong:
        say(f"  {'fails ' if problem.fatal else 'note  '}  {problem.message}")


def _print_cost(plan: Plan, say: Callable[[str], None]) -> None:
    cost = plan.cost
    mfu = f"MFU {cost.mfu_full:.1%}" + (f" ({cost.mfu_causal:.1%} causal)" if cost.mfu_full != cost.mfu_causal else "")
    say(
        f"  speed   {cost.tokens_per_second:,.0f} tokens/s, {format_number(cost.sequences_per_second)} sequences/s, {mfu}"
    )
    dollars = (
        "price unknown: --price DOLLARS an hour"
        if cost.dollars is None
        else f"${cost.dollars:,.0f} at ${cost.price_per_hour:,.2f} an hour each"
    )
    say(f"  to end  {plan.config.train.steps:,} steps, {format_number(cost.days)} days, {dollars}")
    say(f"  limit   {plan.bottleneck}")


def print_search(plan: Plan, ranked: LayoutRanking) -> None:
    console = _console()
    console.print(
        Text(
            f"{plan.hardware.describe()}: {ranked.timed_count} layouts timed; the best of each tp, pp and cp that fits"
        )
    )
    table = _table("", "tp", "pp", "vpp", "cp", "dp", "zero", "micro", "recompute", "seconds", "GiB", "tokens/s")
    tokens = plan.config.train.global_batch * plan.config.data.seq_len
    rows = [*ranked.layouts]
    if ranked.file_layout and not any(each.is_file for each in rows):
        rows.append(ranked.file_layout)
    for place, each in enumerate(rows, 1):
        tp, pp, vpp, cp, zero, micro, kind = each.point
        unfit = each.memory > plan.hardware.memory
        name = (
            ("file" if each.is_file else "")
            if place > len(ranked.layouts)
            else f"{place}{' file' if each.is_file else ''}"
        )
        cells = (tp, pp, vpp, cp, each.layout.dp, zero, micro, kind, format_number(each.seconds))
        table.add_row(
            name, *map(str, cells), format_gib(each.memory) + ("!" if unfit else ""), f"{tokens / each.seconds:,.0f}"
        )
    console.print(table)
    best = ranked.layouts[0]
    console.print(Text(f"\nbest: {' '.join(best.overrides(plan.config)) or 'the file as it is'}"), soft_wrap=True)
    if not ranked.file_layout:
        console.print(Text("the file's own layout is not possible on these ranks"))
    elif ranked.file_layout.memory > plan.hardware.memory:
        console.print(
            Text(
                f"the file does not fit: {format_gib(ranked.file_layout.memory)} GiB of {format_gib(plan.hardware.memory)}"
            )
        )
    elif not best.is_file:
        parts = sorted(plan.time_shares.items(), key=lambda item: -item[1])[:3]
        why = ", ".join(f"{STEP_PART_LABELS.get(name, name)} {share:.0%}" for name, share in parts)
        console.print(
            Text(f"the file takes {ranked.file_layout.seconds / best.seconds:.2f} times as long; its step: {why}")
        )


def print_comparison(plan: Plan, rows: list[ComparisonRow]) -> None:
    console = _console()
    console.print(Text(f"{plan.hardware.describe()}; {plan.layout.describe()}"))
    table = _table("", "predicted", "measured", "ratio")
    for row in rows:
        table.add_row(row.name, format_number(row.predicted), format_number(row.measured), f"{row.ratio:.2f}")
    console.print(table)
