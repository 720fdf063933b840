"""SIGKILL at any instant of a save: what was complete stays whole, the run goes on from it, nothing is left over.

Lives of a run are forked from a process that has imported everything and done nothing, so that each costs a third of a
second. The disk is made slow in them, so that most of a life is writing and most kills hit a save.
"""

import gc
import json
import os
import random
import select
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests import tiny
from trainyard.checkpoint import places, store
from trainyard.launch.local import free_port
from trainyard.train.hooks import Hook, Run

ROOT = Path(__file__).parents[2]
KEEP = 2
STEPS = 100_000
"""More than all lives together make."""
MODEL = {**tiny.LLAMA, "vocab": 64, "hidden": 16, "layers": 1, "ffn": 16}
DATA = {"source": "synthetic", "sequence": 8}


# What runs in the forked processes.


class Tell(Hook):
    """What a life did, as lines that outlive it."""

    def __init__(self, tell: Callable[..., None], last: int) -> None:
        self.tell, self.last = tell, last

    def on_log(self, trainer: Run, record: dict[str, Any]) -> None:
        self.tell("loss", record["step"], record["loss"])
        if record["step"] == self.last:
            trainer.stop.asked = True  # type: ignore[attr-defined]

    def on_checkpoint(self, trainer: Run, record: dict[str, Any]) -> None:
        where = Path(record["checkpoint"]).parents[1]
        self.tell("saved", record["step"], sorted(str(path.relative_to(where)) for path in where.rglob("*")))


def live(request: dict[str, Any], rank: int, out: int) -> None:
    """One rank of a life, until it ends or is ended."""
    from trainyard.parallel.mesh import leave
    from trainyard.train.loop import Trainer

    def tell(*words: Any) -> None:
        os.write(out, (json.dumps(words) + "\n").encode())

    ranks = request["ranks"]
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(request["port"])}
    if request["slow"]:
        slow_disk(request["slow"])
    if request["operation"]:
        kill_at(request["operation"], request["directory"], tell)
    config = tiny.config(
        MODEL,
        data=DATA,
        train={"steps": STEPS, "global_batch": 2, "micro_batch": 1},
        checkpoint={"every": request["every"], "resume": "auto", "keep": KEEP, "final": False},
        layout={"zero": 1 if ranks > 1 else 0},
        log={"directory": request["directory"]},
    )
    last = request["last"] - (ranks > 1)  # several ranks agree to stop with the next step
    Trainer(config, hooks=[Tell(tell, last)], say=lambda line: tell("said", line)).run()
    leave()


def slow_disk(seconds: float) -> None:
    """Files are written in pieces with pauses between; the pauses around names are longer, so that kills find those
    few instants too."""
    longer = 8 * seconds
    write, remove = places.LocalPlace.write, places.LocalPlace.remove

    class Slow:
        def __init__(self, file: Any, pause: float) -> None:
            self.file, self.pause = file, pause

        def write(self, data: Any) -> None:
            for start in range(0, len(data), 1 << 14):
                time.sleep(self.pause)
                self.file.write(data[start : start + (1 << 14)])
                self.file.flush()

    @contextmanager
    def slowly(place: places.LocalPlace, name: str) -> Iterator[Any]:
        with write(place, name) as file:
            yield Slow(file, longer if name == store.MARKER else seconds)
            time.sleep(longer)
        time.sleep(longer)

    def removed(place: places.LocalPlace, name: str) -> None:
        time.sleep(longer)
        remove(place, name)

    places.LocalPlace.write, places.LocalPlace.remove = slowly, removed  # type: ignore[method-assign,assignment]


CHANGES = {"os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.chmod", "tempfile.mkstemp"}


def kill_at(number: int, directory: str, tell: Callable[..., None]) -> None:
    """Die just before the so-manieth change in the directory."""
    left = number

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal left
        writes = event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR)
        # shutil.rmtree names files without their directory
        if event in ("os.remove", "os.rmdir") or ((event in CHANGES or writes) and directory in str(arguments[0])):
            left -= 1
            if not left:
                tell("killed", event)
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def fork(request: dict[str, Any], rank: int) -> tuple[int, int]:
    """A rank as a process of its own, and a pipe that it tells into."""
    reading, writing = os.pipe()
    if not (child := os.fork()):
        code = 1
        try:
            os.close(reading)
            live(request, rank, writing)
            code = 0
        except BaseException:
            os.write(writing, (json.dumps(["failed", traceback.format_exc()]) + "\n").encode())
        finally:
            os._exit(code)
    os.close(writing)
    return child, reading


