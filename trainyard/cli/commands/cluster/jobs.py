"""`trainyard jobs`: List submitted runs: state, step, loss, time left."""

import json
from pathlib import Path
from typing import Annotated

from rich.console import Console
from rich.table import Table
from typer import Argument

from trainyard.cli.options import AsJson
from trainyard.cluster.jobs import RunState, find_runs, require_record, run_state


def jobs(
    directory: Annotated[
        Path, Argument(metavar="RUN|DIRECTORY", help="A run directory, or one that contains several.")
    ] = Path("runs"),
    as_json: AsJson = False,
) -> None:
    """List submitted runs: state of the job, step, loss, time left, and what happened last.

    Examples:

      trainyard jobs

      trainyard jobs runs/llama3-70b --json
    """
    runs = find_runs(directory)
    states = [run_state(run, require_record(run)) for run in runs]
    if as_json:
        print(json.dumps([state._asdict() | {"directory": str(state.directory)} for state in states]))
    elif states:
        print_table(states)
    else:
        print(f"{directory}: no submitted run")


def print_table(states: list[RunState]) -> None:
    console = Console(highlight=False)
    table = Table(box=None, pad_edge=False)
    for heading in ("run", "job", "state", "step", "loss", "left"):
        table.add_column(heading, overflow="fold" if heading == "run" else "ellipsis")
    for state in states:
        steps = f"{state.step}/{state.steps}" if state.steps else str(state.step)
        loss = f"{state.loss:.4f}" if state.loss is not None else ""
        table.add_row(state.directory.name, state.job_id, state.state, steps, loss, state.time_left)
    console.print(table)
    for state in states:
        if state.last_event:
            console.print(f"{state.directory.name}: {state.last_event}", soft_wrap=True, style="dim")
