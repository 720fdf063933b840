"""SIGKILL at any instant of a save: what was complete stays whole, the run goes on from it, nothing is left over."""

import json
import random
import signal
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint.killable_runs import CHANGE_EVENTS, KEPT_CHECKPOINTS, RunOnce, RunRecord, fork_server
from tests.checkpoint.saved_runs import verified_steps
from trainyard.checkpoint.native import checkpoint


@pytest.fixture(scope="module")
def live_once() -> Iterator[RunOnce]:
    with fork_server() as live:
        yield live


@dataclass
class Story:
    """The lives of a run, and what must hold after each."""

    live_once: RunOnce
    parent: Path
    ranks: int = 1
    lives: list[RunRecord] = field(default_factory=list)
    complete: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.directory = self.parent / "run" / "checkpoints"

    def live(self, delay: float | None = None, **other: Any) -> RunRecord:
        """One more. What was complete still is; it went on from the newest; saves left nothing but themselves."""
        life = self.live_once(self.parent, delay, ranks=self.ranks, **other)
        before, self.complete = self.complete, verified_steps(self.directory)
        assert [path.name for path in self.parent.iterdir()] == ["run"]
        assert set(sorted({*before, *self.complete})[-KEPT_CHECKPOINTS:]) <= set(self.complete)
        if life.losses:
            newest = before[0] if before else 0
            assert list(life.losses) == [*range(newest + 1, max(life.losses) + 1)]
            where = self.directory / checkpoint.step_directory(newest)
            assert not before or f"going on from step {newest}: {where}" in life.messages
        for step, listing in life.saved_listings:
            assert listing == self.listing([each for each in (step - 1, step) if each])
        self.lives.append(life)
        return life

    def listing(self, steps: list[int]) -> list[str]:
        """What the directory of a run with these steps alone holds."""
        files = ["", "/complete.json", *(f"/rank_{rank:05d}.safetensors" for rank in range(self.ranks))]
        inside = [f"checkpoints/{checkpoint.step_directory(step)}{file}" for step in steps for file in files]
        return ["checkpoints", *inside, "config.yaml", "metrics.jsonl"]

    def end(self) -> None:
        """A last life that nothing happens to; then all losses against a run that nothing happened to, bit for bit."""
        last = self.complete[0] + 2
        life = self.live(last=last)
        assert life.exit_codes == [0] * self.ranks, life.tracebacks
        assert self.complete == [last, last - 1]
        assert [step for step, _ in life.saved_listings] == [last - 1, last]
        lines = [json.loads(line) for line in (self.parent / "run" / "metrics.jsonl").read_text().splitlines()]
        assert [line["step"] for line in lines if "loss" in line] == [*range(1, last + 1)]
        last = max(step for life in self.lives for step in life.losses)
        plain = self.live_once(self.parent / "undisturbed", ranks=self.ranks, every=0, last=last)
        assert plain.exit_codes == [0] * self.ranks, plain.tracebacks
        for life in self.lives:
            assert life.losses == {step: plain.losses[step] for step in life.losses}


def test_a_hundred_kills_at_random_instants(live_once: RunOnce, tmp_path: Path) -> None:
    story = Story(live_once, tmp_path)
    assert story.live(last=1).exit_codes == [0]
    draw = random.Random(7)
    marks = dict.fromkeys(("before a step", "nothing new", "new", "half-written"), 0)
    for number in range(100):
        before = story.complete
        early = number % 10 == 9
        life = story.live(draw.uniform(0.0, 0.1), early=early, slow=draw.choice([0.0, 0.0003, 0.001]))
        assert life.exit_codes == [signal.SIGKILL], life.tracebacks
        marks["before a step"] += not life.losses
        marks["new" if story.complete != before else "nothing new"] += 1
        marks["half-written"] += any(path.suffix == ".part" for path in story.directory.rglob("*"))
    assert min(marks.values()) >= 5, marks  # kills came before, during and after writes
    story.end()


def test_a_kill_before_each_change_to_the_disk(live_once: RunOnce, tmp_path: Path) -> None:
    """No instant between two changes is left out: not those of a rename, nor of taking an old one away."""
    story = Story(live_once, tmp_path)
    seen: list[str | None] = []
    while None not in seen:
        assert story.live(last=sum(story.complete[:1]) + 2).exit_codes == [0]
        life = story.live(operation=len(seen) + 1, last=story.complete[0] + 1)
        assert life.exit_codes == [signal.SIGKILL if life.killed_before else 0], life.tracebacks
        seen.append(life.killed_before)
    assert set(seen) == CHANGE_EVENTS | {"open", None}
    story.end()


@pytest.mark.parametrize("victim", [0, 1])
def test_kills_of_one_of_two_ranks(live_once: RunOnce, tmp_path: Path, victim: int) -> None:
    story = Story(live_once, tmp_path, ranks=2)
    assert story.live(last=2).exit_codes == [0, 0]
    draw = random.Random(victim)
    for _ in range(6):
        life = story.live(draw.uniform(0.0, 0.15), victim=victim, slow=draw.choice([0.0003, 0.001]))
        assert life.exit_codes[victim] == signal.SIGKILL
        assert life.exit_codes[1 - victim] != 0
    story.end()
