"""`trainyard page`: Show runs in a browser while they train."""

import secrets
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from trainyard.cli.options import Host, Port
from trainyard.core.errors import UserError

TOKEN_VARIABLE = "TRAINYARD_PAGE_TOKEN"
DEFAULT_DIRECTORY = Path("runs")


def page(
    directory: Annotated[
        Path, Argument(metavar="RUNS_DIR", help="Directory of runs.", show_default=False)
    ] = DEFAULT_DIRECTORY,
    host: Host = "127.0.0.1",
    port: Port = 8265,
    token_file: Annotated[
        Path | None,
        Option(
            metavar="FILE",
            help=f"File with the token. Default: ${TOKEN_VARIABLE}; else one is generated if others can connect.",
        ),
    ] = None,
) -> None:
    """Show runs in a browser: live curves of several runs, events, step times, plan, configuration, checkpoints.

    It only reads, and only below RUNS_DIR (default: runs). New runs and steps appear without a reload. Ctrl-C ends it.

    Examples:

      trainyard page

      trainyard page /shared/runs --port 0

      trainyard page --host 0.0.0.0 --token-file token.txt
    """
    from trainyard.core.sockets import base_url, bind_socket, is_loopback, read_token
    from trainyard.core.web_server import SignalServer
    from trainyard.dashboard.app import DashboardData, create_app

    root = require_directory(directory)
    token = read_token(token_file, TOKEN_VARIABLE)
    if not token and not is_loopback(host):
        token = secrets.token_urlsafe(24)
        query = f"/?token={token}"
    else:
        query = "/"
    with bind_socket(host, port) as bound:
        data = DashboardData(root, str(directory))
        ready = f"runs of {directory} at {base_url(bound, query)}"
        try:
            SignalServer(create_app(data, host, token), lambda: print(ready, flush=True)).run_on(bound)
        finally:
            data.close()


def require_directory(directory: Path) -> Path:
    """The absolute path of a directory of runs. The default one may not exist yet."""
    path = directory.expanduser()
    if (path / "run.json").is_file() and (path / "config.yaml").is_file():
        raise UserError(f"{directory}: is one run; nearest: trainyard page {path.absolute().parent}")
    if not path.is_dir() and (path.exists() or directory != DEFAULT_DIRECTORY):
        raise UserError(f"{directory}: {'not a directory' if path.exists() else 'no such directory'}")
    return path.resolve()
