"""Environment variables of Trainium's runtime and compilers, as pure functions of the run.

The user's settings win (`merge_env`); contradictions are one-line errors. docs/guides/trainium.md explains them all.
"""

from collections.abc import Mapping

from trainyard.core.errors import UserError
from trainyard.core.quantities import counted
from trainyard.core.world import World
from trainyard.devices.neuron.topology import LNC_CHOICES, check_lnc

LNC_VARIABLE = "NEURON_LOGICAL_NC_CONFIG"
CORES_VARIABLE = "NEURON_RT_VISIBLE_CORES"
FLAGS_VARIABLE = "NEURON_CC_FLAGS"

PROCESS_START_ENV = {"MALLOC_ARENA_MAX": "64"}
"""Read by the C library at process start: without it, many threads leave many half-empty arenas in host memory."""

RUNTIME_ENV = {
    "NEURON_RT_EXEC_TIMEOUT": "600",  # seconds; the default 30 is less than a rank may wait for others to compile
    "NEURON_RT_STOCHASTIC_ROUNDING_EN": "0",  # precision.kind=bf16_sr rounds in the optimizer instead
}
EFA_ENV = {"FI_PROVIDER": "efa", "FI_EFA_USE_DEVICE_RDMA": "1", "FI_EFA_FORK_SAFE": "1"}

XLA_ENV = {
    "PJRT_DEVICE": "NEURON",
    "XLA_USE_BF16": "0",  # the model sets dtypes; these two would also downcast fp32 master weights
    "XLA_DOWNCAST_BF16": "0",
    "XLA_USE_32BIT_LONG": "1",  # gathers with 64-bit indices are hundreds of times slower
    "XLA_DISABLE_FUNCTIONALIZATION": "0",
    "NEURON_FUSE_SOFTMAX": "1",
    "NEURON_RT_ASYNC_EXEC_MAX_INFLIGHT_REQUESTS": "3",  # steps in the runtime's queue; removed in Neuron 2.31
}

PRECISION_FLAGS = {
    "fp32": ("--auto-cast=none",),
    "bf16": ("--auto-cast=none", "--enable-mixed-precision-accumulation"),
    "bf16_sr": ("--auto-cast=none", "--enable-mixed-precision-accumulation"),
}
"""Compiler flags by precision.kind: dtypes stay as given, and bf16 matmuls accumulate in fp32."""


def _read_int(environ: Mapping[str, str], name: str, default: int) -> int:
    value = environ.get(name, str(default))
    if not value.isdigit():
        raise UserError(f"{name}={value}: must be a number")
    return int(value)


def resolve_lnc(generation: str, requested: int | None, environ: Mapping[str, str]) -> int:
    """Physical cores per rank: device.lnc, else the environment variable, else the default."""
    env_value = environ.get(LNC_VARIABLE)
    if requested is None:
        lnc = _read_int(environ, LNC_VARIABLE, LNC_CHOICES[generation][0])
    elif env_value not in (None, str(requested)):
        raise UserError(f"{LNC_VARIABLE}={env_value}: conflicts with device.lnc={requested}; remove one of them")
    else:
        lnc = requested
    check_lnc(generation, lnc)
    return lnc


def visible_core(visible: str | None, local_rank: int, local_ranks: int) -> str:
    """The core of one rank. `visible` is the user's setting: this rank's core, or all cores that the ranks share."""
    if not visible:
        return str(local_rank)
    cores = _parse_core_list(visible)
    if len(cores) == 1:
        return visible
    if len(cores) < local_ranks:
        raise UserError(
            f"{CORES_VARIABLE}={visible}: {counted(len(cores), 'core')} for "
            f"{counted(local_ranks, 'rank')}; each needs one"
        )
    return str(cores[local_rank])


def _parse_core_list(visible: str) -> list[int]:
    cores: list[int] = []
    for item in visible.split(","):
        first, _, last = item.strip().partition("-")
        if not first.isdigit() or not (last or first).isdigit() or int(last or first) < int(first):
            raise UserError(f"{CORES_VARIABLE}={visible}: not a list of cores such as 0-3 or 0,1,2,3")
        cores += range(int(first), int(last or first) + 1)
    return cores


