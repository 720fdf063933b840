"""What the CPU that is here can do, measured in seconds: a matrix product, a copy, a sum between two processes."""

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
from trainyard.plan.hardware.catalog import CatalogEntry

COPY_BYTES = 1 << 27
"""Bytes that are copied at a time."""
ALL_REDUCE_BYTES = 1 << 25
"""Bytes of the sum between two processes."""
PROCESS_TIMEOUT_S = 10.0
"""Seconds for each of the two processes to start and be done."""
DEFAULT_LINK = 1e9, 1e-4
"""Bytes/s and seconds of a small message, where they were not."""


def measure_cpu(ranks: int) -> CatalogEntry:
    """This machine as an entry of the table, shared by so many ranks."""
    device = CpuDevice()
    rates = {}
    for kind, dtype in (("bf16", torch.bfloat16), ("fp32", torch.float32)):
        peak = device.peak_throughput(dtype)
        rates[kind] = peak.flops if peak else 0.0
    a, b = torch.zeros(COPY_BYTES, dtype=torch.uint8), torch.ones(COPY_BYTES, dtype=torch.uint8)
    copied = _best_time(lambda: a.copy_(b), 0.3)
    linked = _measure_link() if ranks > 1 else (COPY_BYTES / copied, 0.0)
    link, hop = linked or DEFAULT_LINK
    memory = psutil.virtual_memory().total
    why = {"all": "measured now", "price_per_hour": "none found"}
    why |= dict.fromkeys(("link_bandwidth", "network_bandwidth", "link_latency"), "measured now" if linked else "guess")
    return CatalogEntry(
        "cpu",
        devices=1,
        bf16_flops=rates["bf16"],
        fp8_flops=rates["bf16"],
        fp32_flops=rates["fp32"],
        memory=memory,
        memory_bandwidth=2 * COPY_BYTES / copied,
        link_bandwidth=link * ranks,  # `Hardware.link` is a rank's share; the sum was measured for one pair
        network_bandwidth=link,
        host_memory=memory,
        ranks_per_device={1: ranks},
        sources=why,
        link_latency=hop,
        network_latency=0.0,
    )


def _best_time(work: Callable[[], object], seconds: float) -> float:
    """Shortest time of `work`."""
    best, stop = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < stop:
        start = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - start)
    return best


def _measure_link() -> tuple[float, float] | None:
    """(bytes/s, seconds of a small message) between two processes of this machine; None where they did not meet."""
    context = get_context("spawn")
    results: Any = context.SimpleQueue()
    with tempfile.TemporaryDirectory(prefix="trainyard-") as directory:
        place = str(Path(directory) / "store")
        pair = [context.Process(target=_time_all_reduce, args=(rank, place, results), daemon=True) for rank in (0, 1)]
        for each in pair:
            each.start()
        for each in pair:
            each.join(PROCESS_TIMEOUT_S)
        failed = any(each.exitcode != 0 for each in pair)
        for each in pair:
            each.kill()
    if failed or results.empty():
        return None
    large, small = results.get()
    return ALL_REDUCE_BYTES / large, small


def _time_all_reduce(rank: int, store_path: str, results: Any) -> None:
    dist.init_process_group(
        CpuDevice.process_group_backend, init_method=f"file://{store_path}", rank=rank, world_size=2
    )
    times = []
    for count, turns in ((ALL_REDUCE_BYTES // 4, 5), (1, 50)):
        values = torch.zeros(count)
        dist.all_reduce(values)
        best = float("inf")
        for _ in range(turns):
            start = time.perf_counter()
            dist.all_reduce(values)
            best = min(best, time.perf_counter() - start)
        times.append(best)
    if rank == 0:
        results.put(tuple(times))
    dist.destroy_process_group()
