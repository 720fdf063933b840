"""A plan as a person sees it, in 100 columns."""

import math
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

from trainyard.models import family
from trainyard.plan.compare_measured import Row
from trainyard.plan.preflight import Problem
from trainyard.plan.report import Change, Plan
from trainyard.plan.search import Search
from trainyard.plan.time.step_time import distinct

WIDTH = 100
INDENT = 10
GIB = 2**30
MEMORY = ("weights", "gradients", "optimizer", "activations", "logits", "buffers", "fragmentation")
AXES = {"tp": "tensor", "cp": "context", "pp": "pipeline", "dp": "data", "all": "all ranks"}
PARTS = {
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
    return Console(width=WIDTH, highlight=False)


def _table(*headings: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for number, heading in enumerate(headings):
        table.add_column(heading, justify="right" if number else "left", no_wrap=True)
    return table


@contextmanager
def counting(what: str) -> Iterator[Callable[[int, int], None]]:
    """A bar, in a terminal, that is told how many are done of how many."""
    console = Console(stderr=True)
    columns = (TextColumn(f"[bold]{what}"), BarColumn(bar_width=24), MofNCompleteColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def number(value: float) -> str:
    """Three digits that count."""
    if value == 0:
        return "0"
    return f"{value:,.{max(0, 2 - math.floor(math.log10(abs(value))))}f}"


def gib(size: float) -> str:
    if 0 < size < GIB / 100:
        return "<0.01"
    return f"{size / GIB:.{1 if size >= GIB / 10 else 2 if size else 0}f}"


def show_plan(plan: Plan, source: str, changes: list[Change], wrong: list[Problem]) -> None:
    console = _console()

    def say(line: str = "") -> None:
        console.print(Text(textwrap.fill(line, WIDTH, subsequent_indent=" " * INDENT)))

    config, layout, on = plan.config, plan.layout, plan.on
    weights = family(config.model).blueprint(config.model).parameters()
    size = f"{weights / 1e9:.2f}B" if weights > 1e9 else f"{weights / 1e6:.1f}M"
    say(f"{source}, {size} weights, on {on.describe()}")
    say(layout.describe())
    if config.layout.ranks and config.layout.ranks != on.ranks:
        say(f"(the file was written for layout.ranks={config.layout.ranks})")
    say()
    say(f"memory of a rank, GiB of {on.memory / GIB:.1f}")
    shown = [name for name in MEMORY if any(getattr(each, name) for each in plan.memories)]
    table = _table("pipeline ranks", *shown, "total")
    for first, group in distinct(layout).items():
        most = plan.memories[max(group, key=lambda pp: plan.memories[pp].total)]
        name = f"{first}" if len(group) == 1 else f"{first} to {group[-1]}, the most"
        table.add_row(name, *(gib(getattr(most, part)) for part in shown), gib(most.total))
    console.print(table)
    if plan.wires:
        say()
        say(f"messages of a step, of a rank{f' of pipeline rank {plan.step.slowest}' if layout.pp > 1 else ''}")
        table = _table("axis", "messages", "GiB", "seconds", "hidden")
        for axis, wire in sorted(plan.wires.items(), key=lambda item: list(AXES).index(item[0])):
            table.add_row(
                AXES[axis],
                f"{wire.messages:,}",
                gib(wire.size),
                number(wire.seconds),
                f"{wire.hidden / max(wire.seconds, 1e-12):.0%}",
            )
        console.print(table)
    say()
    table = _table("a step", "seconds", "share")
    for name, words in PARTS.items():
        if share := plan.step.parts.get(name, 0.0) / plan.step.seconds:
            table.add_row(words, number(plan.step.parts[name]), f"{share:.1%}")
    table.add_row("in all", number(plan.step.seconds), "")
    console.print(table)
    say()
    _show_cost(plan, say)
    for change in changes:
        gain = f"{change.gain:.2f} times as fast, " if plan.fits else f"fits, {change.gain:.2f} times as fast, "
        say(f"  try     {change.words}: {gain}{change.memory / GIB:.1f} GiB a rank")
    for problem in wrong:
        say(f"  {'fails ' if problem.fatal else 'note  '}  {problem.line}")


def _show_cost(plan: Plan, say: Callable[[str], None]) -> None:
    cost = plan.cost
    mfu = f"MFU {cost.mfu_full:.1%}" + (f" ({cost.mfu_causal:.1%} causal)" if cost.mfu_full != cost.mfu_causal else "")
    say(f"  speed   {cost.tokens_per_second:,.0f} tokens/s, {number(cost.sequences_per_second)} sequences/s, {mfu}")
    dollars = (
        "price unknown: --price DOLLARS an hour"
        if cost.dollars is None
        else f"${cost.dollars:,.0f} at ${cost.price:,.2f} an hour each"
    )
    say(f"  to end  {plan.config.train.steps:,} steps, {number(cost.days)} days, {dollars}")
    say(f"  limit   {plan.limit}")


def show_search(plan: Plan, ranked: Search) -> None:
    console = _console()
    console.print(
        Text(f"{plan.on.describe()}: {ranked.counted} layouts timed; the best of each tp, pp and cp that fits")
    )
    table = _table("", "tp", "pp", "vpp", "cp", "dp", "zero", "micro", "recompute", "seconds", "GiB", "tokens/s")
    tokens = plan.config.train.global_batch * plan.config.data.sequence
    rows = [*ranked.found]
    if ranked.own and not any(each.own for each in rows):
        rows.append(ranked.own)
    for place, each in enumerate(rows, 1):
        tp, pp, vpp, cp, zero, micro, kind = each.key
        unfit = each.memory > plan.on.memory
        name = ("file" if each.own else "") if place > len(ranked.found) else f"{place}{' file' if each.own else ''}"
        cells = (tp, pp, vpp, cp, each.layout.dp, zero, micro, kind, number(each.seconds))
        table.add_row(
            name, *map(str, cells), gib(each.memory) + ("!" if unfit else ""), f"{tokens / each.seconds:,.0f}"
        )
    console.print(table)
    best = ranked.found[0]
    console.print(Text(f"\nbest: {' '.join(best.words(plan.config)) or 'the file as it is'}"), soft_wrap=True)
    if not ranked.own:
        console.print(Text("the file's own layout is not possible on these ranks"))
    elif ranked.own.memory > plan.on.memory:
        console.print(Text(f"the file does not fit: {gib(ranked.own.memory)} GiB of {gib(plan.on.memory)}"))
    elif not best.own:
        parts = sorted(plan.shares.items(), key=lambda item: -item[1])[:3]
        why = ", ".join(f"{PARTS.get(name, name)} {share:.0%}" for name, share in parts)
        console.print(Text(f"the file takes {ranked.own.seconds / best.seconds:.2f} times as long; its step: {why}"))


def show_comparison(plan: Plan, rows: list[Row]) -> None:
    console = _console()
    console.print(Text(f"{plan.on.describe()}; {plan.layout.describe()}"))
    table = _table("", "predicted", "measured", "ratio")
    for row in rows:
        table.add_row(row.name, number(row.predicted), number(row.measured), f"{row.ratio:.2f}")
    console.print(table)