def whole_life(request: dict[str, Any]) -> dict[str, Any]:
    """Fork the ranks; `delay` after the first step, where the first save begins (or, `early`, after the fork), kill one
    of them. The others notice and end; if they do not, they are ended."""
    crew = [fork(request, rank) for rank in range(request["ranks"])]
    told: list[bytes] = [b""] * len(crew)
    codes: list[int | None] = [None] * len(crew)
    begun = time.monotonic()
    due = begun + request["delay"] if request["early"] else None
    end = begun + 30
    open_pipes = {reading: rank for rank, (_, reading) in enumerate(crew)}
    while open_pipes:
        now = time.monotonic()
        if due and now >= due:
            os.kill(crew[request["victim"]][0], signal.SIGKILL)
            due, end = None, now + 10
        elif now >= end:
            for rank in open_pipes.values():
                os.kill(crew[rank][0], signal.SIGKILL)
            end = now + 60
        ready, _, _ = select.select(list(open_pipes), [], [], max(0.0, (due or end) - now))
        for reading in ready:
            rank = open_pipes[reading]
            told[rank] += (piece := os.read(reading, 1 << 16))
            if request["delay"] is not None and not request["early"] and b'["loss"' in piece:
                due = due or time.monotonic() + request["delay"]
            if not piece:
                del open_pipes[reading]
                os.close(reading)
                codes[rank] = os.waitpid(crew[rank][0], 0)[1]
                if rank == request["victim"]:
                    due = None
    lines = [[json.loads(line) for line in text.splitlines() if line.endswith(b"]")] for text in told]
    return {"codes": codes, "told": lines}


def serve() -> None:
    """Read requests, answer each when its life is over."""
    import trainyard.train.loop  # noqa: F401
    from trainyard.devices.cpu import Cpu

    Cpu.peak = lambda self, dtype: None  # type: ignore[method-assign] # takes longer than all else in a life
    gc.collect()
    gc.freeze()
    for line in sys.stdin:
        print(json.dumps(whole_life(json.loads(line))), flush=True)


# What the tests do with them.


@dataclass
class Life:
    steps: dict[int, float]
    """Losses by step."""
    said: list[str]
    saved: list[tuple[int, list[str]]]
    """Steps, and what the directory held when each was saved."""
    killed: str | None
    failed: list[str]
    codes: list[int]


Live = Callable[..., Life]


