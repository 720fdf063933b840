"""The CPU: where everything must run and where everything is tested."""

import platform
import resource
import sys
import time
from functools import cache

import psutil
import torch

from trainyard import compat
from trainyard.devices.base import Device, Peak
from trainyard.kernels import bf16_cpu


class Cpu(Device):
    name = "cpu"
    process_group = "gloo"
    synchronous = True
    logits_bytes = 1 << 25  # more would come from fresh pages each time

    @classmethod
    def available(cls) -> bool:
        return True

    forks = True

    def prepare(
        self, deterministic: bool, local_rank: int = 0, precision: str = "fp32", lnc: int | None = None
    ) -> None:
        super().prepare(deterministic, local_rank, precision, lnc)
        if precision != "fp32" and not compat.multiplies_bf16():
            bf16_cpu.install()

    def architecture(self) -> str:
        return f"{platform.machine()}-{torch.backends.cpu.get_cpu_capability()}".lower()

    def ranks(self) -> int:
        return 8  # any number runs; more than this no laptop enjoys

    def describe(self) -> str:
        return f"CPU, {torch.get_num_threads()} threads"

    def peak(self, dtype: torch.dtype) -> Peak | None:
        return Peak(_matmul_flops(dtype), "measured now by a matrix product")

    def memory_total(self, ranks: int) -> int:
        return int(psutil.virtual_memory().total + psutil.swap_memory().total) // ranks

    def memory_peak(self) -> int:
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


@cache
def _matmul_flops(dtype: torch.dtype) -> float:
    """No data sheet covers the cores a container happens to get, so the peak is measured (about 0.2 s)."""
    n = 1024
    a, b = torch.randn(n, n).to(dtype), torch.randn(n, n).to(dtype)
    a @ b
    best = 0.0
    stop = time.perf_counter() + 0.2
    while time.perf_counter() < stop:
        start = time.perf_counter()
        a @ b
        best = max(best, 2 * n**3 / (time.perf_counter() - start))
    return best
