"""Tables of `trainyard plan`, 100 columns wide, or as wide as a narrower terminal."""

import math
import textwrap
from collections.abc import Callable

from rich.console import Console
from rich.table import Table
from rich.text import Text

from trainyard.config.objective_check import trains_on_rollouts
from trainyard.core.constants import GIB
from trainyard.core.quantities import counted
from trainyard.models import Blueprint, blueprint_of
from trainyard.preflight.plan.compare_measured import ComparisonRow
from trainyard.preflight.plan.group_rules import PlanProblem
from trainyard.preflight.plan.report import ConfigChange, Plan
from trainyard.preflight.plan.search import SEARCHED_KEYS, LayoutRanking, override_values
from trainyard.preflight.plan.time.step_time import distinct_pipeline_ranks

TABLE_WIDTH = 100
INDENT = 10
MEMORY_COLUMNS = ("weights", "gradients", "optimizer", "activations", "logits", "buffers", "fragmentation")
SHORT_HEADINGS = {
    "pipeline ranks": "pp ranks",
    "gradients": "grads",
    "optimizer": "optim.",
    "activations": "activ.",
    "fragmentation": "fragm.",
}
"""Headings in a terminal of fewer than 100 columns."""
AXIS_LABELS = {"tp": "tensor", "cp": "context", "ep": "expert", "pp": "pipeline", "dp": "data", "all": "all ranks"}
STEP_PART_LABELS = {
    "matmul": "matrix multiplications",
    "attention": "attention",
    "memory": "other memory traffic",
    "tp": "tensor parallel",
    "cp": "context parallel",
    "ep": "expert parallel",
    "pp": "between stages",
    "bubble": "pipeline bubble",
    "dp": "data parallel",
    "update": "optimizer update",
    "all": "all-reduce over all ranks",
}


def _console() -> Console:
    console = Console(highlight=False)
    console.width = min(console.width, TABLE_WIDTH) if console.is_terminal else TABLE_WIDTH
    return console


def _table(console: Console, *headings: str) -> Table:
    narrow = console.width < TABLE_WIDTH
    table = Table(box=None, pad_edge=False, padding=(0, 1 if narrow else 2, 0, 0))
    for index, heading in enumerate(headings):
        title = SHORT_HEADINGS.get(heading, heading) if narrow else heading
        table.add_column(title, justify="right" if index else "left", no_wrap=True)
    return table


def format_number(value: float) -> str:
    """Format with three significant digits."""
    if value == 0:
        return "0"
    return f"{value:,.{max(0, 2 - math.floor(math.log10(abs(value))))}f}"


def format_gib(size: float) -> str:
    if 0 < size < GIB / 100:
        return "<0.01"
    return f"{size / GIB:.{1 if size >= GIB / 10 else 2 if size else 0}f}"


def _weights_text(blueprint: Blueprint) -> str:
    """The number of weights, and of those that are trained unless all are."""

    def size(weights: int) -> str:
        return f"{weights / 1e9:.2f}B" if weights > 1e9 else f"{weights / 1e6:.1f}M"

    count, trained = blueprint.parameter_count(), blueprint.trained_count
    return f"{size(count)} weights" + (f", {size(trained)} of them trained" if trained < count else "")


def print_plan(plan: Plan, source: str, changes: list[ConfigChange], problems: list[PlanProblem]) -> None:
    console = _console()

    def print_line(line: str = "") -> None:
        console.print(Text(textwrap.fill(line, console.width, subsequent_indent=" " * INDENT)))

    config, layout, hardware = plan.config, plan.layout, plan.hardware
    print_line(f"{source}, {_weights_text(blueprint_of(config.model))}, on {hardware.describe()}")
    print_line(layout.describe())
    if config.layout.ranks and config.layout.ranks != hardware.ranks:
        print_line(f"(the file is meant for layout.ranks={config.layout.ranks})")
    print_line()
    print_line(f"peak memory per rank, GiB of {hardware.memory / GIB:.1f}")
    console.print(_memory_table(plan, console))
    if plan.traffic:
        print_line()
        rank = f"a rank of pipeline rank {plan.step_time.slowest_pp}" if layout.pp > 1 else "a rank"
        print_line(f"communication per step, of {rank}")
        console.print(_traffic_table(plan, console))
    print_line()
    console.print(_time_table(plan, console))
    print_line()
    _print_cost(plan, print_line)
    for change in changes:
        speedup = f"{change.speedup:.2f} times as fast, "
        gain = speedup if plan.fits else f"fits, {speedup}"
        print_line(f"  try     {change.overrides}: {gain}{change.memory / GIB:.1f} GiB per rank")
    for problem in problems:
        print_line(f"  {'fails ' if problem.fatal else 'note  '}  {problem.message}")


