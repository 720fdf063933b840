"""The state of submitted runs: of their jobs, and how far they have trained."""

from pathlib import Path
from typing import NamedTuple

import psutil

from trainyard.cluster import slurm
from trainyard.cluster.job_record import RECORD_FILE, JobRecord
from trainyard.core.errors import UserError
from trainyard.core.yaml_io import read_yaml
from trainyard.metrics.json_lines import read_json_lines


class RunState(NamedTuple):
    """A submitted run."""

    directory: Path
    job_id: str
    state: str
    """State of the job in Slurm's words."""
    active: bool
    """True if the job waits or runs."""
    step: int
    steps: int | None
    """Steps of the complete run."""
    loss: float | None
    time_left: str
    """Until the time limit of the job."""
    last_event: str


def require_record(directory: Path) -> JobRecord:
    record = JobRecord.read(directory)
    if record is None:
        raise UserError(f"{directory}: not a submitted run: it has no {RECORD_FILE}; nearest: trainyard jobs")
    return record


def find_runs(directory: Path) -> list[Path]:
    """The submitted runs at or in a directory, latest job last."""
    if (directory / RECORD_FILE).is_file():
        return [directory]
    if not directory.is_dir():
        raise UserError(f"{directory}: no such directory")
    return sorted((path.parent for path in directory.glob(f"*/{RECORD_FILE}")), key=lambda run: run.stat().st_mtime)


def run_state(directory: Path, record: JobRecord) -> RunState:
    losses = [entry for entry in read_json_lines(directory / "metrics.jsonl").records if "loss" in entry]
    last = losses[-1] if losses else {}
    state, active, left = job_state(record)
    train = read_yaml(directory / "config.yaml").get("train", {})
    event = str(record.events[-1]["text"]) if record.events else ""
    step, loss = last.get("step", 0), last.get("loss")
    return RunState(
        directory,
        record.job_id,
        state,
        active,
        step if isinstance(step, int) else 0,
        train.get("steps"),
        loss if isinstance(loss, float) else None,
        left,
        event,
    )


def job_state(record: JobRecord) -> tuple[str, bool, str]:
    """State of a job in Slurm's words, whether it waits or runs, and the time left until its limit."""
    return _slurm_state(record) if record.scheduler == "slurm" else _local_state(record)


def _slurm_state(record: JobRecord) -> tuple[str, bool, str]:
    info = slurm.job_info(record.job_id)
    if info is None:
        return "ENDED", False, ""
    state = f"{info.state} ({info.reason})" if info.pending and info.reason != "None" else info.state
    return state, info.pending or info.running, info.time_left if info.running else ""


def _local_state(record: JobRecord) -> tuple[str, bool, str]:
    try:
        running = "supervise" in psutil.Process(int(record.job_id)).cmdline()
    except psutil.Error:
        running = False
    return ("RUNNING" if running else "ENDED"), running, ""
