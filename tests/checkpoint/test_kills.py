"""SIGKILL at any moment of a save: committed checkpoints stay intact, the run resumes from the latest one, and no files
are left behind."""

import json
import os
import random
import signal
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint.killable_runs import CHANGE_EVENTS, KEPT_CHECKPOINTS, RunOnce, RunRecord, fork_server
from tests.checkpoint.saved_runs import verified_steps
from trainyard.checkpoint import checkpoint

NIGHTLY_KILLS = int(os.environ.get("TRAINYARD_KILLS", "100"))
"""Random kills in the nightly tier. Set 1000 for a long search."""


@pytest.fixture(scope="module")
def run_once() -> Iterator[RunOnce]:
    with fork_server() as run_once:
        yield run_once


@dataclass
class KilledRun:
    """A run that is killed and resumed again and again, with the invariants that hold after every kill."""

    run_once: RunOnce
    parent: Path
    ranks: int = 1
    records: list[RunRecord] = field(default_factory=list)
    committed: list[int] = field(default_factory=list)
    """Steps of committed checkpoints, latest first."""

    def __post_init__(self) -> None:
        self.directory = self.parent / "run" / "checkpoints"

    def resume(self, delay_s: float | None = None, **options: Any) -> RunRecord:
        """Start the run once more, and check that it kept committed checkpoints, resumed from the latest one, and that
        saves left no other files."""
        record = self.run_once(self.parent, delay_s, ranks=self.ranks, **options)
        before, self.committed = self.committed, verified_steps(self.directory)
        assert [path.name for path in self.parent.iterdir()] == ["run"], record.tracebacks
        assert set(sorted({*before, *self.committed})[-KEPT_CHECKPOINTS:]) <= set(self.committed)
        if record.losses:
            latest = before[0] if before else 0
            assert list(record.losses) == [*range(latest + 1, max(record.losses) + 1)]
            path = self.directory / checkpoint.step_directory(latest)
            assert not before or any(str(path) in message for message in record.messages)
        for step, listing in record.saved_listings:
            assert listing == self.listing([saved for saved in (step - 1, step) if saved])
        self.records.append(record)
        return record

    def listing(self, steps: list[int]) -> list[str]:
        """The content of the run directory with exactly these checkpoints."""
        files = ["", "/complete.json", *(f"/rank_{rank:05d}.safetensors" for rank in range(self.ranks))]
        paths = [f"checkpoints/{checkpoint.step_directory(step)}{file}" for step in steps for file in files]
        return ["checkpoints", *paths, "config.yaml", "events.jsonl", "metrics.jsonl", "run.json"]

    def finish(self) -> None:
        """Resume once without a kill, then compare all losses bit for bit with an undisturbed run."""
        last_step = self.committed[0] + 2
        record = self.resume(last_step=last_step)
        assert record.exit_codes == [0] * self.ranks, record.tracebacks
        assert self.committed == [last_step, last_step - 1]
        assert [step for step, _ in record.saved_listings] == [last_step - 1, last_step]
        metrics = [json.loads(line) for line in (self.parent / "run" / "metrics.jsonl").read_text().splitlines()]
        assert [line["step"] for line in metrics if "loss" in line] == [*range(1, last_step + 1)]
        last_step = max(step for record in self.records for step in record.losses)
        undisturbed = self.run_once(self.parent / "undisturbed", ranks=self.ranks, every=0, last_step=last_step)
        assert undisturbed.exit_codes == [0] * self.ranks, undisturbed.tracebacks
        for record in self.records:
            assert record.losses == {step: undisturbed.losses[step] for step in record.losses}


@pytest.mark.nightly
@pytest.mark.parametrize("kills", [20, NIGHTLY_KILLS])
def test_random_kills(run_once: RunOnce, tmp_path: Path, kills: int) -> None:
    run = KilledRun(run_once, tmp_path)
    assert run.resume(last_step=1).exit_codes == [0]
    rng = random.Random(7)
    outcomes = dict.fromkeys(("before a step", "nothing new", "new checkpoint", "half-written"), 0)
    longest_delay_s = 0.1
    for i in range(kills):
        before = run.committed
        early = i % 10 == 9
        delay_s = rng.uniform(0.0, longest_delay_s)
        record = run.resume(delay_s, early=early, pause=rng.choice([0.0, 0.0003, 0.001]))
        assert record.exit_codes == [signal.SIGKILL], record.tracebacks
        has_new = run.committed != before
        longest_delay_s *= 0.8 if has_new else 1.1  # follows the speed of the machine
        outcomes["before a step"] += not record.losses
        outcomes["new checkpoint" if has_new else "nothing new"] += 1
        outcomes["half-written"] += any(path.suffix == ".part" for path in run.directory.rglob("*"))
    assert min(outcomes.values()) >= kills // 20, outcomes  # kills came before, during and after writes
    run.finish()


def test_a_kill_before_every_filesystem_change(run_once: RunOnce, tmp_path: Path) -> None:
    """Covers every moment between two changes, including renames and the removal of old checkpoints."""
    run = KilledRun(run_once, tmp_path)
    killed_before: list[str | None] = []
    while None not in killed_before:
        assert run.resume(last_step=sum(run.committed[:1]) + 2).exit_codes == [0]
        record = run.resume(kill_before=len(killed_before) + 1, last_step=run.committed[0] + 1)
        assert record.exit_codes == [signal.SIGKILL if record.killed_before else 0], record.tracebacks
        killed_before.append(record.killed_before)
    assert set(killed_before) == CHANGE_EVENTS | {"open", None}
    run.finish()


@pytest.mark.parametrize("kills", [2, pytest.param(6, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("victim", [pytest.param(0, marks=pytest.mark.nightly), 1])
def test_kills_of_one_of_two_ranks(run_once: RunOnce, tmp_path: Path, victim: int, kills: int) -> None:
    run = KilledRun(run_once, tmp_path, ranks=2)
    assert run.resume(last_step=2).exit_codes == [0, 0]
    rng = random.Random(victim)
    for _ in range(kills):
        record = run.resume(rng.uniform(0.0, 0.15), victim=victim, pause=rng.choice([0.0003, 0.001]))
        assert record.exit_codes[victim] == signal.SIGKILL
        assert record.exit_codes[1 - victim] != 0
    run.finish()
