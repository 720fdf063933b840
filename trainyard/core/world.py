"""World: this process's rank among the processes of a run, as its launcher assigned it.

Only commands and the Trainer's default read the launcher's environment variables. Everything below takes a World, so
that several dry runs of different ranks can live in one process.
"""

import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain, repeat
from typing import NamedTuple, NoReturn, Self
from zlib import crc32

from trainyard.core.errors import UserError

LOOPBACK = "127.0.0.1"
MAX_PORT = 65535
FIRST_DERIVED_PORT = 61440
"""Above Linux's range for outgoing connections, 32768 to 60999."""
SLURM_JOB_VARIABLES = ("SLURM_JOB_ID", "SLURM_STEP_ID")
MPI_JOB_VARIABLES = ("SLURM_JOB_ID", "PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "PMI_JOBID")
"""Variables that name a job, equal on all its ranks. They determine its port if MASTER_PORT is not set."""
SHELL_STEPS = ("4294967290", "4294967291")
"""SLURM_STEP_ID of an interactive shell of salloc and of a batch script (INTERACTIVE_STEP, BATCH_SCRIPT in slurm.h)."""


class Launcher(NamedTuple):
    """The names of a launcher's variables."""

    rank: str
    size: str
    local_rank: str
    local_size: str


TORCHRUN = Launcher("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
SLURM = Launcher("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_TASKS_PER_NODE")
MPI = (
    Launcher(
        "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"
    ),
    Launcher("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE"),
    Launcher("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),  # MPICH and Intel MPI
    Launcher("PMI_RANK", "PMI_SIZE", "PMI_LOCAL_RANK", "PMI_LOCAL_SIZE"),  # Cray
)


@dataclass(frozen=True)
class World:
    """Rank and size as the launcher assigned them; by default a single process."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    """Index among the ranks of this host, which is also the index of its device."""
    local_size: int = 1
    """Ranks on this host."""
    master_addr: str = LOOPBACK
    """Host of rank 0, where the ranks meet."""
    master_port: int = 0
    """Port of rank 0; 0 if there is one rank."""

    @property
    def hosts(self) -> int:
        return -(-self.size // self.local_size)

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] = os.environ) -> Self:
        """Read the variables of torchrun (which `--nproc` sets too), MPI or Slurm. Raises UserError if they are
        incomplete or contradict each other: ranks that miss each other would train separate models, or wait."""
        launcher = _find_launcher(environ)
        if launcher is None:
            return cls()
        size = _read_int(environ, launcher.size, 1)
        rank = _read_int(environ, launcher.rank, 0, size - 1, launcher.size)
        if size == 1:
            return cls()
        known_local_size = _read_local_size(environ, launcher)
        local_size = min(known_local_size or size, size)
        local_rank = rank % local_size
        if environ.get(launcher.local_rank):
            local_rank = _read_int(environ, launcher.local_rank, 0, local_size - 1, launcher.local_size)
        return cls(rank, size, local_rank, local_size, *_read_master(environ, launcher, size, known_local_size))

    def torchrun_variables(self) -> dict[str, str]:
        """The variables that torchrun would set; torch, packages of devices and user functions read these names."""
        values = (self.rank, self.size, self.local_rank, self.local_size, self.master_addr, self.master_port)
        return dict(zip((*TORCHRUN, "MASTER_ADDR", "MASTER_PORT"), map(str, values), strict=True))


ONE_RANK = World()


def host_name() -> str:
    """The name of this host, as Slurm knows it."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def _find_launcher(environ: Mapping[str, str]) -> Launcher | None:
    """Whose variables to read. One launcher may run inside another: MPI starts its daemons through Slurm."""
    if environ.get(TORCHRUN.rank) or environ.get(TORCHRUN.size):
        return TORCHRUN
    for launcher in MPI:
        if environ.get(launcher.rank) and environ.get(launcher.local_rank):
            return launcher
    if environ.get(SLURM.rank) and not _is_slurm_shell(environ):
        return SLURM
    return next((launcher for launcher in MPI if environ.get(launcher.rank)), None)


def _is_slurm_shell(environ: Mapping[str, str]) -> bool:
    """True in a batch script or an interactive shell, which have the job's variables although srun started no ranks."""
    step = environ.get("SLURM_STEP_ID") or (SHELL_STEPS[1] if environ.get("ENVIRONMENT") == "BATCH" else "")
    return step in SHELL_STEPS or "SLURM_PTY_PORT" in environ


def _read_local_size(environ: Mapping[str, str], launcher: Launcher) -> int | None:
    """Ranks on this host; None if the launcher does not say."""
    if launcher is not SLURM:
        return _read_int(environ, launcher.local_size, 1) if environ.get(launcher.local_size) else None
    tasks = environ.get("SLURM_STEP_TASKS_PER_NODE") or environ.get(SLURM.local_size)
    if not tasks:
        return None
    # Such as 2(x3),1: two tasks on each of three nodes and one on the fourth
    groups = [re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", group) for group in tasks.split(",")]
    if not all(groups):
        raise UserError(f"{SLURM.local_size}={tasks}: not a list of tasks per node such as 2(x3),1")
    counts = list(chain(*(repeat(int(group[1]), int(group[2] or 1)) for group in groups if group)))
    return counts[_read_int(environ, "SLURM_NODEID", 0, len(counts) - 1, SLURM.local_size)]


def _read_master(environ: Mapping[str, str], launcher: Launcher, size: int, local_size: int | None) -> tuple[str, int]:
    """Address and port at which the ranks meet: MASTER_ADDR and MASTER_PORT, or derived from the job."""
    address, port = environ.get("MASTER_ADDR"), environ.get("MASTER_PORT")
    step_nodes = environ.get("SLURM_STEP_NODELIST") if launcher is SLURM else None  # MPI's daemons are a step, too
    nodes = step_nodes or environ.get("SLURM_JOB_NODELIST")
    if launcher is TORCHRUN and not (address and port):
        _fail_without("MASTER_PORT" if address else "MASTER_ADDR", launcher, size)
    if not address and local_size == size:
        address = LOOPBACK
    if not address and nodes:
        address = re.sub(r"\[(\d+)[^\]]*\]", r"\1", nodes).split(",")[0]  # the first of n[01-04,07],m1
    if not address:
        _fail_without("MASTER_ADDR", launcher, size)
    if port:
        return address, _read_int(environ, "MASTER_PORT", 1, MAX_PORT)
    names = SLURM_JOB_VARIABLES if launcher is SLURM else MPI_JOB_VARIABLES
    job = "/".join(environ.get(name, "") for name in names)
    pairs = (MAX_PORT - FIRST_DERIVED_PORT) // 2  # devices may use the next port too
    return address, FIRST_DERIVED_PORT + 2 * (crc32(job.encode()) % pairs)


def _fail_without(name: str, launcher: Launcher, size: int) -> NoReturn:
    raise UserError(
        f"{launcher.size}={size}: {name} is not set; set MASTER_ADDR to the host of rank 0 and MASTER_PORT to a free "
        "port there, the same for all ranks (torchrun, srun and --nproc do)"
    )


def _read_int(environ: Mapping[str, str], name: str, least: int, most: int | None = None, limit: str = "") -> int:
    """Read an integer from `least` to `most`; `limit` names the variable that `most` comes from."""
    value = environ.get(name, "").strip()
    if not value:
        raise UserError(f"{name} is not set, although other variables of the same launcher are")
    number = int(value) if re.fullmatch(r"-?\d{1,9}", value) else None
    if number is None or number < least or (most is not None and number > most):
        allowed = f"{least} or more" if most is None else f"{least} to {most}"
        raise UserError(f"{name}={value}: must be an integer, {allowed}" + (f", because of {limit}" if limit else ""))
    return number
