"""The state of a run now, read from its directory: step, loss, speed, time left, slowest rank."""

from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from trainyard.core.errors import UserError
from trainyard.core.yaml_io import read_yaml
from trainyard.metrics.json_lines import read_json_lines, to_count, to_finite
from trainyard.metrics.run_directory import IDENTITY_FILE, is_training
from trainyard.metrics.span_window import LastReplica, recent_windows, summarize_waits

MAX_LOSSES = 512
TAIL_BYTES = 4 << 20
"""End of metrics.jsonl that is read first."""
COMPARED_STEPS = 20
REWARDS = {"rewards/total": "mean", "rewards/accuracy": "accuracy"}
"""Metrics of runs that learn from preferences or rewards, and their kind; a run shows the first one that it has."""


class RunStatus(NamedTuple):
    """A run now. Values are None as long as the run has not written them."""

    directory: Path
    state: str
    """`training`, `not training` or `gone`."""
    step: int
    steps: int | None
    """Steps of the complete run."""
    loss: float | None
    losses: list[float]
    """Losses of the last logged steps, oldest first; finite ones only."""
    reward: float | None
    """The accuracy or the mean of its rewards, if it has any."""
    reward_kind: str
    rewards: list[float]
    """Those of the last logged steps."""
    tokens_per_second: float | None
    mfu: float | None
    ms_per_iteration: float | None
    seconds_left: float | None
    memory_bytes: int | None
    """Largest memory of rank 0."""
    straggler_ratio: float | None
    """Time of the slowest replica as a multiple of the median, if spans do not say which one that is."""
    compared_steps: int
    last: LastReplica | None
    """The rank that the others wait for, in the last `compared_steps` steps."""


class RunReader:
    """Follows one run directory. Reads only what is new, and never raises because of what it finds there."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.offset = -1
        self.losses: deque[tuple[int, float]] = deque(maxlen=MAX_LOSSES)
        self.rewards: deque[tuple[int, float]] = deque(maxlen=MAX_LOSSES)
        self.record: dict[str, Any] = {}
        """The last logged record."""

    def read(self) -> RunStatus:
        """The state of the run now."""
        self._read_metrics()
        steps = self._total_steps()
        summary = summarize_waits(windows := recent_windows(self.directory, COMPARED_STEPS))
        step = max([to_count(self.record.get("step")) or 0, *(int(window.step.max()) for window in windows)])
        milliseconds = to_finite(self.record.get("ms_per_iteration"))
        left = (steps - step) * milliseconds / 1000 if steps is not None and milliseconds is not None else None
        training = is_training(self.directory)
        kind, reward = reward_of(self.record)
        gone = not self.directory.is_dir()
        return RunStatus(
            self.directory,
            "gone" if gone else "training" if training else "not training",
            step,
            steps,
            to_finite(self.record.get("loss")),
            [loss for _, loss in self.losses],
            reward,
            kind,
            [value for _, value in self.rewards],
            to_finite(self.record.get("tokens_per_second")),
            to_finite(self.record.get("mfu")),
            milliseconds,
            max(left, 0.0) if left is not None and training else None,
            to_count(self.record.get("memory_bytes")),
            to_finite(self.record.get("straggler_ratio")),
            summary.steps,
            summary.last,
        )

    def _read_metrics(self) -> None:
        path = self.directory / "metrics.jsonl"
        if self.offset < 0:
            try:
                self.offset = max(path.stat().st_size - TAIL_BYTES, 0)
            except OSError:
                return
        lines = read_json_lines(path, self.offset)
        if lines.next_offset < self.offset:  # a resumed run has dropped the end
            self.losses.clear()
            self.rewards.clear()
        self.offset = lines.next_offset
        for record in lines.records:
            step = to_count(record.get("step"))
            if "loss" not in record or step is None:
                continue
            self.record = record
            for values, value in ((self.losses, to_finite(record["loss"])), (self.rewards, reward_of(record)[1])):
                while values and values[-1][0] >= step:
                    values.pop()
                if value is not None:
                    values.append((step, value))

    def _total_steps(self) -> int | None:
        try:
            train = read_yaml(self.directory / "config.yaml").get("train")
        except (UserError, OSError):
            return None
        return to_count(train.get("steps")) if isinstance(train, dict) else None


def reward_of(record: Mapping[str, Any]) -> tuple[str, float | None]:
    """What kind of reward a record has, and its value; None without one."""
    kind = next((name for name in REWARDS if name in record), None)
    return ("", None) if kind is None else (REWARDS[kind], to_finite(record[kind]))


def find_running_run(parent: Path) -> Path | None:
    """The run in `parent` that trains now, the one that was started last."""
    try:
        runs = [path for path in parent.iterdir() if (path / IDENTITY_FILE).is_file()]
    except OSError:
        return None
    running = [path for path in runs if is_training(path)]
    return max(running, key=_start_time, default=None)


def _start_time(run: Path) -> float:
    try:
        return (run / "config.yaml").stat().st_mtime  # written when a run starts or resumes
    except OSError:
        return 0.0
