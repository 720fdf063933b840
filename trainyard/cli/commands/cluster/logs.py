"""`trainyard logs`: Print or follow the log of a submitted run."""

import sys
import time
from typing import Annotated

from typer import Option

from trainyard.cli.options import RunDirectory
from trainyard.cluster.jobs import job_log, require_record, run_state
from trainyard.core.errors import UserError

POLL_S = 0.5
STATE_POLL_S = 5.0


def logs(
    directory: RunDirectory,
    follow: Annotated[bool, Option("-f", "--follow", help="Print new lines until the job ends.")] = False,
) -> None:
    """Print the log of a run's job. Those of the ranks of every node are in RUN/logs.

    Example:

      trainyard logs -f runs/llama3-70b
    """
    record = require_record(directory)
    path = job_log(directory, record.job_id)
    if not path.exists() and not follow:
        state = run_state(directory, record)
        raise UserError(f"{path}: not written yet; job {record.job_id} is {state.state}")
    position, next_look = 0, 0.0
    while True:
        if path.exists():
            with path.open("rb") as file:
                file.seek(position)
                data = file.read()
            position += len(data)
            sys.stdout.buffer.write(data)
            sys.stdout.flush()
            if data:
                continue
        if not follow:
            return
        if time.monotonic() >= next_look:
            if not run_state(directory, record).active:
                return
            next_look = time.monotonic() + STATE_POLL_S
        time.sleep(POLL_S)
