"""Lives of a run, to be killed: forked from a process that has imported everything and done nothing, so that each costs
a fraction of a second. The disk can be slow in them, so that most of a life is writing and most kills hit a save."""

import gc
import json
import os
import select
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support import configs
from trainyard.checkpoint.io import storage
from trainyard.checkpoint.native import checkpoint
from trainyard.launch.launcher import reserved_port
from trainyard.train.callbacks import Callback, TrainerView

ROOT = Path(__file__).parents[2]
KEPT_CHECKPOINTS = 2
STEPS = 100_000
"""More than all lives together make."""
MODEL = {**configs.LLAMA, "vocab": 64, "hidden": 16, "layers": 1, "ffn": 16}
DATA = {"source": "synthetic", "seq_len": 8}


class ReportProgress(Callback):
    """What a life did, as lines that outlive it."""

    def __init__(self, tell: Callable[..., None], last: int) -> None:
        self.report, self.last_step = tell, last

    def on_log(self, trainer: TrainerView, record: dict[str, Any]) -> None:
        self.report("loss", record["step"], record["loss"])
        if record["step"] == self.last_step:
            trainer.stop_signal.requested = True  # type: ignore[attr-defined]

    def on_checkpoint(self, trainer: TrainerView, record: dict[str, Any]) -> None:
        where = Path(record["checkpoint"]).parents[1]
        self.report("saved", record["step"], sorted(str(path.relative_to(where)) for path in where.rglob("*")))


def run_rank(request: dict[str, Any], rank: int, out: int) -> None:
    """One rank of a life, until it ends or is ended."""
    from trainyard.parallel.mesh import shutdown_distributed
    from trainyard.train.trainer import Trainer

    def tell(*words: Any) -> None:
        os.write(out, (json.dumps(words) + "\n").encode())

    ranks = request["ranks"]
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(request["port"])}
    if request["slow"]:
        slow_disk(request["slow"])
    if request["operation"]:
        kill_before_change(request["operation"], request["directory"], tell)
    config = configs.tiny_config(
        MODEL,
        data=DATA,
        train={"steps": STEPS, "global_batch": 2, "micro_batch": 1},
        checkpoint={"every": request["every"], "resume": "auto", "keep": KEPT_CHECKPOINTS, "export_hf": False},
        layout={"zero": 1 if ranks > 1 else 0},
        log={"directory": request["directory"]},
    )
    last = request["last"] - (ranks > 1)  # several ranks agree to stop with the next step
    Trainer(config, callbacks=[ReportProgress(tell, last)], say=lambda line: tell("said", line)).run()
    shutdown_distributed()


def slow_disk(seconds: float) -> None:
    """Files are written in pieces with pauses between; the pauses around names are longer, so that kills find those
    few instants too."""
    longer = 8 * seconds
    write, remove = storage.LocalStorage.write, storage.LocalStorage.remove

    class Slow:
        def __init__(self, file: Any, pause: float) -> None:
            self.file, self.pause = file, pause

        def write(self, data: Any) -> None:
            for start in range(0, len(data), 1 << 14):
                time.sleep(self.pause)
                self.file.write(data[start : start + (1 << 14)])
                self.file.flush()

    @contextmanager
    def slowly(place: storage.LocalStorage, name: str) -> Iterator[Any]:
        with write(place, name) as file:
            yield Slow(file, longer if name == checkpoint.COMMIT_FILE else seconds)
            time.sleep(longer)
        time.sleep(longer)

    def removed(place: storage.LocalStorage, name: str) -> None:
        time.sleep(longer)
        remove(place, name)

    storage.LocalStorage.write, storage.LocalStorage.remove = slowly, removed  # type: ignore[method-assign,assignment]


CHANGE_EVENTS = {"os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.chmod", "tempfile.mkstemp"}


def kill_before_change(number: int, directory: str, tell: Callable[..., None]) -> None:
    """Die just before the so-manieth change in the directory."""
    left = number

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal left
        writes = event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR)
        # shutil.rmtree names files without their directory
        if event in ("os.remove", "os.rmdir") or (
            (event in CHANGE_EVENTS or writes) and directory in str(arguments[0])
        ):
            left -= 1
            if not left:
                tell("killed", event)
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def fork_rank(request: dict[str, Any], rank: int) -> tuple[int, int]:
    """A rank as a process of its own, and a pipe that it tells into."""
    reading, writing = os.pipe()
    if not (child := os.fork()):
        code = 1
        try:
            os.close(reading)
            run_rank(request, rank, writing)
            code = 0
        except BaseException:
            os.write(writing, (json.dumps(["failed", traceback.format_exc()]) + "\n").encode())
        finally:
            os._exit(code)
    os.close(writing)
    return child, reading


def run_and_kill(request: dict[str, Any]) -> dict[str, Any]:
    """Fork the ranks; `delay` after the first step, where the first save begins (or, `early`, after the fork), kill one
    of them. The others notice and end; if they do not, they are ended."""
    crew = [fork_rank(request, rank) for rank in range(request["ranks"])]
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


def serve_requests() -> None:
    """Read requests, answer each when its life is over."""
    import trainyard.train.trainer  # noqa: F401
    from trainyard.devices.cpu import CpuDevice

    CpuDevice.peak_throughput = lambda self, dtype: None  # type: ignore[method-assign] # takes longer than all else in a life
    gc.collect()
    gc.freeze()
    for line in sys.stdin:
        print(json.dumps(run_and_kill(json.loads(line))), flush=True)


@dataclass
class RunRecord:
    losses: dict[int, float]
    """Losses by step."""
    messages: list[str]
    saved_listings: list[tuple[int, list[str]]]
    """Steps, and what the directory held when each was saved."""
    killed_before: str | None
    tracebacks: list[str]
    exit_codes: list[int]


RunOnce = Callable[..., RunRecord]


@contextmanager
def fork_server() -> Iterator[RunOnce]:
    """A call that forks a life and waits for its end."""
    process = subprocess.Popen(
        [sys.executable, "-c", "from tests.checkpoint.killable_runs import serve_requests; serve_requests()"],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    asking, answers = process.stdin, process.stdout
    assert asking
    assert answers

    def live_once(directory: Path, delay: float | None = None, **other: Any) -> RunRecord:
        with reserved_port() as port:
            request = {"ranks": 1, "early": False, "slow": 0.0, "operation": 0, "last": 0, "victim": 0, "every": 1}
            request |= {"directory": str(directory), "delay": delay, "port": port, **other}
            print(json.dumps(request), file=asking, flush=True)
            answer = json.loads(answers.readline())
        first = answer["told"][0]
        return RunRecord(
            losses={line[1]: line[2] for line in first if line[0] == "loss"},
            messages=[line[1] for line in first if line[0] == "said"],
            saved_listings=[(line[1], line[2]) for line in first if line[0] == "saved"],
            killed_before=next((line[1] for line in first if line[0] == "killed"), None),
            tracebacks=[line[1] for lines in answer["told"] for line in lines if line[0] == "failed"],
            exit_codes=answer["codes"],
        )

    yield live_once
    asking.close()
    process.wait(timeout=10)
