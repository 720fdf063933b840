"""`trainyard report`: Write the page of a run as one HTML file."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Option

from trainyard.cli.options import RunDirectory
from trainyard.core.atomic_files import atomic_write_text
from trainyard.core.errors import UserError

if TYPE_CHECKING:
    from trainyard.dashboard.run_files import RunDirectoryReader


def report(
    run: RunDirectory,
    out: Annotated[Path | None, Option(metavar="FILE", help="Default: RUN/report.html.")] = None,
    compare: Annotated[Path | None, Option(metavar="RUN2", help="Another run, to compare with.")] = None,
    plan: Annotated[
        bool, Option("--plan/--no-plan", help="Compare the measurements with the plan, which takes some seconds.")
    ] = True,
) -> None:
    """Write curves, events, step times, plan, configuration, checkpoints and texts of a run to one HTML file.

    The file needs no server and no network: send it to anybody, open it in any browser.

    Examples:

      trainyard report runs/my-run

      trainyard report runs/my-run --compare runs/baseline --out report.html
    """
    from trainyard.dashboard.report import MARKER, create_report

    runs = [open_run(path) for path in (run, compare) if path]
    target = (out or run / "report.html").expanduser()
    if target.is_dir():
        raise UserError(f"--out {target}: is a directory")
    if not target.absolute().parent.is_dir():
        raise UserError(f"--out {target}: {target.absolute().parent} is not a directory")
    if target.exists() and MARKER not in target.read_bytes()[:400].decode(errors="replace"):
        raise UserError(f"--out {target}: exists and is not a report; choose another file")
    if len({reader.name for reader in runs}) < len(runs):
        raise UserError(f"--compare {compare}: has the same name as {run}")
    if plan and sys.stderr.isatty():
        print("computing the plan", file=sys.stderr)
    try:
        atomic_write_text(target, create_report(runs, plan))
    except OSError as error:
        raise UserError(f"--out {target}: {error.strerror}") from None
    print(f"{target}: {target.stat().st_size / 1024:.0f} KiB")


def open_run(path: Path) -> "RunDirectoryReader":
    from trainyard.dashboard.run_files import RunDirectoryReader
    from trainyard.dashboard.run_summary import is_run

    directory = path.expanduser().resolve()
    if not directory.is_dir():
        raise UserError(f"{path}: no such run directory")
    run = RunDirectoryReader(directory.parent, directory.name)
    if not is_run(run):
        raise UserError(f"{path}: not a run directory: it has no run.json, config.yaml or metrics.jsonl")
    return run
