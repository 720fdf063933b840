"""CPUs: everything must run here, and everything is tested here."""

import platform
import resource
import sys
import time
from functools import cache

import psutil
import torch

from trainyard import compat
from trainyard.core.quantities import counted
from trainyard.core.world import ONE_RANK, World
from trainyard.devices.base import Device, PeakThroughput
from trainyard.devices.builtin.cpu import DEVICE
from trainyard.kernels import bf16_cpu
from trainyard.kernels.batch_invariant import BatchInvariantKernels
from trainyard.kernels.cpu_decode import CpuDecodeKernels
from trainyard.kernels.reference import Kernels


class CpuDevice(Device):
    kind = DEVICE
    name = "cpu"
    process_group_backend = "gloo"
    synchronous = True
    fork_safe = True

    @classmethod
    def unavailable_reason(cls) -> str | None:
        return None

    def prepare(
        self, deterministic: bool, world: World = ONE_RANK, precision: str = "fp32", lnc: int | None = None
    ) -> None:
        super().prepare(deterministic, world, precision, lnc)
        if precision != "fp32":
            _speed_up_bf16()

    def architecture(self) -> str:
        return f"{platform.machine()}-{torch.backends.cpu.get_cpu_capability()}".lower()

    def max_local_ranks(self) -> int:
        return 8  # any number works; this many still run well on a laptop

    def decode_kernels(self, fused: bool = True) -> Kernels:
        return CpuDecodeKernels() if fused else Kernels()

    def batch_invariant_kernels(self) -> Kernels:
        return BatchInvariantKernels()

    def describe(self) -> str:
        threads = torch.get_num_threads()
        return f"CPU, {counted(threads, 'thread')}"

    def peak_throughput(self, dtype: torch.dtype) -> PeakThroughput | None:
        if dtype == torch.bfloat16:
            _speed_up_bf16()  # the peak of what training uses
        return PeakThroughput(_matmul_flops(dtype), "measured now with a matrix product")

    def memory_per_rank(self, local_ranks: int) -> int:
        return int(psutil.virtual_memory().total + psutil.swap_memory().total) // local_ranks

    def max_memory_allocated(self) -> int:
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _speed_up_bf16() -> None:
    if not compat.has_fast_bf16_matmul():
        bf16_cpu.install()


@cache
def _matmul_flops(dtype: torch.dtype) -> float:
    """Measure the peak in about 0.2 s: no data sheet covers the cores that a container happens to get."""
    n = 1024
    a, b = torch.randn(n, n).to(dtype), torch.randn(n, n).to(dtype)
    a @ b
    best = 0.0
    deadline = time.perf_counter() + 0.2
    while time.perf_counter() < deadline:
        start = time.perf_counter()
        a @ b
        best = max(best, 2 * n**3 / (time.perf_counter() - start))
    return best
