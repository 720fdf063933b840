"""`trainyard logs`: Print or follow the log of a submitted run."""

import sys
import time
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from trainyard.cluster.job_record import job_log
from trainyard.cluster.jobs import require_record, run_state
from trainyard.core.errors import UserError

POLL_S = 0.5
STATE_POLL_S = 5.0


def logs(
    directory: Annotated[Path, Argument(metavar="RUN", help="Run directory.")],
    follow: Annotated[bool, Option("-f", "--follow", help="Print new lines until the job ends.")] = False,
) -> int:
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
            return 0
        if time.monotonic() >= next_look:
            if not run_state(directory, record).active:
                return 0
            next_look = time.monotonic() + STATE_POLL_S
        time.sleep(POLL_S)
