"""Submits a run: creates its run directory with the configuration and a batch script, and starts the job."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from trainyard.cluster import slurm
from trainyard.cluster.batch_script import BatchOptions, render_script
from trainyard.cluster.jobs import LOG_DIRECTORY, JobRecord, job_log, job_state
from trainyard.config.load import dump
from trainyard.config.schema import Config, LogSection
from trainyard.core.atomic_files import atomic_write_text
from trainyard.core.errors import UserError
from trainyard.devices.neuron.topology import INSTANCES
from trainyard.metrics.run_directory import RunDirectory, find_run_directories

if TYPE_CHECKING:  # imports torch
    from trainyard.cluster.elastic import NodeLayout

TRAIN_SCRIPT, PRECOMPILE_SCRIPT = "train.sbatch", "precompile.sbatch"
PRECOMPILE_STARTS = 3
"""Compiled graphs are kept, so that another start may succeed."""
SUPERVISOR_STARTS = 100
"""The supervisor counts its failures itself; this ends a job in which it never comes that far."""
NODE_COUNT = re.compile(r"(\d{1,6})(?:-(\d{1,6}))?")
TIME_LIMIT = re.compile(r"(?:(?P<days>\d+)-)?(?P<clock>\d+(?::\d+){0,2})")
"""Such as 30 (minutes), 30:00, 1:30:00, 2-12 (days and hours) or 2-12:30:00."""


@dataclass(frozen=True)
class Submission:
    """What to submit."""

    config: Config
    options: BatchOptions
    nproc: int
    """Ranks on each node."""
    max_restarts: int
    hang_timeout: float
    """Seconds without a step after which a run is restarted; 0: any time."""
    precompile: bool
    """Compile in a job of its own first, so that the nodes of the run do not wait for the compiler."""
    layouts: "Mapping[int, NodeLayout]" = field(default_factory=dict)
    """Of an elastic job: the layout for each number of nodes."""

    def open_run(self) -> RunDirectory:
        return open_run(self.config.log, self.config.checkpoint.resume)

    def precompile_options(self) -> list[list[str]]:
        """The number of ranks and the overrides of every layout that the job may train with."""
        if not self.layouts:
            return [["--ranks", str(parse_node_count(self.options.nodes)[1] * self.nproc)]]
        used = {layout.nodes: layout for layout in self.layouts.values()}.values()
        return [["--ranks", str(layout.nodes * self.nproc), *layout.overrides] for layout in used]


@dataclass(frozen=True)
class SubmittedRun:
    """Where a submitted run is."""

    directory: Path
    record: JobRecord


def parse_node_count(nodes: str) -> tuple[int, int]:
    """Fewest and most nodes of text such as 4 or 2-4."""
    match = NODE_COUNT.fullmatch(nodes)
    if not match:
        raise UserError(f"--nodes {nodes}: must be a number such as 4, or a range such as 2-4")
    low, high = int(match[1]), int(match[2] or match[1])
    if not 1 <= low <= high:
        raise UserError(f"--nodes {nodes}: must be 1 or more" + (", in increasing order" if match[2] else ""))
    return low, high


def check_time(time: str | None, notice_s: int) -> None:
    """Refuse a time limit that leaves no time before the notice: the job would be requeued for ever."""
    limit_s = parse_time(time or "")
    if limit_s and limit_s <= notice_s:
        raise UserError(
            f"--time {time}: {limit_s} s, not longer than --notice {notice_s}, at which the job is requeued; nearest: "
            f"--notice {max(1, limit_s // 4)}"
        )


def parse_time(text: str) -> int | None:
    """Seconds of a time limit as sbatch reads it, in whole minutes; None if there is no limit, or sbatch refuses it."""
    match = TIME_LIMIT.fullmatch(text)
    if not match:
        return None
    numbers = [int(word) for word in match["clock"].split(":")]
    if match["days"] or len(numbers) == 3:
        hours, minutes, seconds = [*numbers, 0, 0][:3]
    else:
        hours, minutes, seconds = 0, *[*numbers, 0][:2]
    return -(-(((int(match["days"] or 0) * 24 + hours) * 60 + minutes) * 60 + seconds) // 60) * 60


def ranks_per_node(nodes: int, ranks: int | None, hardware: str, lnc: int | None) -> int:
    """The number of ranks to start on each node if the user does not say, from what the file says."""
    if ranks and ranks % nodes == 0:
        return ranks // nodes
    if instance := re.search(r"trn\d\.\w+", hardware):
        counts = [count for count, name in INSTANCES.items() if name == instance[0]]
        if counts:
            return counts[-1] if lnc == 1 else counts[0]
    raise UserError("--nproc: how many ranks on each node? Give their number, usually that of the devices")


def render_scripts(submission: Submission, directory: Path) -> dict[str, str]:
    """The batch scripts of a run by file name."""
    python = [sys.executable, "-m", "trainyard"]
    name, options, container = submission.config.log.name, submission.options, submission.options.container
    compiler = python
    if container:
        step = container.step_options(directory)
        srun = ["srun", "--nodes=1", "--ntasks=1", "--cpu-bind=none", *step] if step else []
        compiler = [*srun, *container.python(directory), "-m", "trainyard"]
    nproc = ["--nproc", str(submission.nproc)]
    scripts = {}
    if submission.precompile:
        scripts[PRECOMPILE_SCRIPT] = render_script(
            f"{name}-precompile",
            directory,
            replace(options, nodes="1", notice_s=0),
            [[*compiler, "precompile", str(directory), *nproc, *part] for part in submission.precompile_options()],
            "Compiles all graphs of the run; the training job starts when it has succeeded.",
            PRECOMPILE_STARTS,
        )
    scripts[TRAIN_SCRIPT] = render_script(
        name,
        directory,
        options,
        [[*python, *supervise_command(submission, directory)]],
        "Starts the ranks on every node with srun, and again from the latest checkpoint if they fail.",
        SUPERVISOR_STARTS,
    )
    return scripts


def supervise_command(submission: Submission, directory: Path) -> list[str]:
    options = ["--nproc", str(submission.nproc), "--hang-timeout", f"{submission.hang_timeout:g}"]
    container = submission.options.container
    return ["supervise", str(directory), *options, *(container.options() if container else [])]


def open_run(log: LogSection, resume: str) -> RunDirectory:
    """The locked directory of a run: with checkpoint.resume=auto of the latest one of this name, which the job
    continues; otherwise, or if there is none, of a new one."""
    parent = Path(log.directory).expanduser().absolute()
    if resume == "auto" and (directories := find_run_directories(parent, log.name)):
        path = directories[0]
        check_no_job(path)  # before the lock, which the ranks of a running job have
        run = RunDirectory.open(path, log.name)
        try:
            check_no_job(path)  # with the lock: another submit of the run may have just made one
        except BaseException:
            run.close()
            raise
        return run
    run = RunDirectory.create(parent, log.name)
    if resume == "auto" and find_run_directories(parent, log.name)[-1] != run.path:
        run.close()  # another submit of the run has created its directory meanwhile
        shutil.rmtree(run.path)
        return open_run(log, resume)
    return run


def submit_to_slurm(submission: Submission) -> SubmittedRun:
    """Write the scripts of a run into its directory and submit them."""
    check_options(submission)
    with submission.open_run() as run:
        _write_run(submission, run.path)
        precompile_id = None
        dependency: list[str] = []
        if submission.precompile:
            precompile_id = slurm.submit_script(str(run.path / PRECOMPILE_SCRIPT))
            dependency = [f"--dependency=afterok:{precompile_id}", "--kill-on-invalid-dep=yes"]
        try:
            # The record must exist when the job starts, so the job is held until it is written.
            job_id = slurm.submit_script(str(run.path / TRAIN_SCRIPT), ["--hold", *dependency])
        except UserError:
            if precompile_id:
                slurm.cancel([precompile_id])
            raise
        nodes, nproc = submission.options.nodes, submission.nproc
        layouts = {str(count): layout.as_json() for count, layout in submission.layouts.items()}
        notice_s = submission.options.notice_s
        record = JobRecord("slurm", job_id, nodes, nproc, precompile_id, layouts, submission.max_restarts, notice_s)
        record.write(run.path)
    slurm.release(job_id)
    return SubmittedRun(run.path, record)


def submit_locally(submission: Submission) -> SubmittedRun:
    """Start the supervisor of a run on this machine, in the background."""
    options = submission.options
    if options.modules or options.setup or (options.container and options.container.runtime == "pyxis"):
        raise UserError("--module, --setup and Pyxis: need a job of Slurm, which this machine does not have")
    with submission.open_run() as run:
        _write_run(submission, run.path)
        command = [sys.executable, "-m", "trainyard", *supervise_command(submission, run.path), "--local"]
        log_path = run.path / LOG_DIRECTORY / "local.log"
        reader, writer = os.pipe()  # the supervisor waits until its record is written
        with log_path.open("ab") as log:
            process = subprocess.Popen(command, stdin=reader, stdout=log, stderr=log, start_new_session=True)
        log_path.rename(job_log(run.path, str(process.pid)))
        record = JobRecord("local", str(process.pid), "1", submission.nproc, max_restarts=submission.max_restarts)
        record.write(run.path)
    os.close(reader)
    os.close(writer)
    return SubmittedRun(run.path, record)


def check_options(submission: Submission) -> None:
    """Raise UserError if Slurm would refuse the job. Nothing is created."""
    partition = submission.options.partition
    if partition:
        slurm.check_partition(partition)
    slurm.check_node_count(parse_node_count(submission.options.nodes)[0], partition)
    with TemporaryDirectory() as temporary:
        for name, text in render_scripts(submission, Path(temporary)).items():
            script = Path(temporary) / name
            script.write_text(text)
            slurm.check_script(str(script))


def check_no_job(directory: Path) -> None:
    """Refuse a run that has a job which waits or runs."""
    record = JobRecord.read(directory)
    if record and (record.scheduler == "local" or slurm.available()):
        state, active, _ = job_state(record)
        if active:
            raise UserError(
                f"{directory}: job {record.job_id} of this run is {state}; nearest: trainyard cancel {directory}"
            )


def _write_run(submission: Submission, directory: Path) -> None:
    (directory / LOG_DIRECTORY).mkdir(exist_ok=True)
    atomic_write_text(directory / "config.yaml", dump(submission.config))
    for name, text in render_scripts(submission, directory).items():
        atomic_write_text(directory / name, text)
