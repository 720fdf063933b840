"""The environment that Trainium's runtime and compilers read, as pure functions of what a run is.

What the user has set wins (`settled`); what cannot work together is one line. docs/trainium.md says why each is set.
"""

from collections.abc import Mapping
from typing import NamedTuple

from trainyard.core.errors import UserError
from trainyard.devices.neuron.topology import LNC_CHOICES, check_lnc

LNC_VARIABLE = "NEURON_LOGICAL_NC_CONFIG"
CORES_VARIABLE = "NEURON_RT_VISIBLE_CORES"
FLAGS_VARIABLE = "NEURON_CC_FLAGS"

PROCESS_START_ENV = {"MALLOC_ARENA_MAX": "64"}
"""Read by the C library when a process starts: without it many threads leave many half-empty arenas in host memory."""

RUNTIME_ENV = {
    "NEURON_RT_EXEC_TIMEOUT": "600",  # seconds; by itself 30, less than a rank may wait for others that compile
    "NEURON_RT_STOCHASTIC_ROUNDING_EN": "0",  # precision.kind=bf16_sr rounds in the update, by numbers of our own
}
EFA_ENV = {"FI_PROVIDER": "efa", "FI_EFA_USE_DEVICE_RDMA": "1", "FI_EFA_FORK_SAFE": "1"}

XLA_ENV = {
    "PJRT_DEVICE": "NEURON",
    "XLA_USE_BF16": "0",  # we say which tensors are bf16; these two would take fp32 masters along
    "XLA_DOWNCAST_BF16": "0",
    "XLA_USE_32BIT_LONG": "1",  # gathers with 64-bit indices are hundreds of times slower
    "XLA_DISABLE_FUNCTIONALIZATION": "0",
    "NEURON_FUSE_SOFTMAX": "1",
    "NEURON_RT_ASYNC_EXEC_MAX_INFLIGHT_REQUESTS": "3",  # steps that wait in the runtime's queue; gone from Neuron 2.31
}

PRECISION_FLAGS = {
    "fp32": ("--auto-cast=none",),
    "bf16": ("--auto-cast=none", "--enable-mixed-precision-accumulation"),
    "bf16_sr": ("--auto-cast=none", "--enable-mixed-precision-accumulation"),
}
"""Compiler flags by precision.kind: tensors have the types we gave them, sums of bf16 products are fp32."""


