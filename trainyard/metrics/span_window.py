"""The spans of a few steps of a run, of all ranks on one clock, and which rank the others wait for.

All ranks leave a collective together, so the rank that arrives last is the one that waits least in it. That needs no
common clock. Ranks of one model replica wait for each other in every layer, so replicas are compared: a replica waits
as long as that of its ranks which waits least.
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from trainyard.core.errors import UserError
from trainyard.metrics.spans import DEVICE_PREFIX, STEP, WAIT, RankSpans, SpanHeader, iter_spans, span_files

DEFAULT_STEPS = 50
TAIL_BYTES = 1 << 18
"""End of a file that has the latest steps."""
MANY_RANKS = 64
"""More ranks than this have shorter ends of files read."""
CLOCK_RESOLUTION_NS = 2_000
"""Resolution of the clocks of devices."""


@dataclass
class RankWindow:
    """The spans of one rank in the window. Times are in ns of rank 0's clock."""

    header: SpanHeader
    names: tuple[str, ...]
    step: np.ndarray[Any, Any]
    name: np.ndarray[Any, Any]
    depth: np.ndarray[Any, Any]
    start: np.ndarray[Any, Any]
    duration: np.ndarray[Any, Any]

    @classmethod
    def select(cls, spans: RankSpans, first: int, last: int) -> "RankWindow":
        """The spans of the steps `first` to `last`."""
        records, header = spans.records, spans.header
        records = records[(records["step"] >= first) & (records["step"] <= last)]
        origin = header.start_unix_ns + header.clock_offset_ns
        start = records["start"].astype(np.int64) + origin
        step, name, depth, duration = (records[key].astype(np.int64) for key in ("step", "name", "depth", "duration"))
        return cls(header, header.names, step, name, depth, start, duration)

    def extend(self, later: "RankWindow", first_step: int) -> None:
        """Add the spans of a later file of the same rank, which begins with `first_step`."""
        repeated = self.step >= first_step
        offsets = {index: later.names.index(name) for index, name in enumerate(self.names) if name in later.names}
        kept = ~repeated & np.isin(self.name, list(offsets))
        self.name = np.array([offsets[index] for index in self.name[kept].tolist()], np.int64)
        for field in ("step", "depth", "start", "duration"):
            setattr(self, field, np.concatenate((getattr(self, field)[kept], getattr(later, field))))
        self.name = np.concatenate((self.name, later.name))
        self.header, self.names = later.header, later.names

    @property
    def prefix(self) -> str:
        """The prefix of the names of the spans that contain the work itself."""
        return "" if self.header.synchronous else DEVICE_PREFIX

    def is_named(self, name: str) -> np.ndarray[Any, Any]:
        """A mask of the spans with this name."""
        return self.name == (self.names.index(name) if name in self.names else -1)

    def in_steps(self) -> np.ndarray[Any, Any]:
        """A mask of the spans that belong to the work of a step, and not to what follows it, such as an evaluation."""
        is_step = self.is_named(self.prefix + STEP)
        steps, first = np.unique(self.step[is_step], return_index=True)
        if not len(steps):
            return np.zeros(len(self.step), bool)
        start, end = self.start[is_step][first], (self.start + self.duration)[is_step][first]
        row = np.minimum(np.searchsorted(steps, self.step), len(steps) - 1)
        after_start = self.start >= start[row] - CLOCK_RESOLUTION_NS
        return (steps[row] == self.step) & after_start & (self.start <= end[row])

    def milliseconds_by_step(self, name: str) -> dict[int, float]:
        """The total time of the spans with this name in each step."""
        selected = self.is_named(self.prefix + name) & self.in_steps()
        steps, inverse = np.unique(self.step[selected], return_inverse=True)
        totals = np.bincount(inverse, self.duration[selected] / 1e6, len(steps))
        return dict(zip(steps.tolist(), totals.tolist(), strict=True))

    def reduction_ends(self) -> dict[int, int]:
        """The end of the last collective of each step in which all ranks wait for each other."""
        selected = self.is_named(self.prefix + WAIT) & (self.depth == 1)
        ends = self.start[selected] + self.duration[selected]
        order = np.argsort(ends, kind="stable")
        return dict(zip(self.step[selected][order].tolist(), ends[order].tolist(), strict=True))


