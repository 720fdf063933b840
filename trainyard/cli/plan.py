"""`trainyard plan`: memory, messages, time and cost of a run, worked out on any laptop."""

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from trainyard.cli.plan_console import counting, show_comparison, show_plan, show_search
from trainyard.config.load import load
from trainyard.core.errors import UserError
from trainyard.plan import report
from trainyard.plan.compare_measured import compare, config_of, measured_on
from trainyard.plan.hardware.microbenchmark import probe
from trainyard.plan.hardware.spec import hardware, needed, read_table
from trainyard.plan.preflight import problems
from trainyard.plan.search import search

SHOWN = 10
"""Layouts that a search lists."""


def plan(
    source: Annotated[
        str, typer.Argument(metavar="FILE|RECIPE|RUN", help="A YAML file, a recipe's name, or a run's directory.")
    ],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...")] = None,
    on: Annotated[
        str | None,
        typer.Option(
            "--hardware", metavar="NAME:COUNT", help="Default: what the file needs or the run had, else this CPU."
        ),
    ] = None,
    hardware_file: Annotated[
        Path | None, typer.Option("--hardware-file", metavar="YAML", help="Hardware and prices of your own.")
    ] = None,
    find: Annotated[bool, typer.Option("--search", help="Rank the layouts that fit.")] = False,
    price: Annotated[
        float | None, typer.Option("--price", min=0, metavar="DOLLARS", help="Of one instance (8 GPUs) for an hour.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Everything, as JSON.")] = False,
) -> int:
    """Whether a run fits, how fast it will be and what it costs, on hardware you may not have.

    Needs no device and no weights. Given a run's directory, it compares the prediction with what the run measured. Exit
    code 2 where the run would fail. docs/plan.md says what is behind the numbers, and how far off they are.

    Examples:

      trainyard plan llama3-70b

      trainyard plan my.yaml layout.tp=8 --hardware trn2.48xlarge:4 --search

      trainyard plan my.yaml --hardware h200:8 --price 30

      trainyard plan runs/my-run
    """
    directory = Path(source).expanduser()
    words = list(overrides or [])
    measured = directory.is_dir()
    config = config_of(directory, words) if measured else load(source, words)
    table = read_table(hardware_file) if hardware_file else None
    where = on or (measured_on(directory) if measured else None) or needed(config)
    target = hardware(where, table, probe)
    made = report.make(config, target, price)
    if measured:
        rows = compare(made, directory)
        if as_json:
            print(json.dumps([{**vars(row), "ratio": row.ratio} for row in rows], indent=2))
        else:
            show_comparison(made, rows)
        return 0
    changes = report.advice(made)
    wrong = problems(made, [] if made.fits else changes)
    ranked = None
    if find:
        with counting("layouts") as show:
            ranked = search(config, target, SHOWN, show)
        if not ranked.found:
            raise UserError(
                f"--search: no layout of {target.describe()} fits; nearest: more of them, or a smaller model"
            )
    if as_json:
        out = report.as_json(made) | {
            "problems": [vars(each) for each in wrong],
            "try": [vars(each) for each in changes],
        }
        if ranked:
            out["search"] = [
                {"overrides": each.words(config), "seconds": each.seconds, "memory": each.memory, "own": each.own}
                for each in ranked.found
            ]
        json.dump(out, sys.stdout, indent=2)
        print()
    elif ranked:
        show_search(made, ranked)
    else:
        show_plan(made, source, changes, wrong)
    return 2 if any(each.fatal for each in wrong) and not find else 0
