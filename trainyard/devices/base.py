"""The interface of a device. Other packages query this interface and never name a device."""

import platform
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import Any, NamedTuple, Protocol

import torch
from torch.profiler import ProfilerActivity

from trainyard.core.errors import UserError
from trainyard.core.world import ONE_RANK, World
from trainyard.devices.kind import DeviceKind
from trainyard.devices.stopwatch import HostStopwatch, Stopwatch
from trainyard.kernels.reference import Kernels


@dataclass(frozen=True)
class PeakThroughput:
    """Dense matrix throughput that MFU is measured against."""

    flops: float
    """FLOP/s."""
    source: str
    """Origin of the number: a data sheet or a measurement."""


class HostCopy(NamedTuple):
    """Device-to-host copies in progress."""

    wait: Callable[[], None]
    """Block until the host may read the copies; callable from any thread."""
    fence: Callable[[], None]
    """Order device work: whatever is queued after this call may overwrite the source tensors."""


class CompileOptions(NamedTuple):
    """Arguments for torch.compile."""

    backend: str | Callable[..., Any] = "inductor"
    options: dict[str, Any] | None = None
    """One object for all compiled functions: a backend may write into it, and blocks share a graph only if their
    options are equal."""
    static_shapes: bool = False
    """Compile one graph per shape and forbid graph breaks."""


class DeviceCollectives(Protocol):
    """Collectives of one group, for devices that torch's functional collectives do not support."""

    def all_reduce(self, x: torch.Tensor, op: str) -> torch.Tensor:
        """Reduce over the group; `op` is "sum" or "max"."""

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """Gather [n, ...] of each rank to [size * n, ...], in group order."""

    def reduce_scatter(self, x: torch.Tensor) -> torch.Tensor:
        """Sum [size * n, ...] over ranks and return this rank's [n, ...]."""

    def all_to_all(self, x: torch.Tensor) -> torch.Tensor:
        """[size * n, ...] with n rows for every rank to the rows that the ranks have for this one, in group order."""