def _common_environment(world: World, visible: str | None) -> dict[str, str]:
    """Variables that both runtimes read."""
    efa = EFA_ENV if world.hosts > 1 else {}
    return RUNTIME_ENV | efa | {CORES_VARIABLE: visible_core(visible, world.local_rank, world.local_size)}


def native_environment(lnc: int, world: World, cache: str, visible: str | None = None) -> dict[str, str]:
    """Variables for torch-neuronx 2.13 and later, which finds its root address through the ranks' store."""
    return {
        **_common_environment(world, visible),
        LNC_VARIABLE: str(lnc),
        "TORCH_NEURONX_NEFF_CACHE_DIR": cache,  # default: /tmp; its locks stay in /tmp, on a local disk
        "TORCH_NEURONX_DISABLE_FALLBACK_EXECUTION": "1",  # a graph that does not compile is an error instead of slow
    }


def xla_environment(
    generation: str, lnc: int, precision: str, world: World, cache: str, visible: str | None = None
) -> dict[str, str]:
    """Variables for torch_xla with torch-neuronx up to 2.9, which configures its client for ranks only under
    torchrun."""
    variables = {
        **_common_environment(world, visible),
        **XLA_ENV,
        "NEURON_COMPILE_CACHE_URL": cache,
        FLAGS_VARIABLE: " ".join(compiler_flags(generation, lnc, precision)),
        "NEURON_PJRT_WORLD_SIZE": str(world.size),
        "NEURON_PJRT_PROCESS_INDEX": str(world.rank),
        "PJRT_LOCAL_PROCESS_COUNT": str(world.local_size),
        "PJRT_LOCAL_PROCESS_RANK": str(world.local_rank),
    }
    if len(LNC_CHOICES[generation]) > 1:
        variables[LNC_VARIABLE] = str(lnc)
    if world.master_port:
        variables["NEURON_RT_ROOT_COMM_ID"] = root_comm_id(world)
    return variables


def compiler_flags(generation: str, lnc: int, precision: str) -> list[str]:
    """Flags of neuronx-cc and its wrapper."""
    return [
        "--model-type=transformer",
        *PRECISION_FLAGS[precision],
        *(["--enable-saturate-infinity"] if generation == "trn1" else []),  # trn1 turns infinities into NaN
        *([f"--lnc={lnc}"] if len(LNC_CHOICES[generation]) > 1 else []),
        "--retry_failed_compilation",  # a cached failure would fail every later run
    ]


def root_comm_id(world: World) -> str:
    """Address next to the rendezvous port: the package's default is one fixed port for all runs of a host."""
    host = world.master_addr
    if ":" in host and not host.startswith("["):  # a bare IPv6 address
        host = f"[{host}]"
    return f"{host}:{world.master_port + 1}"


def check_precision(precision: str) -> None:
    if precision not in PRECISION_FLAGS:
        raise UserError(f"precision.kind={precision}: not on Trainium, whose 8-bit formats differ; nearest: bf16")


def merge_env(defaults: Mapping[str, str], environ: Mapping[str, str]) -> dict[str, str]:
    """Return the changes to an environment; variables that the user has set stay. Compiler flags are merged, the user's
    last, and a user's flag replaces the default. The visible cores become this rank's share of the user's cores."""
    changes = {name: value for name, value in defaults.items() if name not in environ or name == CORES_VARIABLE}
    if FLAGS_VARIABLE in defaults and FLAGS_VARIABLE in environ:
        users = {flag.partition("=")[0] for flag in environ[FLAGS_VARIABLE].split()}
        kept = [flag for flag in defaults[FLAGS_VARIABLE].split() if flag.partition("=")[0] not in users]
        changes[FLAGS_VARIABLE] = " ".join([*kept, environ[FLAGS_VARIABLE]])
    return changes
