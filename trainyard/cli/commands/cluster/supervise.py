"""`trainyard supervise`: Start the ranks of a run inside its job, and again if they fail."""

import os
import sys
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from trainyard.cli.options import ContainerImage, ContainerMounts, ContainerRuntime
from trainyard.cluster.batch_script import NOTICED_VARIABLE, Container
from trainyard.cluster.job import Job, SlurmJob
from trainyard.cluster.supervisor import Supervisor


def supervise(
    directory: Annotated[Path, Argument(metavar="RUN", help="Run directory that trainyard submit created.")],
    nproc: Annotated[int, Option(min=1, help="Ranks on each node.")] = 1,
    hang_timeout: Annotated[
        float, Option(min=0, help="End a run that makes no step for this many seconds; 0: never.")
    ] = 600,
    container_image: ContainerImage = None,
    container_mounts: ContainerMounts = None,
    container_runtime: ContainerRuntime = None,
    local: Annotated[bool, Option("--local", help="Run on this machine, without Slurm.")] = False,
) -> int:
    """Start the ranks of a run on every node of this job, and again from the latest checkpoint if they fail.

    The batch script of trainyard submit calls this.

    Example:

      trainyard supervise runs/llama3-70b --nproc 32
    """
    noticed = os.environ.pop(NOTICED_VARIABLE, "") != ""  # its ranks must not inherit that
    if local:
        sys.stdin.read()  # until trainyard submit has written the record of this job
    container = Container.from_options(container_image, container_mounts, container_runtime)
    job = Job() if local else SlurmJob(container.step_options(directory) if container else ())
    python = container.python(directory) if container else [sys.executable]
    command = [*python, "-m", "trainyard", "train", str(directory), "--continue", "--nproc", str(nproc)]
    options = ["--hang-timeout", str(hang_timeout)]
    return Supervisor(directory, job, [*command, *options]).run(asked_to_stop=noticed)
