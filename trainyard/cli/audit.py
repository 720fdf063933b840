"""`trainyard audit`: would Trainium take this run? Asked without a Trainium."""

import json
import os
import re
import sys
import time
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from trainyard.core.errors import UserError

if TYPE_CHECKING:
    from trainyard.audit.audit import AuditReport

PROGRESS_INTERVAL_S = 10.0
"""Seconds between lines of progress, where there is no terminal."""
GIB = 1 << 30
GENERATIONS = ("trn1", "trn2", "trn3")


def audit(
    source: Annotated[str, typer.Argument(metavar="FILE|RECIPE", help="A YAML file or a recipe's name.")],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...")] = None,
    hardware: Annotated[
        str | None,
        typer.Option("--hardware", help="trn1, trn2 or trn3. Default: what the file says it needs, or trn1."),
    ] = None,
    workers: Annotated[
        int | None, typer.Option("--workers", min=1, help="Processes. Default: one for each core.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as one JSON object.")] = False,
) -> int:
    """Follow whole steps of every pipeline stage at full size, without weights or a Trainium, and check: fixed shapes,
    supported operators and dtypes, int32 indices, no question to the host, group sizes, one graph for all ranks of a
    stage, no recompiles, and that it fits. Each violation is told with its line. Exit code 1 if there is one.

    Examples:

      trainyard audit llama3-70b

      trainyard audit my.yaml layout.tp=8 layout.ranks=64 --hardware trn2
    """
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # before torch is there: it warns of every group of ranks
    from trainyard.audit.audit import audit as run
    from trainyard.config.load import load
    from trainyard.devices.neuron.topology import LNC_CHOICES, check_lnc

    config = load(source, overrides or [])
    generation = hardware or next((name for name in GENERATIONS if name in config.hardware), GENERATIONS[0])
    if generation not in GENERATIONS:
        raise UserError(f"--hardware {generation}: not known; here: {', '.join(GENERATIONS)}")
    lnc = config.device.lnc or LNC_CHOICES[generation][0]
    check_lnc(generation, lnc)
    with _TraceProgress() as shown:
        report = run(config, generation, lnc, workers or os.cpu_count() or 1, shown.update)
    if as_json:
        print(json.dumps(report_to_dict(report), indent=2))
    else:
        print_report(report)
    return 1 if report.violations else 0


class _TraceProgress:
    """A bar in a terminal, elsewhere now and then a line."""

    def __init__(self) -> None:
        console = Console(stderr=True, highlight=False)
        self.bar: Progress | None = None
        if console.is_terminal:
            columns = TextColumn("[bold]traces"), BarColumn(bar_width=24), MofNCompleteColumn(), TimeElapsedColumn()
            self.bar = Progress(*columns, console=console, transient=True)
        self.last_printed = time.monotonic()

    def update(self, done: int, total: int) -> None:
        if self.bar:
            # Its thread starts with the first result: workers are forked before that.
            if done == 1:
                self.task = self.bar.add_task("traces", total=total)
                self.bar.start()
            if done:
                self.bar.update(self.task, completed=done)
        elif time.monotonic() - self.last_printed >= PROGRESS_INTERVAL_S:
            self.last_printed = time.monotonic()
            print(f"{done} of {total} traces", file=sys.stderr, flush=True)

    def __enter__(self) -> "_TraceProgress":
        return self

    def __exit__(self, *_: object) -> None:
        if self.bar:
            self.bar.stop()


def print_report(report: "AuditReport") -> None:
    console = Console(highlight=False, soft_wrap=True)
    core = f"{report.generation}, LNC {report.lnc}, {report.memory_limit / GIB:.0f} GiB a rank"
    console.print(f"{report.ranks} rank{'s' * (report.ranks > 1)} of {core}: {report.layout}")
    console.print(f"traced {report.traced}")
    for stage in report.stages:
        memory = f"{stage.peak_bytes / GIB:.2f} GiB at its peak, {stage.steady_bytes / GIB:.2f} between steps"
        console.print(f"  stage {stage.stage}: {stage.operators:,} operators in a step; {memory}")
    if report.stages:
        kinds = " and ".join(dict.fromkeys(name for stage in report.stages for name in stage.graphs))
        console.print(f"graphs: {report.graphs} different ones ({kinds}); none is expected after the second step")
    for each in report.violations:
        stages = "" if len(report.stages) == 1 else f" [stage {', '.join(map(str, each.stages))}]"
        console.print(f"[bold red]{escape(each.location)}[/]: {each.rule}: {escape(each.description)}{escape(stages)}")
        console.print(f"    try: {escape(each.fix)}")
    count = len(report.violations)
    console.print(f"[bold red]{count} violation{'s' * (count > 1)}[/]" if count else "[bold green]clean[/]")


def report_to_dict(report: "AuditReport") -> dict[str, object]:
    return {
        "hardware": report.generation,
        "lnc": report.lnc,
        "ranks": report.ranks,
        "layout": report.layout,
        "traced": report.traced,
        "memory_limit_bytes": report.memory_limit,
        "graphs": report.graphs,
        "stages": [stage._asdict() for stage in report.stages],
        "violations": [_with_file_and_line(each._asdict()) for each in report.violations],
    }


def _with_file_and_line(violation: dict[str, object]) -> dict[str, object]:
    """With `file` and `line` apart, where there is one."""
    found = re.match(r"(.+?):(\d+)", str(violation["where"]))
    return violation | ({"file": found[1], "line": int(found[2])} if found else {"file": None, "line": None})
