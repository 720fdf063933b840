"""`trainyard audit`: Check a run against Trainium's rules without a Trainium."""

import json
import os
import re
from math import prod
from typing import TYPE_CHECKING, Annotated

from rich.console import Console
from rich.markup import escape
from typer import Option

from trainyard.cli.console import ProgressDisplay
from trainyard.cli.options import AsJson, ConfigSource, Overrides, Smoke, Workers, worker_count
from trainyard.core.constants import GIB
from trainyard.core.errors import UserError
from trainyard.core.quantities import counted

if TYPE_CHECKING:
    from trainyard.preflight.audit.audit import AuditReport

GENERATIONS = ("trn1", "trn2", "trn3")
AXES = ("tp", "pp", "cp")


def audit(
    source: ConfigSource,
    overrides: Overrides = None,
    hardware: Annotated[
        str | None, Option(help="trn1, trn2 or trn3. Default: the file's hardware key, otherwise trn1.")
    ] = None,
    smoke: Smoke = False,
    workers: Workers = None,
    as_json: AsJson = False,
) -> int:
    """Check a run against Trainium's rules, at full size, without weights and without a Trainium.

    Traces complete training steps of every pipeline stage and checks for: static shapes, supported operators and
    dtypes, int32 indices, no host synchronization (print included), no random numbers of torch, supported process
    groups, one graph for all ranks of a stage, no recompiles, and memory. Prints each violation with its source line;
    the exit code is 1 if there is one.

    Examples:

      trainyard audit llama3-70b

      trainyard audit my.yaml layout.tp=8 layout.ranks=64 --hardware trn2

      trainyard audit my.yaml --smoke train.loss=mine:loss
    """
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # before importing torch, which warns about every group
    from trainyard.cli.run_config import load_run_config
    from trainyard.devices.neuron.topology import LNC_CHOICES, check_lnc
    from trainyard.preflight.audit.audit import audit as audit_run

    config = load_run_config(source, list(overrides or []), smoke, _named_ranks(overrides or []))
    generation = hardware or next((name for name in GENERATIONS if name in config.hardware), GENERATIONS[0])
    if generation not in GENERATIONS:
        raise UserError(f"--hardware {generation}: unknown; known: {', '.join(GENERATIONS)}")
    lnc = config.device.lnc or LNC_CHOICES[generation][0]
    check_lnc(generation, lnc)
    with ProgressDisplay("traces", items=True) as progress:
        report = audit_run(config, generation, lnc, worker_count(workers), progress.update)
    if as_json:
        print(json.dumps(report_to_dict(report), indent=2))
    else:
        print_report(report)
    return 1 if report.violations else 0


def _named_ranks(overrides: list[str]) -> int:
    """Ranks of a smoke trial: layout.ranks, or the product of the named axes. What is no number `load` reports."""
    sizes = dict(override.partition("=")[::2] for override in overrides)
    axes = [sizes["layout.ranks"]] if "layout.ranks" in sizes else [sizes.get(f"layout.{axis}", "1") for axis in AXES]
    return prod(int(size) for size in axes if size.isdecimal() and int(size))


def print_report(report: "AuditReport") -> None:
    console = Console(highlight=False, soft_wrap=True)
    core = f"{report.generation}, LNC {report.lnc}, {report.memory_limit / GIB:.0f} GiB per rank"
    console.print(f"{counted(report.ranks, 'rank')} of {core}: {report.layout}")
    console.print(f"traced {report.traced}")
    for stage in report.stages:
        memory = f"peak {stage.peak_bytes / GIB:.2f} GiB, {stage.steady_bytes / GIB:.2f} between steps"
        console.print(f"  stage {stage.stage}: {stage.operators:,} operators per step; {memory}")
    if report.stages:
        kinds = " and ".join(dict.fromkeys(name for stage in report.stages for name in stage.graphs))
        console.print(f"graphs: {report.graphs} distinct ({kinds}); none is expected after the second step")
    for violation in report.violations:
        stages = "" if len(report.stages) == 1 else f" [stage {', '.join(map(str, violation.stages))}]"
        console.print(
            f"[bold red]{escape(violation.location)}[/]: {violation.rule}: "
            f"{escape(violation.description)}{escape(stages)}"
        )
        console.print(f"    try: {escape(violation.fix)}")
    count = len(report.violations)
    console.print(f"[bold red]{counted(count, 'violation')}[/]" if count else "[bold green]clean[/]")


def report_to_dict(report: "AuditReport") -> dict[str, object]:
    """Return the report as plain data for `--json`."""
    return {
        "hardware": report.generation,
        "lnc": report.lnc,
        "ranks": report.ranks,
        "layout": report.layout,
        "traced": report.traced,
        "memory_limit_bytes": report.memory_limit,
        "graphs": report.graphs,
        "stages": [stage._asdict() for stage in report.stages],
        "violations": [_with_file_and_line(violation._asdict()) for violation in report.violations],
    }


def _with_file_and_line(violation: dict[str, object]) -> dict[str, object]:
    """Add `file` and `line` if the location names a source line, otherwise None."""
    match = re.match(r"(.+?):(\d+)", str(violation["location"]))
    return violation | ({"file": match[1], "line": int(match[2])} if match else {"file": None, "line": None})