@pytest.fixture(scope="module")
def live_once() -> Iterator[Live]:
    """Forks a life and waits for its end."""
    process = subprocess.Popen(
        [sys.executable, "-c", "from tests.checkpoint.test_kills import serve; serve()"],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    asking, answers = process.stdin, process.stdout
    assert asking
    assert answers

    def live_once(directory: Path, delay: float | None = None, **other: Any) -> Life:
        with free_port() as port:
            request = {"ranks": 1, "early": False, "slow": 0.0, "operation": 0, "last": 0, "victim": 0, "every": 1}
            request |= {"directory": str(directory), "delay": delay, "port": port, **other}
            print(json.dumps(request), file=asking, flush=True)
            answer = json.loads(answers.readline())
        first = answer["told"][0]
        return Life(
            steps={line[1]: line[2] for line in first if line[0] == "loss"},
            said=[line[1] for line in first if line[0] == "said"],
            saved=[(line[1], line[2]) for line in first if line[0] == "saved"],
            killed=next((line[1] for line in first if line[0] == "killed"), None),
            failed=[line[1] for lines in answer["told"] for line in lines if line[0] == "failed"],
            codes=answer["codes"],
        )

    yield live_once
    asking.close()
    process.wait(timeout=10)


@dataclass
class Story:
    """The lives of a run, and what must hold after each."""

    live_once: Live
    parent: Path
    ranks: int = 1
    lives: list[Life] = field(default_factory=list)
    complete: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.directory = self.parent / "run" / "checkpoints"

    def live(self, delay: float | None = None, **other: Any) -> Life:
        """One more. What was complete still is; it went on from the newest; saves left nothing but themselves."""
        life = self.live_once(self.parent, delay, ranks=self.ranks, **other)
        before, self.complete = self.complete, complete(self.directory)
        assert [path.name for path in self.parent.iterdir()] == ["run"]
        assert set(sorted({*before, *self.complete})[-KEEP:]) <= set(self.complete)
        if life.steps:
            newest = before[0] if before else 0
            assert list(life.steps) == [*range(newest + 1, max(life.steps) + 1)]
            where = self.directory / store.directory_name(newest)
            assert not before or f"going on from step {newest}: {where}" in life.said
        for step, listing in life.saved:
            assert listing == self.listing([each for each in (step - 1, step) if each])
        self.lives.append(life)
        return life

    def listing(self, steps: list[int]) -> list[str]:
        """What the directory of a run with these steps alone holds."""
        files = ["", "/complete.json", *(f"/rank_{rank:05d}.safetensors" for rank in range(self.ranks))]
        inside = [f"checkpoints/{store.directory_name(step)}{file}" for step in steps for file in files]
        return ["checkpoints", *inside, "config.yaml", "metrics.jsonl"]

    def end(self) -> None:
        """A last life that nothing happens to; then all losses against a run that nothing happened to, bit for bit."""
        last = self.complete[0] + 2
        life = self.live(last=last)
        assert life.codes == [0] * self.ranks, life.failed
        assert self.complete == [last, last - 1]
        assert [step for step, _ in life.saved] == [last - 1, last]
        lines = [json.loads(line) for line in (self.parent / "run" / "metrics.jsonl").read_text().splitlines()]
        assert [line["step"] for line in lines if "loss" in line] == [*range(1, last + 1)]
        last = max(step for life in self.lives for step in life.steps)
        plain = self.live_once(self.parent / "undisturbed", ranks=self.ranks, every=0, last=last)
        assert plain.codes == [0] * self.ranks, plain.failed
        for life in self.lives:
            assert life.steps == {step: plain.steps[step] for step in life.steps}


def complete(directory: Path) -> list[int]:
    """Steps that have a marker, newest first, each of which must be whole."""
    place = places.open_place(directory)
    found = [step for step in store.steps_in(place) if store.is_complete(place, step)]
    for step in found:
        with store.Checkpoint(place / store.directory_name(step)) as checkpoint:
            assert checkpoint.step == step
            checkpoint.check(checkpoint.files)
    return found


def test_a_hundred_kills_at_random_instants(live_once: Live, tmp_path: Path) -> None:
    story = Story(live_once, tmp_path)
    assert story.live(last=1).codes == [0]
    draw = random.Random(7)
    marks = dict.fromkeys(("before a step", "nothing new", "new", "half-written"), 0)
    for number in range(100):
        before = story.complete
        early = number % 10 == 9
        life = story.live(draw.uniform(0.0, 0.1), early=early, slow=draw.choice([0.0, 0.0003, 0.001]))
        assert life.codes == [signal.SIGKILL], life.failed
        marks["before a step"] += not life.steps
        marks["new" if story.complete != before else "nothing new"] += 1
        marks["half-written"] += any(path.suffix == ".part" for path in story.directory.rglob("*"))
    print(marks)
    assert min(marks.values()) >= 5, marks  # kills came before, during and after writes
    story.end()


def test_a_kill_before_each_change_to_the_disk(live_once: Live, tmp_path: Path) -> None:
    """No instant between two changes is left out: not those of a rename, nor of taking an old one away."""
    story = Story(live_once, tmp_path)
    seen: list[str | None] = []
    while None not in seen:
        assert story.live(last=sum(story.complete[:1]) + 2).codes == [0]
        life = story.live(operation=len(seen) + 1, last=story.complete[0] + 1)
        assert life.codes == [signal.SIGKILL if life.killed else 0], life.failed
        seen.append(life.killed)
    assert set(seen) == CHANGES | {"open", None}
    story.end()


@pytest.mark.parametrize("victim", [0, 1])
def test_kills_of_one_of_two_ranks(live_once: Live, tmp_path: Path, victim: int) -> None:
    story = Story(live_once, tmp_path, ranks=2)
    assert story.live(last=2).codes == [0, 0]
    draw = random.Random(victim)
    for _ in range(6):
        life = story.live(draw.uniform(0.0, 0.15), victim=victim, slow=draw.choice([0.0003, 0.001]))
        assert life.codes[victim] == signal.SIGKILL
        assert life.codes[1 - victim] != 0
    story.end()