class LaunchInfo(NamedTuple):
    """Where a process stands among all ranks, as its launcher told it."""

    rank: int = 0
    ranks: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    """Ranks on this host."""
    master_addr: str = "localhost"
    port: int = 0
    """Where ranks meet; 0: nowhere."""

    @property
    def hosts(self) -> int:
        return -(-self.ranks // self.local_world_size)


def read_launch_info(environ: Mapping[str, str]) -> LaunchInfo:
    """torchrun's variables, which our own launcher sets too. Without LOCAL_WORLD_SIZE all ranks are on one host."""
    names = {"rank": "RANK", "ranks": "WORLD_SIZE", "local_rank": "LOCAL_RANK", "port": "MASTER_PORT"}
    numbers: dict[str, int] = {}
    for field, name in names.items():
        if name in environ:
            numbers[field] = _parse_int(name, environ[name])
    ranks = numbers.get("ranks", 1)
    local = _parse_int("LOCAL_WORLD_SIZE", environ.get("LOCAL_WORLD_SIZE", str(ranks)))
    return LaunchInfo(**numbers, local_world_size=max(local, 1), master_addr=environ.get("MASTER_ADDR", "localhost"))


def _parse_int(name: str, value: str) -> int:
    if not value.isdigit():
        raise UserError(f"{name}={value}: must be a number")
    return int(value)


def resolve_lnc(generation: str, requested: int | None, environ: Mapping[str, str]) -> int:
    """Physical cores of a rank: device.lnc, else the environment's, else the usual."""
    found = environ.get(LNC_VARIABLE)
    if requested is None:
        lnc = LNC_CHOICES[generation][0] if found is None else _parse_int(LNC_VARIABLE, found)
    elif found not in (None, str(requested)):
        raise UserError(f"{LNC_VARIABLE}={found}: device.lnc={requested} needs {requested}; leave one of them out")
    else:
        lnc = requested
    check_lnc(generation, lnc)
    return lnc


def visible_core(visible: str | None, local_rank: int, local_ranks: int) -> str:
    """The core of one rank. `visible` is what the user has set: this rank's own core, or all that the ranks share."""
    if not visible:
        return str(local_rank)
    cores = _parse_core_list(visible)
    if len(cores) == 1:
        return visible
    if len(cores) < local_ranks:
        raise UserError(f"{CORES_VARIABLE}={visible}: {len(cores)} cores for {local_ranks} ranks; one core each")
    return str(cores[local_rank])


def _parse_core_list(visible: str) -> list[int]:
    cores: list[int] = []
    for piece in visible.split(","):
        first, _, last = piece.strip().partition("-")
        if not first.isdigit() or not (last or first).isdigit() or int(last or first) < int(first):
            raise UserError(f"{CORES_VARIABLE}={visible}: not a list of cores such as 0-3 or 0,1,2,3")
        cores += range(int(first), int(last or first) + 1)
    return cores


def _common_environment(launch: LaunchInfo, visible: str | None) -> dict[str, str]:
    """What both runtimes read."""
    several = EFA_ENV if launch.hosts > 1 else {}
    return RUNTIME_ENV | several | {CORES_VARIABLE: visible_core(visible, launch.local_rank, launch.local_world_size)}


def native_environment(lnc: int, launch: LaunchInfo, cache: str, visible: str | None = None) -> dict[str, str]:
    """For torch-neuronx 2.13 and later. It finds its root address by itself, through the ranks' store."""
    return {
        **_common_environment(launch, visible),
        LNC_VARIABLE: str(lnc),
        "TORCH_NEURONX_NEFF_CACHE_DIR": cache,  # by itself in /tmp; locks stay there, on a disk of this host
        "TORCH_NEURONX_DISABLE_FALLBACK_EXECUTION": "1",  # a graph that does not compile is an error, not slow
    }


def xla_environment(
    generation: str, lnc: int, precision: str, launch: LaunchInfo, cache: str, visible: str | None = None
) -> dict[str, str]:
    """For torch_xla with torch-neuronx up to 2.9. It tells its client about ranks under torchrun alone."""
    variables = {
        **_common_environment(launch, visible),
        **XLA_ENV,
        "NEURON_COMPILE_CACHE_URL": cache,
        FLAGS_VARIABLE: " ".join(compiler_flags(generation, lnc, precision)),
        "NEURON_PJRT_WORLD_SIZE": str(launch.ranks),
        "NEURON_PJRT_PROCESS_INDEX": str(launch.rank),
        "PJRT_LOCAL_PROCESS_COUNT": str(launch.local_world_size),
        "PJRT_LOCAL_PROCESS_RANK": str(launch.local_rank),
    }
    if len(LNC_CHOICES[generation]) > 1:
        variables[LNC_VARIABLE] = str(lnc)
    if launch.ranks > 1 and launch.port:
        variables["NEURON_RT_ROOT_COMM_ID"] = root_comm_id(launch)
    return variables


def compiler_flags(generation: str, lnc: int, precision: str) -> list[str]:
    """Of neuronx-cc and its wrapper."""
    return [
        "--model-type=transformer",
        *PRECISION_FLAGS[precision],
        *(["--enable-saturate-infinity"] if generation == "trn1" else []),  # infinities become NaN there
        *([f"--lnc={lnc}"] if len(LNC_CHOICES[generation]) > 1 else []),
        "--retry_failed_compilation",  # a failure is kept too, and would fail every later run
    ]


def root_comm_id(launch: LaunchInfo) -> str:
    """Beside the port where ranks meet: the package's own choice is one fixed port for all runs of a host."""
    host = (
        f"[{launch.master_addr}]"
        if ":" in launch.master_addr and not launch.master_addr.startswith("[")
        else launch.master_addr
    )
    return f"{host}:{launch.port + 1}"


def check_precision(precision: str) -> None:
    if precision not in PRECISION_FLAGS:
        raise UserError(f"precision.kind={precision}: not on Trainium, whose 8-bit numbers are others; nearest: bf16")


def merge_env(wanted: Mapping[str, str], environ: Mapping[str, str]) -> dict[str, str]:
    """What to change in an environment: what the user has set stays. Compiler flags are put together, the user's last;
    a flag that the user gives replaces ours. The cores are this rank's part of what the user gave."""
    changes = {name: value for name, value in wanted.items() if name not in environ or name == CORES_VARIABLE}
    if FLAGS_VARIABLE in wanted and FLAGS_VARIABLE in environ:
        theirs = environ[FLAGS_VARIABLE]
        given = {word.partition("=")[0] for word in theirs.split()}
        ours = [flag for flag in wanted[FLAGS_VARIABLE].split() if flag.partition("=")[0] not in given]
        changes[FLAGS_VARIABLE] = " ".join([*ours, theirs])
    return changes
