"""Submitted runs: job.json with the jobs that train a run and what happened to them, the state of these jobs, and how
far they have trained."""

import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, Self

import psutil

from trainyard.cluster import slurm
from trainyard.core.atomic_files import atomic_write_text
from trainyard.core.errors import UserError, one_line
from trainyard.core.yaml_io import read_yaml
from trainyard.metrics.json_lines import read_json_lines

RECORD_FILE = "job.json"
LOG_DIRECTORY = "logs"


@dataclass(frozen=True)
class JobRecord:
    """What `trainyard submit` wrote, and the history that the supervisor adds."""

    scheduler: str
    """slurm, or local."""
    job_id: str
    """Job of Slurm, or process of the local supervisor."""
    nodes: str
    """Number of nodes, such as 4 or 2-4."""
    nproc: int
    """Ranks on each node."""
    precompile_job_id: str | None = None
    layouts: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Of an elastic job: NodeLayout by number of nodes."""
    max_restarts: int = 3
    notice_s: int = 120
    """Seconds between the notice and the time limit."""
    cancelled: bool = False
    """`trainyard cancel` was called: the job must not be requeued."""
    attempts: int = 0
    """Starts of the ranks so far, over all restarts of the job."""
    attempt_nodes: str = ""
    """Host list of the attempt in progress; empty if none is. It remains if the supervisor dies with its node."""
    supervisor: str = ""
    """The process that supervises the job: only this one writes here. A node that lost its network may come back with
    an older one."""
    failures_in_a_row: int = 0
    """Failed attempts since the last one that saved a checkpoint."""
    idle_stops: int = 0
    """Stops in a row, by a time limit or a preemption, without a new checkpoint in between."""
    last_checkpoint: int = 0
    """Step of the latest checkpoint when the last attempt started, or was asked to stop."""
    events: tuple[Mapping[str, Any], ...] = field(default=())
    """What happened: time, text."""

    @classmethod
    def read(cls, directory: Path) -> Self | None:
        """The record of a run directory; None if the run was not submitted."""
        try:
            data = json.loads((directory / RECORD_FILE).read_text(encoding="utf-8"))
            return cls(**{**data, "events": tuple(data.get("events", ()))})
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError) as error:
            raise UserError(f"{directory / RECORD_FILE}: not the record of a job: {one_line(error)}") from None

    def write(self, directory: Path) -> None:
        atomic_write_text(directory / RECORD_FILE, json.dumps(asdict(self), indent=1) + "\n")

    def with_event(self, text: str) -> Self:
        return replace(self, events=(*self.events, {"time": time.time(), "text": text}))


def attempt_directory(directory: Path, record: JobRecord) -> Path:
    """Where the ranks of the current attempt log, one subdirectory per node."""
    return directory / LOG_DIRECTORY / f"{record.job_id}-{record.attempts}"


def job_log(directory: Path, job_id: str) -> Path:
    """The output of the batch script, of all restarts of a job."""
    return directory / LOG_DIRECTORY / f"{job_id}.log"


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
