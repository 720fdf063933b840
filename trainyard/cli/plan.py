"""`trainyard plan`: memory, messages, time and cost of a run, worked out on any laptop."""

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from trainyard.cli.plan_console import count_progress, print_comparison, print_plan, print_search
from trainyard.config.load import load
from trainyard.core.errors import UserError
from trainyard.plan import report
from trainyard.plan.compare_measured import compare_with_measured, load_run_config, run_hardware
from trainyard.plan.hardware.microbenchmark import measure_cpu
from trainyard.plan.hardware.spec import needed_hardware, parse_hardware, read_catalog
from trainyard.plan.preflight import find_problems
from trainyard.plan.search import search_layouts

SEARCH_ROWS = 10
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
    config = load_run_config(directory, words) if measured else load(source, words)
    table = read_catalog(hardware_file) if hardware_file else None
    where = on or (run_hardware(directory) if measured else None) or needed_hardware(config)
    target = parse_hardware(where, table, measure_cpu)
    made = report.make_plan(config, target, price)
    if measured:
        rows = compare_with_measured(made, directory)
        if as_json:
            print(json.dumps([{**vars(row), "ratio": row.ratio} for row in rows], indent=2))
        else:
            print_comparison(made, rows)
        return 0
    changes = report.suggest_changes(made)
    wrong = find_problems(made, [] if made.fits else changes)
    ranked = None
    if find:
        with count_progress("layouts") as show:
            ranked = search_layouts(config, target, SEARCH_ROWS, show)
        if not ranked.layouts:
            raise UserError(
                f"--search: no layout of {target.describe()} fits; nearest: more of them, or a smaller model"
            )
    if as_json:
        out = report.plan_as_json(made) | {
            "problems": [vars(each) for each in wrong],
            "try": [vars(each) for each in changes],
        }
        if ranked:
            out["search"] = [
                {
                    "overrides": each.overrides(config),
                    "seconds": each.seconds,
                    "memory": each.memory,
                    "own": each.is_file,
                }
                for each in ranked.layouts
            ]
        json.dump(out, sys.stdout, indent=2)
        print()
    elif ranked:
        print_search(made, ranked)
    else:
        print_plan(made, source, changes, wrong)
    return 2 if any(each.fatal for each in wrong) and not find else 0
