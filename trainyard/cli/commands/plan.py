"""`trainyard plan`: Predict memory, speed and cost of a run, also for hardware you do not have."""

import json
import sys
from pathlib import Path
from typing import Annotated

from typer import Option

from trainyard.cli.console import ProgressDisplay
from trainyard.cli.options import AsJson, ConfigSource, Overrides
from trainyard.cli.plan_console import print_comparison, print_plan, print_search
from trainyard.cli.run_config import load_source
from trainyard.core.errors import UserError
from trainyard.preflight.plan import report
from trainyard.preflight.plan.compare_measured import compare_with_measured, load_run_config, run_hardware
from trainyard.preflight.plan.hardware.microbenchmark import measure_cpu
from trainyard.preflight.plan.hardware.spec import needed_hardware, parse_hardware, read_catalog
from trainyard.preflight.plan.problems import find_problems
from trainyard.preflight.plan.search import LayoutSearch, override_values

SEARCH_ROWS = 10
"""Layouts that `--search` lists."""


def plan(
    source: ConfigSource,
    overrides: Overrides = None,
    hardware: Annotated[
        str | None,
        Option(metavar="NAME:COUNT", help="Such as h200:8. Default: that of the file or the run, otherwise this CPU."),
    ] = None,
    hardware_file: Annotated[Path | None, Option(metavar="YAML", help="Your own hardware and prices.")] = None,
    search: Annotated[bool, Option("--search", help="Rank the layouts that fit.")] = False,
    price: Annotated[float | None, Option(min=0, metavar="DOLLARS", help="Per instance (8 GPUs) and hour.")] = None,
    as_json: AsJson = False,
) -> int:
    """Predict memory, speed and cost of a run, also for hardware you do not have.

    Needs no device and no weights. Given a run directory, compares the prediction with what the run measured. The exit
    code is 2 if the run would fail. docs/guides/plan.md explains the numbers and their accuracy.

    Examples:

      trainyard plan llama3-70b

      trainyard plan my.yaml layout.tp=8 --hardware trn2.48xlarge:4 --search

      trainyard plan my.yaml --hardware h200:8 --price 30

      trainyard plan runs/my-run
    """
    run_directory = Path(source).expanduser()
    override_list = list(overrides or [])
    is_run = run_directory.is_dir()
    config = load_run_config(run_directory, override_list) if is_run else load_source(source, override_list)
    catalog = read_catalog(hardware_file) if hardware_file else None
    measured_on = run_hardware(run_directory) if is_run else None
    name = hardware or measured_on or needed_hardware(config.hardware, config.layout, config.device.lnc)
    spec = parse_hardware(name, catalog, measure_cpu)
    prediction = report.make_plan(config, spec, price)
    if is_run:
        rows = compare_with_measured(prediction, run_directory)
        if as_json:
            print(json.dumps([{**vars(row), "ratio": row.ratio} for row in rows], indent=2))
        else:
            print_comparison(prediction, rows)
        return 0
    changes = report.suggest_changes(prediction)
    problems = find_problems(prediction, [] if prediction.fits else changes)
    ranking = None
    if search:
        with ProgressDisplay("layouts", items=True) as progress:
            ranking = LayoutSearch(config, spec).best(SEARCH_ROWS, progress.update)
        if not ranking.layouts:
            raise UserError(f"--search: no layout fits {spec.describe()}; nearest: more devices, or a smaller model")
    if as_json:
        out = report.plan_as_json(prediction) | {
            "problems": [vars(problem) for problem in problems],
            "try": [vars(change) for change in changes],
        }
        if ranking:
            out["search"] = [
                {
                    "overrides": layout.overrides(override_values(config)),
                    "seconds": layout.seconds,
                    "memory": layout.memory,
                    "own": layout.is_file,
                }
                for layout in ranking.layouts
            ]
        json.dump(out, sys.stdout, indent=2)
        print()
    elif ranking:
        print_search(prediction, ranking)
    else:
        print_plan(prediction, source, changes, problems)
    return 2 if any(problem.fatal for problem in problems) and not search else 0
