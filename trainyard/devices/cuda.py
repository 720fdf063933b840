"""NVIDIA GPUs."""

import importlib.util
import os
import platform
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity

from trainyard import compat
from trainyard.core.errors import UserError
from trainyard.core.quantities import counted
from trainyard.core.world import ONE_RANK, World
from trainyard.devices.base import PeakThroughput, StreamDevice
from trainyard.devices.builtin.cuda import DATA_SHEET_FLOPS, DEVICE
from trainyard.devices.stopwatch import EventStopwatch
from trainyard.kernels.reference import Kernels

SDPA_BACKENDS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
"""By `DeviceKind.attention_kernels`."""

RECORDER_FILES = {
    ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"): "rank_",
    ("TORCH_NCCL_DEBUG_INFO_PIPE_FILE",): "request_",
}
"""How the files of NCCL's flight recorder begin, by the variables for it (the current name, then the older one). The
rank follows, and in a pipe's name `.pipe`. torch's reader takes every file whose name contains the beginning of a
dump's, so that of a pipe must not."""
RECORDER_SIZE = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
"""The number of collectives recorded: the current name, and the one that the pipe needs before torch 2.13."""


def recorder_environment(directory: Path, environ: Mapping[str, str], enabled_by_default: bool) -> dict[str, str]:
    """The variables of NCCL's flight recorder that `environ` does not have under any name."""
    variables = {
        names[0]: str(directory / beginning)
        for names, beginning in RECORDER_FILES.items()
        if not any(name in environ for name in names)
    }
    current, older = RECORDER_SIZE
    if not enabled_by_default and older not in environ:
        variables[older] = environ.get(current, "2000")  # torch's own default
    return variables


def device_index(local_rank: int, visible: int, environ: Mapping[str, str]) -> int:
    """The GPU of a rank among the `visible` ones. Slurm can bind a task to its own GPUs and hide the others of the
    node (srun --gpus-per-task): there, each rank takes the first."""
    if local_rank < visible:
        return local_rank
    on_node = environ.get("SLURM_GPUS_ON_NODE", "0")
    if not on_node.isdigit() or not 0 < visible < int(on_node):
        raise UserError(f"local rank {local_rank}: this machine has {counted(visible, 'GPU')}, one per rank")
    return 0


class CudaDevice(StreamDevice):
    kind = DEVICE
    name = "cuda"
    process_group_backend = "nccl"
    package = torch.cuda
    device_index_in_code = True
    supports_graphs = True

    def __init__(self) -> None:
        self.graph_pool: Any = None
        """Memory pool that captured graphs share."""

    @classmethod
    def unavailable_reason(cls) -> str | None:
        return None if torch.cuda.is_available() else "not on this machine"

    def architecture(self) -> str:
        major, minor = torch.cuda.get_device_capability()
        return f"{platform.machine()}-sm{major}{minor}-cuda{torch.version.cuda}"

    def max_local_ranks(self) -> int:
        return torch.cuda.device_count()

    def describe(self) -> str:
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        return f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB"

    def peak_throughput(self, dtype: torch.dtype) -> PeakThroughput | None:
        name = torch.cuda.get_device_name()
        for model, (bf16, fp32) in DATA_SHEET_FLOPS.items():
            if model in name:
                return PeakThroughput(fp32 if dtype == torch.float32 else bf16, f"{model} data sheet, dense")
        return None

    def memory_per_rank(self, local_ranks: int) -> int:
        return int(torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory)

    def prepare(
        self, deterministic: bool, world: World = ONE_RANK, precision: str = "fp32", lnc: int | None = None
    ) -> None:
        index = device_index(world.local_rank, self.max_local_ranks(), os.environ)
        # Read at the first allocation: segments grow, so that fragmentation does not exhaust memory with large models.
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
        torch.cuda.set_device(index)
        # The fastest attention backward kernels add in no fixed order. cuBLAS reads its variable at first use.
        if deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(deterministic)

    def thread_binder(self) -> Callable[[], None]:
        return partial(torch.cuda.set_device, torch.cuda.current_device())  # threads begin with device 0

    def stopwatch(self) -> EventStopwatch:
        return EventStopwatch(torch.cuda)

    def profiler_activities(self) -> list[ProfilerActivity]:
        return [ProfilerActivity.CPU, ProfilerActivity.CUDA]

    def record_memory_history(self, enabled: bool) -> None:
        compat.record_memory_history(torch.cuda, enabled)

    def dump_memory_snapshot(self, path: str) -> None:
        compat.dump_memory_snapshot(torch.cuda, path)

    def flight_recorder_environment(self, directory: Path) -> dict[str, str]:
        return recorder_environment(directory, os.environ, compat.has_recorder_pipe_by_default())

    def kernels(self, fused: bool = True) -> Kernels:
        if fused and importlib.util.find_spec("triton"):
            from trainyard.kernels.triton.ops import TritonKernels

            return TritonKernels(has_fp32_gqa=False)
        return Kernels(has_fp32_gqa=False)

    def decode_kernels(self, fused: bool = True) -> Kernels:
        if fused and importlib.util.find_spec("triton"):
            from trainyard.kernels.triton.decode.ops import DecodeKernels

            return DecodeKernels(has_fp32_gqa=False)
        return self.kernels(fused)

    def batch_invariant_kernels(self) -> Kernels:
        if not importlib.util.find_spec("triton"):
            return super().batch_invariant_kernels()
        from trainyard.kernels.triton.invariant.ops import InvariantTritonKernels

        return InvariantTritonKernels(has_fp32_gqa=False)

    @contextmanager
    def sdpa_priority(self, preferred: str = "auto") -> Iterator[None]:
        # A kernel selected by name competes only with the fallback that accepts every input.
        names = self.kind.attention_kernels if preferred == "auto" else (preferred, "math")
        order = [SDPA_BACKENDS[name] for name in names]
        with sdpa_kernel(order, set_priority=True):
            yield

    def capture_graph(self, work: Callable[[], None]) -> Callable[[], None]:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()  # a graph cannot reuse memory that the allocator caches outside its pool
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.graph_pool):
            work()
        self.graph_pool = graph.pool()  # graphs never run concurrently, so they share memory
        return graph.replay

    def alloc_host_buffer(self, size: int | torch.Size, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, pin_memory=True)

    def get_rng_state(self) -> torch.Tensor | None:
        return torch.cuda.get_rng_state()

    def set_rng_state(self, state: torch.Tensor) -> None:
        torch.cuda.set_rng_state(state)

    def pin_memory(self, host: torch.Tensor) -> torch.Tensor:
        with torch.cuda.device(self.torch_device):  # a new thread would use GPU 0
            return host.pin_memory()

    def to_device(self, host: torch.Tensor) -> torch.Tensor:
        return host.pin_memory().to(self.torch_device, non_blocking=True)
