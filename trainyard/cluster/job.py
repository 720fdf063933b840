"""The job that the supervisor runs in: one of Slurm, or a process on this machine."""

import os
import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path

from trainyard.cluster import slurm
from trainyard.core.errors import UserError

NOT_SEEN = 7
"""Exit code of a task that does not see a file; srun itself uses others."""


class Job:
    """The job that the supervisor runs in: a process on this machine, without Slurm."""

    def __init__(self) -> None:
        self.job_id, self.node_count = str(os.getpid()), 1
        self.nodes = "this machine"
        """Host list, for messages."""

    def start(self, command: Sequence[str], nodes: int) -> subprocess.Popen[bytes]:
        """Start a command once on each of this many nodes."""
        return subprocess.Popen(command, start_new_session=True)

    def sees_on_all_nodes(self, file: Path) -> bool:
        """False if a node does not see a file; True also if that is not known."""
        return True

    def end_steps(self) -> None:
        """End what runs on the nodes, such as what a killed supervisor of this job has left. Raises UserError if it
        does not end. Here ranks end with their launcher, and the run directory is locked until then."""

    def failed_nodes(self, nodes: str) -> dict[str, str]:
        """Nodes of a host list that cannot run another attempt, with their state."""
        return {}

    def is_cancelled(self) -> bool:
        """True if a user ended the job. Asked after a SIGTERM that no notice of a time limit preceded."""
        return False

    def requeue(self) -> bool:
        """Run the job again from its start, on other nodes if some failed. False if that is not possible."""
        return False


class SlurmJob(Job):
    """A Slurm job, seen from its batch script."""

    def __init__(self, step_options: Sequence[str] = ()) -> None:
        """`step_options` are options of srun for the ranks, such as their container."""
        self.step_options = step_options
        try:
            self.job_id, self.nodes = os.environ["SLURM_JOB_ID"], os.environ["SLURM_JOB_NODELIST"]
            self.node_count = int(os.environ["SLURM_JOB_NUM_NODES"])
        except KeyError as error:
            raise UserError(
                f"{error.args[0]} is not set; this command runs in the script of trainyard submit"
            ) from None

    def start(self, command: Sequence[str], nodes: int) -> subprocess.Popen[bytes]:
        # Not --unbuffered: it gives the tasks a terminal, and the log would fill with progress bars.
        environment = slurm.step_environment(os.environ) | {"PYTHONUNBUFFERED": "1"}
        srun = ["srun", f"--nodes={nodes}", f"--ntasks={nodes}", "--ntasks-per-node=1", "--kill-on-bad-exit=1"]
        srun += ["--cpu-bind=none", *self.step_options]  # srun may bind a task, here all ranks of a node, to one CPU
        return subprocess.Popen([*srun, *command], env=environment, start_new_session=True)

    def sees_on_all_nodes(self, file: Path) -> bool:
        probe = ["srun", f"--nodes={self.node_count}", f"--ntasks={self.node_count}", "--ntasks-per-node=1"]
        probe += ["sh", "-c", f"test -e {shlex.quote(str(file))} || exit {NOT_SEEN}"]
        done = subprocess.run(probe, env=slurm.step_environment(os.environ), stderr=subprocess.DEVNULL, check=False)
        return done.returncode != NOT_SEEN

    def end_steps(self) -> None:
        slurm.end_steps(self.job_id)

    def failed_nodes(self, nodes: str) -> dict[str, str]:
        return slurm.troubled_nodes(nodes)

    def is_cancelled(self) -> bool:
        info = slurm.job_info(self.job_id)
        if info is None or info.state != "COMPLETING":  # which hides what the job will be
            return info is not None and info.state == "CANCELLED"
        return not slurm.troubled_nodes(self.nodes)

    def requeue(self) -> bool:
        slurm.requeue(self.job_id)
        return True
