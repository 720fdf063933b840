"""The batch script of a run: readable, and complete without trainyard's help to understand it."""

import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from trainyard.cluster.job_record import LOG_DIRECTORY


@dataclass(frozen=True)
class BatchOptions:
    """Resources of a job, by the names of sbatch's options."""

    nodes: str
    """Number of nodes, or a range such as 2-4."""
    partition: str | None = None
    time: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    reservation: str | None = None
    gpus_per_node: int | None = None
    exclusive: bool = True
    notice_s: int = 120
    """Seconds before the time limit at which the run saves and the job is requeued; 0: no notice."""
    extra: tuple[str, ...] = ()
    """Other options of sbatch, as they are."""


RESTART_IF_KILLED = """\
code=137
while [ $code = 137 ]; do
    {command} &
    child=$!
    trap 'kill -TERM $child' TERM
    trap 'kill -USR1 $child' USR1
    while code=0; wait $child || code=$?; kill -0 $child 2>/dev/null; do :; done  # a signal ends wait, not the child
done
exit $code"""
"""137: killed by SIGKILL."""


def render_script(
    name: str,
    directory: Path,
    options: BatchOptions,
    commands: Iterable[Sequence[str]],
    purpose: str,
) -> str:
    """A script that runs commands on the first node of the job, one after the other. The last one gets the signals that
    Slurm sends to the script, and is started again if something kills it, such as the kernel for lack of memory."""
    *first, last = [shlex.join(command) for command in commands]
    named = ("partition", "time", "account", "qos", "constraint", "reservation")
    directives = [f"--job-name={name}", f"--nodes={options.nodes}"]
    if options.nodes.isdigit():  # with a range, Slurm would take this for the total of the fewest nodes, and give those
        directives.append("--ntasks-per-node=1")
    directives += [f"--{key}={value}" for key in named if (value := getattr(options, key))]
    directives += [f"--gpus-per-node={options.gpus_per_node}"] if options.gpus_per_node else []
    directives += ["--exclusive"] if options.exclusive else []
    directives += [
        "--requeue",
        *([f"--signal=B:USR1@{options.notice_s}"] if options.notice_s else []),
        "--open-mode=append",
        f"--output={directory / LOG_DIRECTORY}/%j.log",
        *options.extra,
    ]
    lines = [
        "#!/bin/bash",
        *(f"#SBATCH {directive}" for directive in directives),
        "",
        f"# {purpose}",
        "set -euo pipefail",
        "ulimit -S -n $(ulimit -H -n)  # sockets and files: a rank has some for every other rank",
        "ulimit -S -l $(ulimit -H -l)  # locked memory: network adapters and devices map it",
        "",
        *first,
        *RESTART_IF_KILLED.format(command=last).splitlines(),
    ]
    return "\n".join(lines) + "\n"
