"""What a device answers. Everything else in the tree asks these questions instead of naming a device."""

import platform
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Thread
from typing import Any, NamedTuple, Protocol

import torch

from trainyard.kernels.reference import Kernels


@dataclass(frozen=True)
class PeakThroughput:
    """Dense matrix throughput that MFU is measured against."""

    flops: float
    """FLOP/s."""
    source: str
    """Where the number comes from: a data sheet, or a measurement made now."""


class HostCopy(NamedTuple):
    """Tensors on their way to the host."""

    wait: Callable[[], None]
    """Until the host may read them, in any thread."""
    fence: Callable[[], None]
    """What the device is given after this may change them."""


class CompileOptions(NamedTuple):
    """How torch.compile is to be asked."""

    backend: str = "inductor"
    options: dict[str, Any] | None = None
    """One object for all that is compiled: a backend may write into it, and blocks share a graph where options are
    equal."""
    static_shapes: bool = False
    """Every shape is a graph of its own, and no part of a function may stay outside."""


class DeviceCollectives(Protocol):
    """What ranks of a group do together, on a device that torch's functional collectives do not do for."""

    def all_reduce(self, x: torch.Tensor, op: str) -> torch.Tensor:
        """`op` is "sum" or "max"."""

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """[n, ...] of each rank to [size * n, ...], in the group's order."""

    def reduce_scatter(self, x: torch.Tensor) -> torch.Tensor:
        """[size * n, ...] of each rank to this rank's [n, ...] of their sum."""


class Device(ABC):
    name: str
    process_group_backend: str
    """Backend name for torch.distributed."""
    synchronous: bool
    """Work is finished when the call returns (no queue to wait for)."""
    max_logits_bytes: int
    """fp32 logits that the loss holds at a time: enough for efficient products, no more."""
    attention_kernels: tuple[str, ...] = ()
    """Attention kernels that can be asked for by name."""

    @property
    def torch_device(self) -> torch.device:
        return torch.device(self.name)

    @classmethod
    @abstractmethod
    def available(cls) -> bool:
        """Whether this machine has one."""

    @classmethod
    def unavailable_reason(cls) -> str:
        """What to say where there is none."""
        return "not on this machine"

    @abstractmethod
    def describe(self) -> str:
        """One phrase for people: what the run is on."""

    @abstractmethod
    def peak_throughput(self, dtype: torch.dtype) -> PeakThroughput | None:
        """Dense matrix throughput in `dtype`; None where it is unknown."""

    @abstractmethod
    def max_memory_allocated(self) -> int:
        """Most bytes this process has held on the device so far."""

    memory_model = "cpu"
    """How its memory is planned: a name in plan/memory/device_kinds.py."""

    def memory_per_rank(self, local_ranks: int) -> int | None:
        """Bytes that one of `ranks` ranks of this machine can hold at most; None where it is not known."""
        return None

    @abstractmethod
    def max_local_ranks(self) -> int:
        """How many ranks this machine takes at once."""

    def rank_order(self, tp: int, world_size: int) -> list[int] | None:
        """The rank at each place of a layout, where tensor-parallel ranks should not simply be neighbours."""
        return None

    def collectives(self, groups: list[list[int]]) -> DeviceCollectives | None:
        """How ranks of such groups (all of one kind) work together; None: by torch's functional collectives."""
        return None

    @property
    def init_device(self) -> torch.device:
        """Where initial weights are made: products of 64-bit integers must be exact there."""
        return self.torch_device

    def supports_group(self, ranks: Sequence[int]) -> bool:
        """Whether these ranks can be a group that sums."""
        return True

    def rank_environment(self) -> dict[str, str]:
        """What ranks must find in their environment when they start, as far as the user has not set it."""
        return {}

    def prepare(
        self, deterministic: bool, local_rank: int = 0, precision: str = "fp32", lnc: int | None = None
    ) -> None:
        """Before the first work: settings that hold for the whole run."""
        return

    def architecture(self) -> str:
        """What compiled code depends on: it serves devices that say the same."""
        return platform.machine()

    decomposes_attention = False
    """Whether attention across ranks or within documents is to be plain operations, over gathered keys and values, that
    the device's compiler sees as it sees the rest. Graphs are then equal on all ranks."""

    fork_safe = False
    """Whether a process that has worked with tensors of this device may fork, and the child compile for it."""

    has_precompile_tool = False
    """Whether graphs are compiled ahead by a tool of the device's maker (parallel_compile.py), not by ours."""

    device_index_in_code = False
    """Whether tensors say which of a machine's devices they are on, and compiled code with them."""

    def compile_options(self) -> CompileOptions | None:
        """How functions are compiled; None where all work is compiled as it is."""
        return CompileOptions()

    def flush(self) -> None:
        """A piece of a step ends here: a device that traces before it works sends what it has."""
        return

    def synchronize(self) -> None:
        """Wait until everything queued is done."""
        return

    def kernels(self, fused: bool = True) -> Kernels:
        """What models ask for besides matrix products: kernels of the device's `own`, or plain torch."""
        return Kernels()

    @contextmanager
    def sdpa_priority(self, preferred: str = "auto") -> Iterator[None]:
        """Attention kernels in the order in which they pay on this device, or another of `attentions` first."""
        yield

    supports_graphs = False
    """Whether `record` does."""

    def capture_graph(self, work: Callable[[], None]) -> Callable[[], None]:
        """What `work` queues, recorded without being done; the call that is returned queues it again, all at once."""
        return work

    def copy_to_host(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Start copying to the host now; the call that is returned waits for that copy and for nothing queued later."""
        return lambda: tensor

    def alloc_host_buffer(self, size: int, dtype: torch.dtype) -> torch.Tensor:
        """Uninitialised memory of the host that `copy_out` is fast to."""
        return torch.empty(size, dtype=dtype)

    def start_host_copies(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> HostCopy:
        """Start to copy each (tensor of the device, memory of the host), beside other work."""

        def copy() -> None:
            for tensor, host in pairs:
                host.copy_(tensor)

        thread = Thread(target=copy, daemon=True)
        thread.start()
        return HostCopy(thread.join, thread.join)

    def get_rng_state(self) -> torch.Tensor | None:
        """Of the device's own generator, where it has one besides the host's."""
        return None

    def set_rng_state(self, state: torch.Tensor) -> None:
        return

    def pin_memory(self, host: torch.Tensor) -> torch.Tensor:
        """The same in memory that the device copies from by itself."""
        return host

    def to_device(self, host: torch.Tensor) -> torch.Tensor:
        """Copy a host tensor to the device without waiting for it."""
        return host.to(self.torch_device)
