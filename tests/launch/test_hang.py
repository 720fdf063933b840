"""A run that hangs: the launcher notices, prints the stacks of all ranks, names the rank that the others wait for."""

import multiprocessing
import sys
import time
from pathlib import Path

import pytest

from tests.support.configs import tiny_config
from tests.support.forkserver import ForkServer
from trainyard.cli.heartbeat_callback import HeartbeatCallback
from trainyard.launch.heartbeat import Heartbeat, RankPlace, StepTimes, describe_hang, find_suspect
from trainyard.launch.launcher import launch
from trainyard.run.callbacks import Callback, TrainerView
from trainyard.run.trainer import Trainer

USER_CODE = """
import os
import time

import torch

calls = 0


def loss(output, batch):
    global calls
    calls += 1
    if calls == 7 and os.environ["RANK"] == "1":
        time.sleep(600)
    logits, labels = output.logits().flatten(0, 1), batch["labels"].long().flatten()
    return torch.nn.functional.cross_entropy(logits, labels, reduction="sum"), labels.numel()
"""
TRAIN = ["train", "tiny-llama", "--smoke", "checkpoint.export_hf=false", "log.loggers=[]", "evaluate.every=0"]


def test_rank_that_stops_is_named(cli: ForkServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.py").write_text(USER_CODE)
    arguments = [*TRAIN, "train.loss=mine:loss", "train.steps=30", "train.global_batch=2", "train.micro_batch=1"]
    command = [*arguments, "--nproc", "2", "--hang-timeout", "5", "log.directory=runs", "--logs", "logs"]
    done = cli.run(command, cwd=tmp_path)
    assert done.returncode == 1
    line = next(line for line in done.stderr.splitlines() if "no step for" in line)
    assert "after step 6; rank 1 is outside of a collective, at" in line
    (log,) = (tmp_path / "logs").glob("*/rank-1.log")
    assert "mine.py" in log.read_text()


def test_limit_follows_the_median_step(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.step"
    heartbeat, times = Heartbeat(path), StepTimes(path)
    times.poll()
    assert times.hang_limit(1) is None
    heartbeat.beat(1)
    times.poll()
    assert times.hang_limit(1) == 6  # the second step may compile, but not for ever
    for step in range(2, 6):
        heartbeat.beat(step)
        times.poll()
    assert times.step == 5
    assert times.hang_limit(1) == 1
    times.durations.extend([0.5] * 50)
    assert times.hang_limit(1) == 5
    heartbeat.beat(-1)
    times.poll()
    assert times.hang_limit(1) is None


SLOW_END = """
# Rank 0 writes the last checkpoint for a while; rank 1 waits for it, and has not come to its own end.
import os, time
from trainyard.launch.heartbeat import heartbeat_from_environment

heartbeat = heartbeat_from_environment()
for step in range(1, 21):
    heartbeat.beat(step)
    time.sleep(0.1)
if os.environ["RANK"] == "0":
    heartbeat.beat(-1)
time.sleep(2)
"""


def test_rank_past_its_last_step_does_not_hang(tmp_path: Path) -> None:
    (tmp_path / "rank.py").write_text(SLOW_END)
    command = [sys.executable, str(tmp_path / "rank.py")]
    assert launch([], 2, command=command, log_directory=tmp_path / "logs", hang_timeout=1) == 0


class StepWatch(Callback):
    """What the launcher sees of a rank while it trains."""

    def __init__(self, path: Path) -> None:
        self.times, self.limits = StepTimes(path), list[float | None]()

    def look(self) -> None:
        self.times.poll()
        self.limits.append(self.times.hang_limit(1))

    def on_step(self, trainer: TrainerView, step: int) -> None:
        self.look()

    def on_last_step(self, trainer: TrainerView) -> None:
        self.look()


def test_run_says_that_no_step_follows(tmp_path: Path) -> None:
    """Its last checkpoint and its export may take longer than any step."""
    path = tmp_path / "rank-0.step"
    watch, heartbeat = StepWatch(path), HeartbeatCallback(Heartbeat(path))
    Trainer(tiny_config(train={"steps": 6}, log={"directory": str(tmp_path)}), callbacks=[heartbeat, watch]).run()
    assert watch.limits[5] is not None
    assert (watch.times.step, watch.limits[6:]) == (-1, [None])


def beat_forever(path: Path) -> None:
    heartbeat = Heartbeat(path)
    while True:
        for step in (1, 2**40):  # all bytes differ
            heartbeat.beat(step)


def test_heartbeat_is_read_whole_while_it_is_written(tmp_path: Path) -> None:
    path, start = tmp_path / "rank-0.step", time.monotonic()
    writer = multiprocessing.get_context("fork").Process(target=beat_forever, args=(path,), daemon=True)
    writer.start()
    times, seen = StepTimes(path), set()
    try:
        for _ in range(20_000):
            times.poll()
            assert times.step in (0, 1, 2**40)
            assert start <= times.time <= time.monotonic()
            seen.add(times.time)
    finally:
        writer.kill()
        writer.join()
    assert len(seen) > 3  # the reader follows, and does not only keep what it had


def test_suspect() -> None:
    waiting = (
        'Current thread 0x1 (most recent call first):\n  File "/x/trainyard/compat/collectives.py", line 3 in wait\n'
    )
    working = 'Current thread 0x1 (most recent call first):\n  File "/x/torch/nn.py", line 9 in linear\n'
    working += '  File "/x/trainyard/models/llama.py", line 7 in forward\n'
    first, second = RankPlace.from_dump(0, 5, waiting), RankPlace.from_dump(1, 5, waiting)
    outside, behind, silent = (RankPlace.from_dump(1, *args) for args in ((5, working), (4, waiting), (5, "")))
    assert find_suspect([first, outside]) == outside
    assert find_suspect([first, behind]) == behind
    assert find_suspect([first, second]) is None
    start = "no step for 9 s after step 5; "
    blamed = "rank 1 is outside of a collective, at /x/trainyard/models/llama.py:7 forward"
    assert describe_hang(9, [first, outside]) == describe_hang(9, [outside]) == start + blamed
    assert describe_hang(9, [first, behind]) == start + "rank 1 is at step 4, others at 5"
    assert describe_hang(9, [first, silent]).endswith("rank 1 does not answer: it is stopped, or blocked in the kernel")
    assert describe_hang(9, [first, second]) == start + (
        "every rank of this host waits for another host, or for its device"
    )
    assert describe_hang(9, [first]).endswith("rank 0 is in a collective, at /x/trainyard/compat/collectives.py:3 wait")
