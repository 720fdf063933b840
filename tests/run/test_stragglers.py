"""A rank that computes slower than the others is named while the run continues."""

import json
from pathlib import Path

import pytest

from tests.support.forkserver import ForkServer
from trainyard.core.world import host_name
from trainyard.devices.stopwatch import EventStopwatch, Stopwatch
from trainyard.run.stragglers import REPEAT_EVERY, STREAK, Straggler, StragglerDetector, compact_ranks

USER_CODE = """
import os
import time

import torch


def loss(output, batch):
    if os.environ["RANK"] == os.environ.get("SLOW_RANK"):
        time.sleep(0.6)
    logits, labels = output.logits().flatten(0, 1), batch["labels"].long().flatten()
    return torch.nn.functional.cross_entropy(logits, labels, reduction="sum"), labels.numel()
"""
STEPS = 6
TRAIN = [
    *("train", "tiny-llama", "--smoke", "checkpoint.export_hf=false", "log.loggers=[]", "evaluate.every=0"),
    *("train.loss=mine:loss", f"train.steps={STEPS}", "train.global_batch=2", "train.micro_batch=1", "log.every=1"),
    *("log.directory=runs", "log.name=run"),
]
FAST, SLOW = 0.2, 0.3


@pytest.mark.nightly  # in the fast tier, tests/cli/test_watch.py has a run with a slow rank
@pytest.mark.parametrize(
    ("slow_rank", "layout", "ranks", "named"),
    [
        ("1", ["layout.zero=0"], 2, "rank 1 on HOST is slow: its part"),
        ("0", ["layout.zero=1"], 2, "rank 0 on HOST is slow: its part"),
        ("3", ["layout.tp=2"], 4, "ranks 2-3 on HOST are slow: their part"),
        ("none", ["layout.zero=1"], 2, None),
    ],
)
def test_slow_rank_is_named(
    cli: ForkServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    slow_rank: str,
    layout: list[str],
    ranks: int,
    named: str | None,
) -> None:
    monkeypatch.setenv("SLOW_RANK", slow_rank)
    (tmp_path / "mine.py").write_text(USER_CODE)
    done = cli.run([*TRAIN, *layout, "--nproc", str(ranks)], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    warnings = [line for line in done.stdout.splitlines() if "times the median" in line]
    records = [json.loads(line) for line in (tmp_path / "runs/run/metrics.jsonl").read_text().splitlines()]
    ratios = [record.get("straggler_ratio") for record in records if "loss" in record]
    assert len(ratios) == STEPS
    assert ratios[0] is None
    assert all(ratio >= 1 for ratio in ratios[1:])
    if named:
        (line,) = warnings
        assert line.startswith(named.replace("HOST", host_name()))
        assert max(ratios[1:]) > 2  # the fast ranks' waits for the slow one do not count
    else:
        assert warnings == []


def test_reported_after_a_streak_then_rarely_and_again_after_recovery() -> None:
    detector = StragglerDetector([[0], [1], [2], [3]])
    healthy, slow = [FAST] * 4, [FAST, FAST, SLOW, FAST]

    def reports(seconds: list[float], steps: int) -> list[int]:
        """The steps, counted from 1, that report a straggler."""
        return [step for step in range(1, steps + 1) if detector.update(seconds)[1]]

    assert reports(slow, STREAK - 1) == []
    assert reports(healthy, 1) == []
    assert reports(slow, 2 * REPEAT_EVERY) == [STREAK, STREAK + REPEAT_EVERY]
    assert reports(healthy, 1) == []
    assert reports(slow, STREAK) == [STREAK]


def test_two_slow_replicas_have_their_own_streaks() -> None:
    detector = StragglerDetector([[0], [1], [2], [3], [4]])
    for _ in range(STREAK - 1):
        detector.update([FAST, SLOW, FAST, FAST, FAST])
    ratio, stragglers = detector.update([FAST, SLOW, FAST, FAST, 2 * SLOW])
    assert [straggler.ranks for straggler in stragglers] == [(1,)]
    assert ratio == pytest.approx(2 * SLOW / FAST)


@pytest.mark.parametrize(
    "seconds", [[0.010, 0.059], [1.0, 1.29], [FAST, FAST], [SLOW] * 3 + [FAST]], ids=["short", "close", "equal", "fast"]
)
def test_noise_is_no_straggler(seconds: list[float]) -> None:
    detector = StragglerDetector([[rank] for rank in range(len(seconds))])
    assert not any(detector.update(seconds)[1] for _ in range(2 * STREAK))


def test_line_names_ranks_hosts_and_times() -> None:
    hosts = ["n1", "n1", "n1", "n2", "n2", "n3"]
    text = "rank 5 on n3 is slow: its part of a step takes 1.8 times the median (420 ms, 233 ms)"
    assert Straggler((5,), 0.42, 0.233).describe(hosts) == text
    line = Straggler((2, 3), 0.42, 0.233).describe(hosts)
    assert line.startswith("ranks 2-3 on n1, n2 are slow: their part of a step")


def test_compact_ranks() -> None:
    assert compact_ranks([3]) == "3"
    assert compact_ranks([0, 1, 2, 3, 8, 10, 11]) == "0-3, 8, 10-11"


class _Clock(Stopwatch):
    def __init__(self, times: list[float]) -> None:
        super().__init__()
        self.times = iter(times)

    def read_clock(self) -> float:
        return next(self.times)

    def seconds_between(self, first: float, second: float) -> float:
        return second - first


def test_stopwatch_leaves_out_pauses() -> None:
    stopwatch = _Clock([1, 3, 10, 14])
    with stopwatch.paused():  # not running: the clock is not read
        pass
    stopwatch.start()
    with stopwatch.paused():
        pass
    stopwatch.stop()
    stopwatch.stop()
    assert stopwatch.seconds() == (3 - 1) + (14 - 10)


class _FakeQueue:
    """Events 250 ms apart, as a device with a queue would time them; there is nothing to wait on."""

    now = 0.0

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.time = _FakeQueue.now = _FakeQueue.now + 250

        def elapsed_time(self, end: "_FakeQueue.Event") -> float:
            return end.time - self.time


def test_events_measure_milliseconds_of_the_device() -> None:
    stopwatch = EventStopwatch(_FakeQueue)
    stopwatch.start()
    with stopwatch.paused():
        pass
    stopwatch.stop()
    assert stopwatch.seconds() == 0.5
