"""Training runs to be killed, forked from a process that has imported everything, so that each takes a fraction of a
second. A slow disk can be simulated, so that most of a run is writing and most kills hit a save."""

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
from tests.support.logs import captured_log
from trainyard.checkpoint import checkpoint
from trainyard.launch.launcher import reserved_port
from trainyard.remote import storage
from trainyard.run.callbacks import Callback, TrainerView

ROOT = Path(__file__).parents[2]
KEPT_CHECKPOINTS = 2
STEPS = 100_000
"""More steps than all runs of a test make together."""
MODEL = {**configs.LLAMA, "vocab": 64, "hidden": 16, "layers": 1, "ffn": 16}
DATA = {"source": "synthetic", "seq_len": 8}
Report = Callable[..., None]


class ReportProgress(Callback):
    """Reports losses and saves through a pipe, so that the reports survive the process."""

    def __init__(self, report: Report, last_step: int) -> None:
        self.report, self.last_step = report, last_step

    def on_log(self, trainer: TrainerView, record: dict[str, Any]) -> None:
        self.report("loss", record["step"], record["loss"])
        if record["step"] == self.last_step:
            trainer.stop_signal.requested = True  # type: ignore[attr-defined]

    def on_checkpoint(self, trainer: TrainerView, record: dict[str, Any]) -> None:
        run = Path(record["checkpoint"]).parents[1]
        self.report("saved", record["step"], sorted(str(path.relative_to(run)) for path in run.rglob("*")))


def run_rank(request: dict[str, Any], rank: int, pipe: int) -> None:
    """Train as one rank until the last step or the kill."""
    from trainyard.parallel.mesh import shutdown_distributed
    from trainyard.run.trainer import Trainer

    def report(*event: Any) -> None:
        os.write(pipe, (json.dumps(event) + "\n").encode())

    ranks = request["ranks"]
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(request["port"])}
    if request["pause"]:
        slow_disk(request["pause"])
    if request["kill_before"]:
        kill_before_change(request["kill_before"], request["directory"], report)
    config = configs.tiny_config(
        MODEL,
        data=DATA,
        train={"steps": STEPS, "global_batch": 2, "micro_batch": 1},
        checkpoint={"every": request["every"], "resume": "auto", "keep": KEPT_CHECKPOINTS, "export_hf": False},
        layout={"zero": 1 if ranks > 1 else 0},
        log={"directory": request["directory"], "spans": False},
    )
    last_step = request["last_step"] - (ranks > 1)  # several ranks agree on a stop with the next step
    with captured_log(lambda line: report("message", line)):
        Trainer(config, callbacks=[ReportProgress(report, last_step)]).run()
    shutdown_distributed()


def slow_disk(pause_s: float) -> None:
    """Write files in chunks with pauses. Pauses around renames are longer, so that kills hit those moments too."""
    long_pause_s = 8 * pause_s
    write, remove = storage.LocalStorage.write, storage.LocalStorage.remove

    class SlowFile:
        def __init__(self, file: Any, pause_s: float) -> None:
            self.file, self.pause_s = file, pause_s

        def write(self, data: Any) -> None:
            for start in range(0, len(data), 1 << 14):
                time.sleep(self.pause_s)
                self.file.write(data[start : start + (1 << 14)])
                self.file.flush()

    @contextmanager
    def slow_write(directory: storage.LocalStorage, name: str) -> Iterator[Any]:
        with write(directory, name) as file:
            yield SlowFile(file, long_pause_s if name == checkpoint.COMMIT_FILE else pause_s)
            time.sleep(long_pause_s)
        time.sleep(long_pause_s)

    def slow_remove(directory: storage.LocalStorage, name: str) -> None:
        time.sleep(long_pause_s)
        remove(directory, name)

    storage.LocalStorage.write = slow_write  # type: ignore[method-assign,assignment]
    storage.LocalStorage.remove = slow_remove  # type: ignore[method-assign]


CHANGE_EVENTS = {"os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.chmod", "tempfile.mkstemp"}
"""Audit events of filesystem changes, besides opening a file for writing."""


def kill_before_change(count: int, directory: str, report: Report) -> None:
    """SIGKILL this process just before the `count`-th filesystem change in the directory."""
    remaining = count

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal remaining
        writes = event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR)
        # The events of shutil.rmtree have paths without a directory.
        if event in ("os.remove", "os.rmdir") or (
            (event in CHANGE_EVENTS or writes) and directory in str(arguments[0])
        ):
            remaining -= 1
            if not remaining:
                report("killed", event)
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def fork_rank(request: dict[str, Any], rank: int) -> tuple[int, int]:
    """Fork a rank. Returns its process id and the pipe of its reports."""
    read_end, write_end = os.pipe()
    if not (pid := os.fork()):
        code = 1
        try:
            os.close(read_end)
            run_rank(request, rank, write_end)
            code = 0
        except BaseException:
            os.write(write_end, (json.dumps(["failed", traceback.format_exc()]) + "\n").encode())
        finally:
            os._exit(code)
    os.close(write_end)
    return pid, read_end


