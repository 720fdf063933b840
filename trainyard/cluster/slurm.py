"""Slurm's commands, as far as this package uses them: sbatch, srun, scontrol, squeue, sinfo and scancel."""

import re
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from trainyard.core.errors import UserError
from trainyard.core.quantities import counted
from trainyard.core.world import host_name

STEP_POLL_S = 1.0
TIMEOUT_S = 60
"""Longest wait for an answer of the controller."""
PENDING_STATES = ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "RESV_DEL_HOLD", "SPECIAL_EXIT")
RUNNING_STATES = ("RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT")
NODE_TROUBLE = ("DOWN", "DRAIN", "FAIL", "NOT_RESPONDING", "POWERED_DOWN", "UNKNOWN")
"""Parts of the state of a node that cannot run a step."""
NO_CLUSTER = "Could not establish a configuration source"
"""Error of Slurm's commands on a machine that has neither slurm.conf nor a controller in the DNS."""

MUNGE_FAILURE = re.compile(r"Munge (?:encode|decode) failed: (.*?)(?: \(Did you start munged\?\))?$", re.MULTILINE)
"""One of the lines of Slurm's commands on a host without munged, which name the command that failed last."""


class JobInfo(NamedTuple):
    """A job as the controller describes it."""

    job_id: str
    state: str
    reason: str
    nodes: str
    """Host list such as n[1-4]; empty before the job starts."""
    time_left: str
    restarts: int

    @property
    def pending(self) -> bool:
        return self.state in PENDING_STATES

    @property
    def running(self) -> bool:
        return self.state in RUNNING_STATES


def available() -> bool:
    """True if this machine has Slurm's commands and a cluster for them, whether or not its controller answers now."""
    if shutil.which("sbatch") is None:
        return False
    try:
        run_command(["scontrol", "ping"])
    except UserError as error:
        return NO_CLUSTER not in str(error)
    return True


def run_command(command: Sequence[str]) -> str:
    """Run one of Slurm's commands. Its error message becomes a UserError of one line."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except FileNotFoundError:
        raise UserError(f"{command[0]}: not found; this command needs Slurm") from None
    except subprocess.TimeoutExpired:
        raise UserError(f"{command[0]}: no answer from Slurm's controller within {TIMEOUT_S} s") from None
    if done.returncode:
        text = done.stderr.strip() or done.stdout.strip() or f"exit code {done.returncode}"
        if munge := MUNGE_FAILURE.search(text):
            raise UserError(f"{command[0]}: munge does not work on {host_name()}: {munge[1]}; nearest: start munged")
        # Such as "sbatch: error: Batch job submission failed: Invalid partition name specified"
        lines = [re.sub(rf"^{command[0]}: (error: |fatal: )?", "", line) for line in text.splitlines()]
        raise UserError(f"{command[0]}: {'; '.join(dict.fromkeys(lines))}")
    return done.stdout


def submit_script(script: str, options: Sequence[str] = ()) -> str:
    """Submit a batch script and return the id of its job."""
    return run_command(["sbatch", "--parsable", *options, script]).strip().partition(";")[0]


def job_info(job_id: str) -> JobInfo | None:
    """Ask the controller about a job; None if it has forgotten it, some minutes after the end of the job."""
    try:
        text = run_command(["scontrol", "--oneliner", "show", "job", job_id])
    except UserError as error:
        if "Invalid job id" in str(error):
            return None
        raise
    fields = parse_fields(text)
    left = run_command(["squeue", "--noheader", "--jobs", job_id, "--states", "all", "--format", "%L"]).split()
    return JobInfo(
        job_id,
        fields.get("JobState", "UNKNOWN"),
        fields.get("Reason", "None"),
        fields.get("NodeList", "").replace("(null)", ""),
        left[0] if left else "",
        int(fields.get("Restarts", "0")),
    )


def parse_fields(line: str) -> dict[str, str]:
    """The KEY=VALUE fields of a line of `scontrol --oneliner`. Values may contain spaces."""
    starts = list(re.finditer(r"(?:^|(?<=\s))([A-Za-z][\w:/]*)=", line))
    ends = [match.start() for match in starts[1:]] + [len(line)]
    return {match[1]: line[match.end() : end].strip() for match, end in zip(starts, ends, strict=True)}


def release(job_id: str) -> None:
    """Let a held job start."""
    run_command(["scontrol", "release", job_id])


def requeue(job_id: str) -> None:
    """Run a job again from its start. Slurm may have done so already, because a node failed."""
    try:
        run_command(["scontrol", "requeue", job_id])
    except UserError as error:
        if "Job is pending execution" not in str(error):
            raise


def end_steps(job_id: str) -> None:
    """End all steps of a job that srun started, and wait for that. The batch script continues."""
    query = ["squeue", "--noheader", "--steps", "--jobs", job_id, "--format", "%i"]
    deadline = time.monotonic() + TIMEOUT_S
    while steps := [step for step in run_command(query).split() if step.partition(".")[2].isdigit()]:
        if time.monotonic() > deadline:
            raise UserError(f"steps {', '.join(steps)} of job {job_id} do not end")
        run_command(["scancel", *steps])
        time.sleep(STEP_POLL_S)


def cancel(job_ids: Sequence[str]) -> None:
    run_command(["scancel", *job_ids])


def expand_hosts(nodes: str) -> list[str]:
    """The hosts of a list such as n[1-4]."""
    return run_command(["scontrol", "show", "hostnames", nodes]).split()


def troubled_nodes(nodes: str) -> dict[str, str]:
    """The nodes of a host list that cannot run a step, with their state."""
    lines = run_command(["scontrol", "--oneliner", "show", "node", nodes]).splitlines()
    states = {fields["NodeName"]: fields["State"] for line in lines if (fields := parse_fields(line))}
    return {name: state for name, state in states.items() if any(word in state for word in NODE_TROUBLE)}


def check_partition(partition: str) -> None:
    """Raise UserError that lists the partitions if there is none of this name."""
    names = run_command(["sinfo", "--noheader", "--format", "%R"]).split()
    for name in partition.split(","):
        if name not in names:
            raise UserError(f"--partition {name}: no such partition; nearest: {', '.join(dict.fromkeys(names))}")


def check_node_count(nodes: int, partition: str | None) -> None:
    """Raise UserError if a partition (None: the default one) has too few nodes, whatever their state."""
    lines = run_command(["sinfo", "--noheader", "--format", "%P %D"]).splitlines()
    sizes: dict[str, int] = {}
    for name, count in map(str.split, lines):  # several lines for a partition, by the state of its nodes
        sizes[name] = sizes.get(name, 0) + int(count)
    names = partition.split(",") if partition else [name for name in sizes if name.endswith("*")]
    largest = max((sizes.get(name, sizes.get(f"{name}*", 0)) for name in names), default=nodes)
    if nodes > largest:
        where = ", ".join(name.rstrip("*") for name in names)
        raise UserError(
            f"--nodes {nodes}: partition {where} has {counted(largest, 'node')}; nearest: --nodes {largest}"
        )


def check_script(script: str) -> None:
    """Raise UserError if sbatch would refuse a script. That no node is free or works now is no reason to refuse it."""
    try:
        run_command(["sbatch", "--test-only", script])
    except UserError as error:
        if "node configuration is not available" not in str(error):
            raise


def step_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """An environment for srun inside a batch script: without variables of the script that srun takes for options."""
    dropped = ("SLURM_CPU_BIND", "SLURM_EXPORT_ENV", "SLURM_GTIDS", "SLURM_LABELIO")
    return {name: value for name, value in environ.items() if not name.startswith(dropped)}
