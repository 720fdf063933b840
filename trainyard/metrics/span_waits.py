"""Which rank the others wait for.

All ranks leave a collective together, so the rank that arrives last is the one that waits least in it. That needs no
common clock. Ranks of one model replica wait for each other in every layer, so replicas are compared: a replica waits
as long as that of its ranks which waits least.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from trainyard.metrics.span_window import RankWindow
from trainyard.metrics.spans import DEVICE_PREFIX, STEP, WAIT


class RankWaits(NamedTuple):
    """Means of one rank over the compared steps."""

    rank: int
    host: str
    step_ms: float
    wait_ms: float
    """Time inside collectives."""
    last_steps: int
    """Steps in which the rank's replica arrived last."""


class LastReplica(NamedTuple):
    """The replica that was last most often."""

    ranks: tuple[int, ...]
    hosts: tuple[str, ...]
    steps: int
    """Steps in which it was last."""
    others_wait_ms: float
    """How long the other replicas waited for it on average, in the median of these steps."""
    step_ms: float
    """Their step time, in the median of these steps."""


class WaitSummary(NamedTuple):
    """Who waited for whom in a window of steps."""

    steps: int
    """Steps that all ranks have recorded."""
    ranks: list[RankWaits]
    last: LastReplica | None
    """None if there is nothing to compare."""


def summarize_waits(windows: Sequence[RankWindow]) -> WaitSummary:
    """Compare the ranks in the steps that all of them have recorded."""
    step_times = [window.milliseconds_by_step(STEP) for window in windows]
    steps = sorted(set.intersection(*(set(times) for times in step_times))) if step_times else []
    if not steps:
        return WaitSummary(0, [], None)
    all_waits = [window.milliseconds_by_step(WAIT) for window in windows]
    durations_RS = np.array([[times[step] for step in steps] for times in step_times])
    waits_RS = np.array([[waits.get(step, 0.0) for step in steps] for waits in all_waits])
    replicas = sorted({window.header.replica for window in windows})
    members = [[i for i, window in enumerate(windows) if window.header.replica == replica] for replica in replicas]
    waits_PS = np.stack([waits_RS[rows].min(0) for rows in members])
    last_S = waits_PS.argmin(0)
    times_last = Counter(last_S.tolist()) if len(replicas) > 1 else Counter()
    ranks = [
        RankWaits(
            window.header.rank,
            window.header.host,
            float(durations_RS[row].mean()),
            float(waits_RS[row].mean()),
            times_last[replicas.index(window.header.replica)],
        )
        for row, window in enumerate(windows)
    ]
    if not times_last:
        return WaitSummary(len(steps), ranks, None)
    (index, count), *_ = times_last.most_common()
    selected = last_S == index
    waiting = [row for row, window in enumerate(windows) if window.header.replica != replicas[index]]
    others = np.delete(waits_PS, index, 0)[:, selected] - waits_PS[index, selected]
    last = LastReplica(
        tuple(windows[row].header.rank for row in members[index]),
        tuple(dict.fromkeys(windows[row].header.host for row in members[index])),
        count,
        float(np.median(others.mean(0))),
        float(np.median(durations_RS[waiting][:, selected].mean(0))),
    )
    return WaitSummary(len(steps), ranks, last)


def mean_parts(windows: Sequence[RankWindow]) -> tuple[float, dict[str, float]]:
    """Mean milliseconds of a step over all ranks, and of each of its parts, the longest first. Waits inside other parts
    count there."""
    steps, total_ms = 0, 0.0
    parts_ms: dict[str, float] = defaultdict(float)
    for window in windows:
        durations = window.milliseconds_by_step(STEP)
        in_steps = window.in_steps() & (window.depth == 1)
        steps, total_ms = steps + len(durations), total_ms + sum(durations.values())
        for index, name in enumerate(window.names):
            is_part = name.startswith(window.prefix) and name.startswith(DEVICE_PREFIX) == bool(window.prefix)
            if is_part and (selected := in_steps & (window.name == index)).any():
                parts_ms[name.removeprefix(window.prefix)] += float(window.duration[selected].sum() / 1e6)
    if not steps:
        return 0.0, {}
    return total_ms / steps, {
        name: value / steps for name, value in sorted(parts_ms.items(), key=lambda part: -part[1])
    }