def run_and_kill(request: dict[str, Any]) -> dict[str, Any]:
    """Fork the ranks and kill one of them `delay_s` after the first step, when the first save starts.

    `early`: after the fork instead. The other ranks notice and exit; if they do not, they are killed too.
    """
    ranks = [fork_rank(request, rank) for rank in range(request["ranks"])]
    output: list[bytes] = [b""] * len(ranks)
    exit_codes: list[int | None] = [None] * len(ranks)
    start = time.monotonic()
    kill_time = start + request["delay_s"] if request["early"] else None
    deadline = start + 30
    open_pipes = {read_end: rank for rank, (_, read_end) in enumerate(ranks)}
    while open_pipes:
        now = time.monotonic()
        if kill_time and now >= kill_time:
            os.kill(ranks[request["victim"]][0], signal.SIGKILL)
            kill_time, deadline = None, now + 10
        elif now >= deadline:
            for rank in open_pipes.values():
                os.kill(ranks[rank][0], signal.SIGKILL)
            deadline = now + 60
        ready, _, _ = select.select(list(open_pipes), [], [], max(0.0, (kill_time or deadline) - now))
        for read_end in ready:
            rank = open_pipes[read_end]
            output[rank] += (chunk := os.read(read_end, 1 << 16))
            if request["delay_s"] is not None and not request["early"] and b'["loss"' in chunk:
                kill_time = kill_time or time.monotonic() + request["delay_s"]
            if not chunk:
                del open_pipes[read_end]
                os.close(read_end)
                exit_codes[rank] = os.waitpid(ranks[rank][0], 0)[1]
                if rank == request["victim"]:
                    kill_time = None
    reports = [[json.loads(line) for line in text.splitlines() if line.endswith(b"]")] for text in output]
    return {"exit_codes": exit_codes, "reports": reports}


def serve_requests() -> None:
    """Run the requests from stdin one by one and print the result of each."""
    import trainyard.run.trainer  # noqa: F401
    from trainyard.devices.cpu import CpuDevice

    # Measuring the peak throughput takes longer than the rest of a run.
    CpuDevice.peak_throughput = lambda self, dtype: None  # type: ignore[method-assign]
    gc.collect()
    gc.freeze()
    for line in sys.stdin:
        print(json.dumps(run_and_kill(json.loads(line))), flush=True)


@dataclass
class RunRecord:
    """The reports of a run (of rank 0), and how it ended."""

    losses: dict[int, float]
    """Losses by step."""
    messages: list[str]
    saved_listings: list[tuple[int, list[str]]]
    """Saved steps, each with the content of the run directory at that time."""
    killed_before: str | None
    """The filesystem change before which the process was killed."""
    tracebacks: list[str]
    exit_codes: list[int]


RunOnce = Callable[..., RunRecord]


@contextmanager
def fork_server() -> Iterator[RunOnce]:
    """Yield a function that forks a run and waits for its end."""
    process = subprocess.Popen(
        [sys.executable, "-c", "from tests.checkpoint.killable_runs import serve_requests; serve_requests()"],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    requests, results = process.stdin, process.stdout
    assert requests
    assert results

    def run_once(directory: Path, delay_s: float | None = None, **options: Any) -> RunRecord:
        with reserved_port() as port:
            request = {"ranks": 1, "early": False, "pause": 0.0, "kill_before": 0, "victim": 0, "every": 1}
            request |= {"last_step": 0, "directory": str(directory), "delay_s": delay_s, "port": port, **options}
            print(json.dumps(request), file=requests, flush=True)
            result = json.loads(results.readline())
        rank_0 = result["reports"][0]
        return RunRecord(
            losses={event[1]: event[2] for event in rank_0 if event[0] == "loss"},
            messages=[event[1] for event in rank_0 if event[0] == "message"],
            saved_listings=[(event[1], event[2]) for event in rank_0 if event[0] == "saved"],
            killed_before=next((event[1] for event in rank_0 if event[0] == "killed"), None),
            tracebacks=[event[1] for reports in result["reports"] for event in reports if event[0] == "failed"],
            exit_codes=result["exit_codes"],
        )

    yield run_once
    requests.close()
    process.wait(timeout=240)