class Device(ABC):
    """A device of one kind: what it is, what it supports, and how to move data to and from it."""

    kind: DeviceKind
    name: str
    """torch's name for it."""
    process_group_backend: str
    """Backend name for torch.distributed."""
    carries_objects = True
    """False if pickled objects need a group of the host (gloo): the backend traces its tensors, or casts their bits."""
    synchronous: bool
    """True if work is complete when a call returns (there is no queue)."""
    fork_safe = False
    """True if a process may fork after using tensors of this device, and the child may compile for it."""
    has_precompile_tool = False
    """True if the vendor's tool precompiles graphs (neuron/parallel_compile.py) instead of `preflight/precompile`."""
    device_index_in_code = False
    """True if compiled code contains the device index, so that each device of a machine needs its own."""
    copies_during_steps = True
    """True if a thread may copy the training state while the main thread queues a step."""
    supports_graphs = False
    """True if `capture_graph` captures."""

    @property
    def torch_device(self) -> torch.device:
        return torch.device(self.name)

    @classmethod
    @abstractmethod
    def unavailable_reason(cls) -> str | None:
        """Why this machine has no such device, for people; None if it has one."""

    @abstractmethod
    def describe(self) -> str:
        """A short description for people, such as the product name and memory size."""

    @abstractmethod
    def peak_throughput(self, dtype: torch.dtype) -> PeakThroughput | None:
        """Dense matrix throughput in `dtype`; None if unknown."""

    @abstractmethod
    def max_memory_allocated(self) -> int:
        """Peak bytes this process has allocated on the device."""

    def memory_per_rank(self, local_ranks: int) -> int | None:
        """Bytes available to each of `local_ranks` ranks on this machine; None if unknown."""
        return None

    @abstractmethod
    def max_local_ranks(self) -> int:
        """Number of ranks that this machine can run."""

    def rank_order(self, tp: int, world_size: int) -> list[int] | None:
        """The rank at each position of a layout, if tensor-parallel ranks should not be consecutive."""
        return None

    def collectives(self, groups: list[list[int]]) -> DeviceCollectives | None:
        """Collectives over such groups (all groups of one kind); None to use torch's functional collectives."""
        return None

    @property
    def init_device(self) -> torch.device:
        """The device that computes initial weights: its 64-bit integer products must be exact."""
        return self.torch_device

    def supports_group(self, ranks: Sequence[int]) -> bool:
        """True if these ranks can form a group for all-reduce."""
        return True

    def rank_environment(self) -> dict[str, str]:
        """Environment variables that ranks need at process start, except those the user has set."""
        return {}

    def flight_recorder_environment(self, directory: Path) -> dict[str, str]:
        """Environment variables with which every rank records its last collectives, creates a named pipe `*.pipe` in
        `directory`, and dumps the record to a file there when something is written to the pipe; except those that the
        user has set. Empty if the device's collectives have no recorder."""
        return {}

    def prepare(
        self, deterministic: bool, world: World = ONE_RANK, precision: str = "fp32", lnc: int | None = None
    ) -> None:
        """Apply process-wide settings before the first use. `lnc` is the number of physical NeuronCores per rank."""
        return

    def join_world(self, world: World) -> None:
        """Make the device's own collectives span all ranks, or raise UserError. Called once the process group
        exists."""
        return

    def architecture(self) -> str:
        """Identifies what compiled code depends on: devices with equal strings can share it."""
        return platform.machine()

    def compile_options(self) -> CompileOptions | None:
        """Arguments for torch.compile; None if the device compiles all work anyway."""
        return CompileOptions()

    def flush(self) -> None:
        """End a segment of a step: a device that traces lazily submits what it has traced."""
        return

    def synchronize(self) -> None:
        """Wait for all queued work."""
        return

    def stopwatch(self) -> Stopwatch | None:
        """A stopwatch for the work of this rank; None if it would have to wait for the device."""
        return HostStopwatch() if self.synchronous else None

    def profiler_activities(self) -> list[ProfilerActivity]:
        """What torch's profiler records on this device."""
        return [ProfilerActivity.CPU]

    def record_memory_history(self, enabled: bool) -> None:
        """Start or stop recording the device's allocations, for `dump_memory_snapshot`."""
        return

    def dump_memory_snapshot(self, path: str) -> None:
        """Write the recorded allocations for torch's memory viewer. A device without such a record writes nothing:
        there, the profiler's trace has the allocations."""
        return

    def kernels(self, fused: bool = True) -> Kernels:
        """Model kernels: the device's fused kernels if it has any and `fused` is true, otherwise plain torch."""
        return Kernels()

    def decode_kernels(self, fused: bool = True) -> Kernels:
        """Kernels for models that compute one token of each sequence at a time."""
        return self.kernels(fused)

    def batch_invariant_kernels(self) -> Kernels:
        """Kernels with which a sequence gets the same bits whatever else is in the batch, for training and decoding."""
        raise UserError(f"device.batch_invariant=true: {self.kind.label} has no such kernels; nearest: false")

    @contextmanager
    def sdpa_priority(self, preferred: str = "auto") -> Iterator[None]:
        """Let torch try attention kernels in order of speed, or the `preferred` one of its kind first."""
        yield

    def capture_graph(self, work: Callable[[], None]) -> Callable[[], None]:
        """Capture what `work` queues without running it; the returned callable replays it."""
        return work

    def record_progress(self) -> Callable[[], None]:
        """A function that waits for the work queued so far, not for later work."""
        return lambda: None

    def copy_to_host(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Start copying to the host; the returned callable waits for this copy only, not for later work."""
        return lambda: tensor

    def alloc_host_buffer(self, size: int | torch.Size, dtype: torch.dtype) -> torch.Tensor:
        """Allocate uninitialized host memory that `start_host_copies` can write to quickly."""
        return torch.empty(size, dtype=dtype)

    def start_host_copies(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> HostCopy:
        """Start copying each (device tensor, host buffer) pair, concurrently with other work."""

        def copy() -> None:
            for tensor, host in pairs:
                host.copy_(tensor)

        thread = Thread(target=copy, daemon=True)
        thread.start()
        return HostCopy(thread.join, thread.join)

    def thread_binder(self) -> Callable[[], None]:
        """A function that a new thread calls before it uses this device. Call this in the main thread."""
        return lambda: None

    def get_rng_state(self) -> torch.Tensor | None:
        """State of the device's own generator; None if it uses the host's."""
        return None

    def set_rng_state(self, state: torch.Tensor) -> None:
        return

    def pin_memory(self, host: torch.Tensor) -> torch.Tensor:
        """Copy a tensor to pinned memory, from which the device can copy asynchronously."""
        return host

    def to_device(self, host: torch.Tensor) -> torch.Tensor:
        """Copy a host tensor to the device without waiting."""
        return host.to(self.torch_device)


class StreamDevice(Device):
    """A device whose package has the streams and events of torch.cuda."""

    synchronous = False

    @property
    @abstractmethod
    def package(self) -> Any:
        """The package, such as torch.cuda."""

    def max_memory_allocated(self) -> int:
        return int(self.package.max_memory_allocated())

    def synchronize(self) -> None:
        self.package.synchronize()

    def record_progress(self) -> Callable[[], None]:
        event = self.package.Event()
        event.record()
        wait: Callable[[], None] = event.synchronize
        return wait

    def copy_to_host(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        host = self.alloc_host_buffer(tensor.shape, tensor.dtype)
        host.copy_(tensor, non_blocking=True)
        wait_until_copied = self.record_progress()

        def wait() -> torch.Tensor:
            wait_until_copied()
            return host

        return wait

    def start_host_copies(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> HostCopy:
        stream = self.package.Stream()
        stream.wait_stream(self.package.current_stream())
        with self.package.stream(stream):
            for tensor, host in pairs:
                host.copy_(tensor, non_blocking=True)
            copied = stream.record_event()
        return HostCopy(copied.synchronize, lambda: self.package.current_stream().wait_event(copied))
