"""Compiling in forks: a fork that dies loses only its own graph, and no fork outlives its parent."""

import faulthandler
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from trainyard.preflight.precompile.compile_workers import CompileResult, ForkPool


def fork(
    pool: ForkPool, key: str, seconds: float = 0.0, problem: str | None = None, kill_signal: int | None = None
) -> None:
    if pool.fork(key):
        os.write(1, f"this is {key}\n".encode())
        time.sleep(seconds)
        if kill_signal:
            faulthandler.disable()
            os.kill(os.getpid(), kill_signal)
        pool.exit_child(problem)


def test_results_of_forks(tmp_path: Path) -> None:
    results: dict[str, CompileResult] = {}
    pool = ForkPool(2, tmp_path, lambda result: results.__setitem__(result.key, result))
    fork(pool, "good", 0.3)
    fork(pool, "bad", problem="CppCompileError: no such header")
    fork(pool, "killed", kill_signal=signal.SIGKILL)
    fork(pool, "crashed", kill_signal=signal.SIGSEGV)
    pool.wait_all()
    problems = {key: result.problem for key, result in results.items()}
    assert problems == {
        "good": None,
        "bad": "CppCompileError: no such header",
        "killed": "killed by SIGKILL; often the machine ran out of memory",
        "crashed": "killed by SIGSEGV",
    }
    assert 0.2 < results["good"].seconds < 30
    assert not results["good"].log.exists()
    assert "this is bad" in results["bad"].log.read_text()


def test_worker_limit(tmp_path: Path) -> None:
    for workers, min_seconds in ((1, 0.8), (4, 0.2)):
        pool = ForkPool(workers, tmp_path, lambda result: None)
        start = time.monotonic()
        for kill_signal in range(4):
            fork(pool, str(kill_signal), 0.2)
            assert len(pool.running) <= workers
        pool.wait_all()
        assert time.monotonic() - start >= min_seconds


def test_children_die_with_their_parent(tmp_path: Path) -> None:
    program = f"""
import os, time
from pathlib import Path
from trainyard.preflight.precompile.compile_workers import ForkPool
pool = ForkPool(2, Path({str(tmp_path)!r}), print)
for key in "ab":
    if pool.fork(key):
        Path({str(tmp_path)!r}, key).write_text(str(os.getpid()))
        time.sleep(600)
time.sleep(600)
"""
    parent = subprocess.Popen([sys.executable, "-c", program])
    files = [tmp_path / key for key in "ab"]
    deadline = time.monotonic() + 60
    while not all(file.exists() and file.read_text() for file in files):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    children = [int(file.read_text()) for file in files]
    parent.kill()
    parent.wait()
    while any(_running(child) for child in children):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def _running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"
