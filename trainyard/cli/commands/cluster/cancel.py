"""`trainyard cancel`: End the job of a submitted run."""

import os
import signal
from dataclasses import replace

from trainyard.cli.options import RunDirectory
from trainyard.cluster import slurm
from trainyard.cluster.jobs import require_record, run_state


def cancel(
    directory: RunDirectory,
) -> None:
    """End the job of a run. The ranks save a checkpoint first, as far as the time that Slurm gives them allows.

    Example:

      trainyard cancel runs/llama3-70b
    """
    record = require_record(directory)
    state = run_state(directory, record)
    if not state.active:
        print(f"{directory}: job {record.job_id} has ended already ({state.state})")
        return
    replace(record, cancelled=True).write(directory)
    if record.scheduler == "slurm":
        slurm.cancel([job for job in (record.precompile_job_id, record.job_id) if job])
    else:
        os.kill(int(record.job_id), signal.SIGTERM)
    print(f"{directory}: job {record.job_id} is ending")
