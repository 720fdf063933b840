"""Compiling in forks: one that dies takes nothing with it, and none outlives its parent."""

import faulthandler
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from trainyard.precompile.compile_workers import CompileResult, ForkPool


def fork(pool: ForkPool, key: str, seconds: float = 0.0, problem: str | None = None, number: int | None = None) -> None:
    if pool.fork(key):
        os.write(1, f"this is {key}\n".encode())
        time.sleep(seconds)
        if number:
            faulthandler.disable()
            os.kill(os.getpid(), number)
        pool.exit_child(problem)


def test_each_ends_in_its_own_way(tmp_path: Path) -> None:
    ended: dict[str, CompileResult] = {}
    pool = ForkPool(2, tmp_path, lambda how: ended.__setitem__(how.key, how))
    fork(pool, "good", 0.3)
    fork(pool, "bad", problem="CppCompileError: no such header")
    fork(pool, "killed", number=signal.SIGKILL)
    fork(pool, "crashed", number=signal.SIGSEGV)
    pool.wait_all()
    problems = {key: how.problem for key, how in ended.items()}
    assert problems == {
        "good": None,
        "bad": "CppCompileError: no such header",
        "killed": "killed by SIGKILL; often the machine ran out of memory",
        "crashed": "killed by SIGSEGV",
    }
    assert 0.2 < ended["good"].seconds < 30
    assert not ended["good"].log.exists()
    assert "this is bad" in ended["bad"].log.read_text()


def test_so_many_run_at_a_time(tmp_path: Path) -> None:
    for workers, least in ((1, 0.8), (4, 0.2)):
        pool = ForkPool(workers, tmp_path, lambda how: None)
        start = time.monotonic()
        for number in range(4):
            fork(pool, str(number), 0.2)
            assert len(pool.running) <= workers
        pool.wait_all()
        assert time.monotonic() - start >= least


def test_children_end_with_their_parent(tmp_path: Path) -> None:
    program = f"""
import os, time
from pathlib import Path
from trainyard.precompile.compile_workers import Pool
pool = Pool(2, Path({str(tmp_path)!r}), print)
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
