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

from trainyard.devices.cpu import Cpu
from trainyard.plan.hardware.catalog import Entry

COPY = 1 << 27
"""Bytes that are copied at a time."""
SUM = 1 << 25
"""Bytes of the sum between two processes."""
WAIT = 10.0
"""Seconds for each of the two processes to start and be done."""
GUESSED = 1e9, 1e-4
"""Bytes/s and seconds of a small message, where they were not."""


def probe(ranks: int) -> Entry:
    """This machine as an entry of the table, shared by so many ranks."""
    device = Cpu()
    rates = {}
    for kind, dtype in (("bf16", torch.bfloat16), ("fp32", torch.float32)):
        peak = device.peak(dtype)
        rates[kind] = peak.flops if peak else 0.0
    a, b = torch.zeros(COPY, dtype=torch.uint8), torch.ones(COPY, dtype=torch.uint8)
    copied = _best(lambda: a.copy_(b), 0.3)
    linked = _linked() if ranks > 1 else (COPY / copied, 0.0)
    link, hop = linked or GUESSED
    memory = psutil.virtual_memory().total
    why = {"all": "measured now", "price": "none found"}
    why |= dict.fromkeys(("link", "network", "hop"), "measured now" if linked else "guess")
    return Entry(
        "cpu",
        devices=1,
        bf16=rates["bf16"],
        fp8=rates["bf16"],
        fp32=rates["fp32"],
        memory=memory,
        bandwidth=2 * COPY / copied,
        link=link * ranks,  # `Hardware.link` is a rank's share; the sum was measured for one pair
        network=link,
        host=memory,
        ranks={1: ranks},
        why=why,
        hop=hop,
        jump=0.0,
    )


def _best(work: Callable[[], object], seconds: float) -> float:
    """Shortest time of `work`."""
    best, stop = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < stop:
        start = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - start)
    return best


def _linked() -> tuple[float, float] | None:
    """(bytes/s, seconds of a small message) between two processes of this machine; None where they did not meet."""
    context = get_context("spawn")
    results: Any = context.SimpleQueue()
    with tempfile.TemporaryDirectory(prefix="trainyard-") as directory:
        place = str(Path(directory) / "store")
        pair = [context.Process(target=_sum, args=(rank, place, results), daemon=True) for rank in (0, 1)]
        for each in pair:
            each.start()
        for each in pair:
            each.join(WAIT)
        failed = any(each.exitcode != 0 for each in pair)
        for each in pair:
            each.kill()
    if failed or results.empty():
        return None
    large, small = results.get()
    return SUM / large, small


def _sum(rank: int, place: str, results: Any) -> None:
    dist.init_process_group(Cpu.process_group, init_method=f"file://{place}", rank=rank, world_size=2)
    times = []
    for count, turns in ((SUM // 4, 5), (1, 50)):
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