def _memory_table(plan: Plan, console: Console) -> Table:
    columns = [name for name in MEMORY_COLUMNS if any(getattr(memory, name) for memory in plan.memory_by_pp)]
    table = _table(console, "pipeline ranks", *columns, "total")
    for first, group in distinct_pipeline_ranks(plan.config.model, plan.layout).items():
        largest = plan.memory_by_pp[max(group, key=lambda pp: plan.memory_by_pp[pp].total)]
        limit = "max" if console.width < TABLE_WIDTH else "maximum"
        name = f"{first}" if len(group) == 1 else f"{first} to {group[-1]}, {limit}"
        table.add_row(name, *(format_gib(getattr(largest, column)) for column in columns), format_gib(largest.total))
    return table


def _traffic_table(plan: Plan, console: Console) -> Table:
    table = _table(console, "axis", "messages", "GiB", "seconds", "overlapped")
    for axis, traffic in sorted(plan.traffic.items(), key=lambda item: list(AXIS_LABELS).index(item[0])):
        table.add_row(
            AXIS_LABELS[axis],
            f"{traffic.messages:,}",
            format_gib(traffic.nbytes),
            format_number(traffic.seconds),
            f"{traffic.overlapped / max(traffic.seconds, 1e-12):.0%}",
        )
    return table


def _time_table(plan: Plan, console: Console) -> Table:
    table = _table(console, "step time", "seconds", "share")
    for name, label in STEP_PART_LABELS.items():
        if share := plan.step_time.components.get(name, 0.0) / plan.step_time.seconds:
            table.add_row(label, format_number(plan.step_time.components[name]), f"{share:.1%}")
    table.add_row("total", format_number(plan.step_time.seconds), "")
    return table


def _print_cost(plan: Plan, print_line: Callable[[str], None]) -> None:
    cost = plan.cost
    mfu = f"MFU {cost.mfu_full:.1%}" + (f" ({cost.mfu_causal:.1%} causal)" if cost.mfu_full != cost.mfu_causal else "")
    sequences = format_number(cost.sequences_per_second)
    print_line(f"  speed   {cost.tokens_per_second:,.0f} tokens/s, {sequences} sequences/s, {mfu}")
    dollars = (
        "price unknown: use --price DOLLARS"
        if cost.dollars is None
        else f"${cost.dollars:,.0f} at ${cost.price_per_hour:,.2f} per hour each"
    )
    print_line(f"  total   {counted(plan.config.train.steps, 'step', ',')}, {format_number(cost.days)} days, {dollars}")
    print_line(f"  limit   {plan.bottleneck}")
    if trains_on_rollouts(plan.config):
        print_line("  note    the time to write completions and to judge them comes on top")


def print_search(plan: Plan, ranking: LayoutRanking) -> None:
    console = _console()
    hardware, file_layout = plan.hardware, ranking.file_layout
    console.print(
        Text(
            f"{hardware.describe()}: {counted(ranking.timed_count, 'layout')} timed; the best of "
            "each tp, pp and cp that fits"
        )
    )
    headings = [key.rpartition(".")[2] for key in SEARCHED_KEYS]
    columns = ["tp", "pp", "vpp", "cp", *["ep"] * bool(plan.config.model.num_experts), "dp", "zero"]
    table = _table(console, "", *columns, "micro", "recompute", "seconds", "GiB", "tokens/s")
    tokens = plan.config.train.global_batch * plan.config.data.seq_len
    layouts = [*ranking.layouts]
    if file_layout and not any(layout.is_file for layout in layouts):
        layouts.append(file_layout)
    for number, layout in enumerate(layouts, 1):
        values = {**dict(zip(headings, layout.point, strict=True)), "dp": layout.layout.dp}
        labels = ([str(number)] if number <= len(ranking.layouts) else []) + ["file"] * layout.is_file
        cells = (*(values[key] for key in (*columns, "micro_batch", "kind")), format_number(layout.seconds))
        memory = format_gib(layout.memory) + "!" * (layout.memory > hardware.memory)
        table.add_row(" ".join(labels), *map(str, cells), memory, f"{tokens / layout.seconds:,.0f}")
    console.print(table)
    best = ranking.layouts[0]
    console.print(
        Text(f"\nbest: {' '.join(best.overrides(override_values(plan.config))) or 'the unchanged file'}"),
        soft_wrap=True,
    )
    if not file_layout:
        console.print(Text("the file's own layout is not possible on these ranks"))
    elif file_layout.memory > hardware.memory:
        need, have = format_gib(file_layout.memory), format_gib(hardware.memory)
        console.print(Text(f"the file does not fit: {need} GiB of {have}"))
    elif not best.is_file:
        largest = sorted(plan.time_shares.items(), key=lambda item: -item[1])[:3]
        shares = ", ".join(f"{STEP_PART_LABELS.get(name, name)} {share:.0%}" for name, share in largest)
        ratio = file_layout.seconds / best.seconds
        console.print(Text(f"the file takes {ratio:.2f} times as long; its step: {shares}"))


def print_comparison(plan: Plan, rows: list[ComparisonRow]) -> None:
    console = _console()
    console.print(Text(f"{plan.hardware.describe()}; {plan.layout.describe()}"))
    table = _table(console, "", "predicted", "measured", "ratio")
    for row in rows:
        table.add_row(row.name, format_number(row.predicted), format_number(row.measured), f"{row.ratio:.2f}")
    console.print(table)
