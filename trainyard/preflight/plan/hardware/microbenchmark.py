"""Peak rates of this machine's CPU, measured in seconds: a matrix product, a copy, an all-reduce of two processes."""

import tempfile
import time
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist

from trainyard.devices.cpu import CpuDevice
from trainyard.preflight.plan.hardware.catalog import CatalogEntry

COPY_BYTES = 1 << 27
ALL_REDUCE_BYTES = 1 << 25
PROCESS_TIMEOUT_S = 10.0
"""Time for each of the two processes to start and finish."""
DEFAULT_LINK = 1e9, 1e-4
"""Bytes/s and latency in seconds, used if the two processes fail."""


def measure_cpu(ranks: int) -> CatalogEntry:
    """This machine as a catalog entry that `ranks` ranks share."""
    device = CpuDevice()
    flops = {}
    for dtype in (torch.bfloat16, torch.float32):
        peak = device.peak_throughput(dtype)
        flops[dtype] = peak.flops if peak else 0.0
    target, source = torch.zeros(COPY_BYTES, dtype=torch.uint8), torch.ones(COPY_BYTES, dtype=torch.uint8)
    copy_s = _best_time(lambda: target.copy_(source), 0.3)
    link = _measure_link() if ranks > 1 else (COPY_BYTES / copy_s, 0.0)
    bandwidth, latency = link or DEFAULT_LINK
    memory = psutil.virtual_memory().total
    sources = {"all": "measured now", "price_per_hour": "none found"}
    measured_fields = ("link_bandwidth", "network_bandwidth", "link_latency")
    sources |= dict.fromkeys(measured_fields, "measured now" if link else "guess")
    return CatalogEntry(
        CpuDevice.kind,
        devices=1,
        bf16_flops=flops[torch.bfloat16],
        fp8_flops=flops[torch.bfloat16],
        fp32_flops=flops[torch.float32],
        memory=memory,
        memory_bandwidth=2 * COPY_BYTES / copy_s,
        link_bandwidth=bandwidth * ranks,  # measured for one pair; `Hardware.link_bandwidth` divides by the ranks
        network_bandwidth=bandwidth,
        host_memory=memory,
        ranks_per_device={1: ranks},
        sources=sources,
        link_latency=latency,
        network_latency=0.0,
    )


def _best_time(work: Callable[[], object], seconds: float) -> float:
    """The shortest time of `work`, called again and again for `seconds`."""
    best, stop = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < stop:
        start = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - start)
    return best


def _measure_link() -> tuple[float, float] | None:
    """(bytes/s, latency in seconds) between two processes of this machine; None if they fail."""
    context = get_context("spawn")
    results: Any = context.SimpleQueue()
    with tempfile.TemporaryDirectory(prefix="trainyard-") as directory:
        store = str(Path(directory) / "store")
        processes = [
            context.Process(target=_time_all_reduce, args=(rank, store, results), daemon=True) for rank in (0, 1)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join(PROCESS_TIMEOUT_S)
        failed = any(process.exitcode != 0 for process in processes)
        for process in processes:
            process.kill()
    if failed or results.empty():
        return None
    large_s, small_s = results.get()
    return ALL_REDUCE_BYTES / large_s, small_s


def _time_all_reduce(rank: int, store_path: str, results: Any) -> None:
    """Rank 0 puts the shortest times of a large and of a one-element all-reduce into `results`."""
    dist.init_process_group(
        CpuDevice.process_group_backend, init_method=f"file://{store_path}", rank=rank, world_size=2
    )
    times = []
    for elements, repeats in ((ALL_REDUCE_BYTES // 4, 5), (1, 50)):
        values = torch.zeros(elements)
        dist.all_reduce(values)
        best = float("inf")
        for _ in range(repeats):
            start = time.perf_counter()
            dist.all_reduce(values)
            best = min(best, time.perf_counter() - start)
        times.append(best)
    if rank == 0:
        results.put(tuple(times))
    dist.destroy_process_group()