def read_window(run_directory: Path, steps: tuple[int, int] | None, ranks: Collection[int] | None) -> list[RankWindow]:
    """The spans of the steps from the first to the last of `steps` (default: the last DEFAULT_STEPS), of all or of some
    ranks. Raises UserError if there are none."""
    files = span_files(run_directory)
    if not files:
        raise UserError(f"{run_directory}: has no spans; runs write them with log.spans=true")
    if ranks is not None and (missing := sorted(set(ranks) - set(files))):
        known = f"{min(files)} to {max(files)}" if len(files) > 1 else f"{min(files)}"
        raise UserError(f"--ranks {missing[0]}: the run has spans of rank {known}")
    if steps is None:
        last = last_recorded_step(run_directory)
        if not last:
            raise UserError(f"{run_directory}: no rank has recorded a complete step yet")
        steps = max(last - DEFAULT_STEPS + 1, 1), last
    windows: dict[int, RankWindow] = {}
    for spans in iter_spans(run_directory, ranks):
        window = RankWindow.select(spans, *steps)
        if spans.header.rank not in windows:
            windows[spans.header.rank] = window
        elif (first_step := spans.first_step()) is not None:
            windows[spans.header.rank].extend(window, first_step)
    found = [window for window in windows.values() if len(window.step)]
    if not found:
        last = last_recorded_step(run_directory)
        raise UserError(
            f"{run_directory}: no spans of steps {steps[0]} to {steps[1]}; the last recorded step is {last}"
        )
    _correct_drift(found)
    return found


def last_recorded_step(run_directory: Path) -> int:
    """The last step of any rank; 0 if there is none."""
    steps = {
        spans.header.rank: int(spans.named(STEP)["step"][-1])  # the later file of a rank comes last
        for spans in iter_spans(run_directory, last_bytes=TAIL_BYTES)
        if spans.first_step() is not None
    }
    return max(steps.values(), default=0)


def _correct_drift(windows: list[RankWindow]) -> None:
    """Shift the ranks of other hosts so that collectives end at the same time, if their clocks have drifted from rank
    0's by more than the error of the offset that was measured at the start."""
    reference = windows[0].reduction_ends()
    for window in windows[1:]:
        ends = window.reduction_ends()
        common = sorted(reference.keys() & ends.keys())
        if window.header.host == windows[0].header.host or not common:
            continue
        drift = int(np.median([reference[step] - ends[step] for step in common]))
        if abs(drift) > window.header.clock_error_ns + windows[0].header.clock_error_ns:
            window.start = window.start + drift


def recent_windows(run_directory: Path, steps: int) -> list[RankWindow]:
    """The last `steps` steps of all ranks, as far as the ends of their files have them; empty without spans."""
    last_bytes = TAIL_BYTES if len(span_files(run_directory)) <= MANY_RANKS else TAIL_BYTES // 16
    latest = {spans.header.rank: spans for spans in iter_spans(run_directory, last_bytes=last_bytes)}
    recorded = [spans for spans in latest.values() if len(spans.records)]
    last = max((int(spans.records["step"].max()) for spans in recorded), default=0)
    windows = [RankWindow.select(spans, last - steps + 1, last) for spans in recorded]
    return [window for window in windows if len(window.step)]


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
    """Mean time for which the other replicas waited for it, in the median of these steps."""
    step_ms: float
    """Their step time, in the median of these steps."""


class WaitSummary(NamedTuple):
    """Waits of all ranks in a window of steps, and the replica that caused most of them."""

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
