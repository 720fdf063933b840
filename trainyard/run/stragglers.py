"""Stragglers: ranks that compute slower than the others.

All ranks of a synchronous run have the same step time, that of the slowest. A straggler therefore shows only in the
time from the start of a step until a rank's own gradients are complete, without its waits for other data-parallel
ranks. The ranks of one model replica (tensor, context and pipeline parallel) wait for each other in every layer, so
replicas are compared, and a slow one is named with all its ranks.
"""

import logging
from collections.abc import Iterator, Sequence
from itertools import pairwise
from statistics import median_low
from typing import Any, NamedTuple

import torch

from trainyard.core.world import host_name
from trainyard.devices import Device
from trainyard.devices.stopwatch import Stopwatch
from trainyard.parallel.mesh import Mesh
from trainyard.run.callbacks import Part
from trainyard.train.step import StepResult

SLOW_FACTOR = 1.3
"""A slow replica takes more than this many times the median."""
MIN_EXCESS_S = 0.05
"""A slow replica takes at least this many seconds more than the median; less is noise."""
STREAK = 3
"""Logged steps in a row after which a slow replica is reported."""
REPEAT_EVERY = 100
"""Logged steps after which a replica that remains slow is reported again."""

logger = logging.getLogger(__name__)


class Straggler(NamedTuple):
    """A replica that is slow."""

    ranks: tuple[int, ...]
    seconds: float
    """Its part of a step."""
    median: float
    """Seconds of the median replica."""

    def describe(self, hosts: Sequence[str]) -> str:
        """One line for people; `hosts` are those of all ranks."""
        one = len(self.ranks) == 1
        names = ", ".join(dict.fromkeys(hosts[rank] for rank in self.ranks))
        return (
            f"rank{'' if one else 's'} {compact_ranks(self.ranks)} on {names} {'is' if one else 'are'} slow: "
            f"{'its' if one else 'their'} part of a step takes {self.seconds / self.median:.1f} times the median "
            f"({self.seconds * 1000:.0f} ms, {self.median * 1000:.0f} ms)"
        )


class StragglerDetector:
    """Decides from the times of logged steps which replicas are slow, and when to say so."""

    def __init__(self, replicas: Sequence[Sequence[int]]) -> None:
        """`replicas` are the ranks of each replica."""
        self.replicas = [tuple(sorted(ranks)) for ranks in replicas]
        self.streaks = [0] * len(self.replicas)
        """Logged steps in a row in which each replica was slow."""

    def update(self, seconds: Sequence[float]) -> tuple[float, list[Straggler]]:
        """Take the times of all ranks in a logged step. Return the slowest replica's time as a multiple of the median,
        and the stragglers to report now."""
        times = [max(seconds[rank] for rank in ranks) for ranks in self.replicas]
        median = median_low(times)  # of two replicas the faster one
        stragglers: list[Straggler] = []
        for index, time in enumerate(times):
            slow = time > SLOW_FACTOR * median and time > median + MIN_EXCESS_S
            self.streaks[index] = self.streaks[index] + 1 if slow else 0
            since_report = self.streaks[index] - STREAK
            if since_report >= 0 and since_report % REPEAT_EVERY == 0:
                stragglers.append(Straggler(self.replicas[index], time, median))
        return max(times) / median, stragglers


class StragglerMonitor(Part):
    """Measures this rank's part of logged steps and compares it with that of the others."""

    def __init__(self, stopwatch: Stopwatch, mesh: Mesh, device: Device) -> None:
        self.stopwatch, self.mesh, self.device = stopwatch, mesh, device
        self.step = 0
        """The step that was measured last."""
        self.is_first_step = True
        order, members = mesh.rank_order, mesh.layout.groups("pp", "cp", "tp")
        self.detector = StragglerDetector([[order[index] for index in indices] for indices in members])

    @classmethod
    def create(cls, mesh: Mesh, device: Device, zero_stage: int) -> "StragglerMonitor | None":
        """None if there is nothing to compare: a single replica, a device without a stopwatch, or ZeRO-2 and 3, where
        every rank waits for all others in every layer."""
        stopwatch = device.stopwatch() if mesh.layout.dp > 1 and zero_stage < 2 else None
        return cls(stopwatch, mesh, device) if stopwatch else None

    def begin_step(self, step: int, logged: bool) -> None:
        """Measure a logged step, except for the first one, which compiles."""
        if logged and not self.is_first_step:
            self.step = step
            self.stopwatch.start()
        self.is_first_step = False

    def add_metrics(self, result: StepResult, record: dict[str, Any]) -> None:
        """Add the ratio of a step that was measured, and warn of stragglers."""
        if result.step != self.step:
            return
        own = torch.tensor([self.stopwatch.seconds()], device=self.device.torch_device)
        seconds = self.mesh.world.all_gather(own).tolist()
        ratio, stragglers = self.detector.update(seconds)
        if stragglers:  # the same on all ranks, which have the same times
            by_layout = self.mesh.all_gather_object(host_name())
            by_rank = dict(zip(self.mesh.rank_order, by_layout, strict=True))
            hosts = [by_rank[rank] for rank in range(len(by_rank))]
            for straggler in stragglers if self.mesh.layout_rank == 0 else []:
                logger.warning("%s", straggler.describe(hosts))
        record["straggler_ratio"] = ratio


def compact_ranks(ranks: Sequence[int]) -> str:
    """Sorted ranks as ranges: 0-3, 8, 10-11."""
    return ", ".join(f"{first}-{last}" if last > first else str(first) for first, last in _ranges(ranks))


def _ranges(ranks: Sequence[int]) -> Iterator[tuple[int, int]]:
    first = ranks[0]
    for rank, following in pairwise([*ranks, ranks[-1] + 2]):
        if following != rank + 1:
            yield first, rank
            first = following
