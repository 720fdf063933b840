"""`trainyard board`: Start TensorBoard for runs."""

import logging
import tempfile
import time
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option

from trainyard.cli.console import interrupt_on_terminate
from trainyard.core.errors import UserError, one_line
from trainyard.metrics.loggers.builtin.tensorboard import DIRECTORY

HOST = "127.0.0.1"
DEFAULT_PORT = 6006
SCAN_INTERVAL_S = 5.0
"""Seconds between looks for new runs."""


def board(
    runs: Annotated[list[Path], Argument(metavar="RUN...", help="Run directories, or directories with runs.")],
    port: Annotated[
        int | None, Option(min=0, max=65535, help=f"Port; 0: any free one. Default: {DEFAULT_PORT}, or one near it.")
    ] = None,
) -> None:
    """Start TensorBoard for one or more runs on this machine. Ctrl-C ends it.

    Runs appear under the names of their directories. New runs in a directory with runs appear while it is open. It
    listens on loopback only; from another machine, forward the port with ssh -L.

    Examples:

      trainyard board runs

      trainyard board runs/my-run runs/my-run-2 --port 0
    """
    find_logs(runs)  # a mistake does not wait for TensorBoard, which takes a second to import
    with interrupt_on_terminate(), tempfile.TemporaryDirectory(prefix="trainyard-board-") as directory:
        link_logs(runs, Path(directory))
        url = start_tensorboard(Path(directory), port)
        print(f"TensorBoard at {url} (Ctrl-C ends it)", flush=True)
        try:
            while True:
                time.sleep(SCAN_INTERVAL_S)
                link_logs(runs, Path(directory))
        except KeyboardInterrupt:
            print("TensorBoard ended", flush=True)


def find_logs(runs: list[Path]) -> dict[str, Path]:
    """The TensorBoard directory of each run by name: that of the run's directory, with its parent's if two have it."""
    found: list[Path] = []
    for path in runs:
        directory = path.expanduser()
        if not directory.is_dir():
            raise UserError(f"{path}: no such directory")
        if (directory / "config.yaml").is_file():
            inside = [directory]
            if not (directory / DIRECTORY).is_dir():
                raise UserError(f"{path}: has no TensorBoard files; see log.loggers in its config.yaml")
        else:
            inside = [config.parent for config in sorted(directory.glob("*/config.yaml"))]
            if not inside:
                raise UserError(f"{path}: neither a run directory nor one with runs: no config.yaml")
        found += [run.absolute() for run in inside if (run / DIRECTORY).is_dir() and run.absolute() not in found]
    names = [run.name for run in found]
    return {run.name if names.count(run.name) == 1 else "_".join(run.parts[1:]): run / DIRECTORY for run in found}


def link_logs(runs: list[Path], directory: Path) -> None:
    """Link the TensorBoard directory of each run, so that TensorBoard neither walks through checkpoints nor shows more
    than a name. Runs that are gone keep their link."""
    try:
        logs = find_logs(runs)
    except UserError:
        return
    for name, path in logs.items():
        if not (directory / name).is_symlink():
            (directory / name).symlink_to(path)


def start_tensorboard(directory: Path, port: int | None) -> str:
    """Serve a directory in a thread. Returns the address."""
    logging.getLogger("tensorboard").setLevel(logging.ERROR)
    from tensorboard import program

    server: Any = program.TensorBoard()
    arguments = ["--logdir", str(directory), "--host", HOST, "--reload_multifile", "true"]
    server.configure(argv=[None, *arguments, *(["--port", str(port)] if port is not None else [])])
    try:
        with redirect_stderr(StringIO()):  # TensorBoard's notes about itself
            url: str = server.launch()
    except program.TensorBoardServerException as error:
        raise UserError(f"--port {port}: {one_line(error)}") from None
    return url
