"""The launcher with real rank processes: it shows the first failure once and leaves no process behind."""

import os
import pty
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from trainyard.launch.outcome import OUTCOME_FILE, LaunchOutcome

PRELUDE = """
import os, pathlib, signal, socket, subprocess, sys, time
from trainyard.core.errors import RunStopped, UserError
from trainyard.launch.rank_guard import rank_process_guard

here, rank, world = pathlib.Path(sys.argv[1]), int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])

def begin():
    "Record the process ids of this rank and of a child process, and wait for all ranks."
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", str(here)])
    (here / f"{rank}.part").write_text(f"{os.getpid()} {child.pid}")
    (here / f"{rank}.part").rename(here / f"{rank}.pids")
    while len(list(here.glob("*.pids"))) < world:
        time.sleep(0.01)

with rank_process_guard():
"""
DRIVER = """
import sys
from trainyard.launch.launcher import launch
sys.exit(launch(sys.argv[3:], int(sys.argv[2]), {"ADDED": "yes"}, [sys.executable, sys.argv[1]]))
"""
STARTED: list[subprocess.Popen[str]] = []


@pytest.fixture(autouse=True)
def _kill_leftover_processes(tmp_path: Path) -> Iterator[None]:
    """Kill what a broken launcher leaves behind: recorded process ids whose command line names the test directory."""
    yield
    for process in STARTED:
        process.kill()  # no effect after wait()
    STARTED.clear()
    for pid in pids(tmp_path):
        shown = subprocess.run(
            ["ps", "-ww", "-o", "args=", "-p", str(pid)], capture_output=True, text=True, check=False
        )
        if str(tmp_path) in shown.stdout:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def start(here: Path, ranks: int, body: str, **options: int) -> subprocess.Popen[str]:
    """Start a launcher of `ranks` processes that run `body`. Its temporary files are below `here`."""
    lines = [f"    {line}" for line in body.splitlines()]
    (here / "script.py").write_text(PRELUDE + "\n".join(lines) + "\n")
    (here / "tmp").mkdir()
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | options
    process = subprocess.Popen(
        [sys.executable, "-c", DRIVER, str(here / "script.py"), str(ranks), str(here)],
        env={**os.environ, "TMPDIR": str(here / "tmp")},
        text=True,
        **streams,
    )
    STARTED.append(process)
    return process


def run(here: Path, ranks: int, body: str) -> tuple[int, str, str]:
    process = start(here, ranks, body)
    out, err = process.communicate(timeout=240)
    return process.returncode, out, err


def pids(here: Path) -> list[int]:
    return [int(word) for path in here.rglob("*.pids") for word in path.read_text().split()]


def is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    stat = Path(f"/proc/{pid}/stat")  # a dead orphan stays listed until init reaps it
    try:
        return stat.read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return not stat.parent.exists() and Path("/proc/self").exists()


def until(condition: Callable[[], bool], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def assert_all_gone(here: Path, ranks: int) -> None:
    """All ranks and their child processes must be gone within seconds."""
    recorded = pids(here)
    assert len(recorded) == 2 * ranks
    until(lambda: all(is_gone(pid) for pid in recorded), seconds=30)


def log_directory(here: Path, err: str) -> Path:
    """Return the log directory that the last line names."""
    match = re.fullmatch(r"trainyard: logs of all ranks: (.*)", err.splitlines()[-1])
    assert match
    assert Path(match[1]).parent == here / "tmp"
    return Path(match[1])


def test_every_rank_gets_its_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    names = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR ADDED OMP_NUM_THREADS MASTER_PORT"
    body = f"""
(here / f"{{rank}}.env").write_text(" ".join(os.environ[name] for name in "{names}".split()))
assert sys.stdin.read() == ""
assert "TRAINYARD_LAUNCHER" not in os.environ
print("out of", rank)
print("err of", rank, file=sys.stderr)
"""
    code, out, err = run(tmp_path, 2, body)
    assert (code, out, err) == (0, "out of 0\n", "err of 0\n")
    zero, one = ((tmp_path / f"{rank}.env").read_text().split() for rank in (0, 1))
    threads = str(max(1, len(os.sched_getaffinity(0)) // 2)) if sys.platform == "linux" else zero[6]
    assert zero[:-1] == ["0", "0", "2", "2", "127.0.0.1", "yes", threads]
    assert one == ["1", "1", *zero[2:]]
    assert not list((tmp_path / "tmp").iterdir())


def test_omp_num_threads_of_the_user_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert run(tmp_path, 2, 'print(os.environ["OMP_NUM_THREADS"])')[:2] == (0, "7\n")


def test_rank_0_keeps_the_terminal_and_the_cursor_is_restored(tmp_path: Path) -> None:
    body = """
while rank:
    if (here / "printed").exists():
        raise UserError("no")
    time.sleep(0.01)
print(sys.stdout.isatty(), os.get_terminal_size(1).columns >= 0, end="", flush=True)
(here / "printed").touch()
time.sleep(600)
"""
    master, slave = pty.openpty()
    process = start(tmp_path, 2, body, stdout=slave)
    os.close(slave)
    process.communicate(timeout=240)
    assert process.returncode == 2
    assert os.read(master, 100) == b"True True\x1b[?25h\r\n"  # shows the cursor and ends the line
    os.close(master)


def test_stderr_of_rank_0_is_forwarded_live(tmp_path: Path) -> None:
    body = """
print("careful", rank, file=sys.stderr)
while not (here / "read").exists():
    time.sleep(0.01)
"""
    process = start(tmp_path, 2, body)
    assert process.stderr
    assert process.stderr.readline() == "careful 0\n"
    (tmp_path / "read").touch()
    assert process.communicate(timeout=240) == ("", "")
    assert process.returncode == 0


@pytest.mark.nightly
def test_torch_rendezvous_works_at_the_reserved_port(tmp_path: Path) -> None:
    body = """
import torch.distributed as dist
store, *_ = next(dist.rendezvous("env://"))
store.add("came", 1)
while store.add("came", 0) < world:
    time.sleep(0.01)
time.sleep(0.2 * (1 - rank))
"""
    code, _, err = run(tmp_path, 2, body)
    assert code == 0, err


@pytest.mark.parametrize(
    "others",
    [
        "pass",
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)",
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit('bye'))",
    ],
    ids=["ends on SIGTERM", "ignores SIGTERM", "exits on SIGTERM"],
)
def test_a_failing_rank_ends_the_others(tmp_path: Path, others: str) -> None:
    body = f"""
if rank != 2:
    {others}
begin()
if rank == 2:
    raise ValueError("no such luck")
time.sleep(600)
"""
    begin = time.monotonic()
    code, out, err = run(tmp_path, 3, body)
    assert time.monotonic() - begin < 30
    assert_all_gone(tmp_path, 3)
    assert (code, out) == (1, "")
    lines = err.splitlines()
    assert lines[0] == "trainyard: rank 2 failed:"
    assert lines[1] == "Traceback (most recent call last):"
    assert lines[-2] == "ValueError: no such luck"
    assert err.count("no such luck") == 2, "in the source line and in the message"
    assert "bye" not in err
    assert "ValueError: no such luck" in (log_directory(tmp_path, err) / "rank-2.log").read_text()


def test_a_long_traceback_is_truncated(tmp_path: Path) -> None:
    body = """
begin()
if rank:
    raise ValueError("\\n".join(f"line {i}" for i in range(100)))
time.sleep(600)
"""
    code, _, err = run(tmp_path, 2, body)
    assert code == 1
    assert "line 80" in err
    assert "line 79" not in err
    assert "line 0\n" in (log_directory(tmp_path, err) / "rank-1.log").read_text()


def test_a_killed_rank_is_named_even_if_others_fail_visibly_first(tmp_path: Path) -> None:
    """The launcher is stopped meanwhile, so that it sees the death only after rank 0 has recorded its failure."""
    body = """
port = int(os.environ["MASTER_PORT"])
if rank == 1:
    server = socket.create_server(("", port))
begin()
if rank == 1:
    peers = [server.accept() for _ in range(2)]
    os.kill(os.getppid(), signal.SIGSTOP)
    time.sleep(0.1)
    os.kill(os.getpid(), signal.SIGKILL)
with socket.create_connection(("127.0.0.1", port)) as peer:
    peer.recv(1)
if rank == 2:
    time.sleep(0.3)
    os.kill(os.getppid(), signal.SIGCONT)
raise ConnectionResetError("lost rank 1")
"""
    code, _, err = run(tmp_path, 3, body)
    assert code == 1
    assert err.splitlines()[:-1] == [
        "trainyard: rank 1 was killed by signal 9 (SIGKILL); often the machine ran out of memory"
    ]
    assert_all_gone(tmp_path, 3)
    assert log_directory(tmp_path, err).is_dir()


@pytest.mark.parametrize("error", ["lost rank 1", "[gloo/transport/tcp/pair.cc:538] Connection closed by peer"])
def test_a_rank_that_crashes_is_named_and_not_its_victim(tmp_path: Path, error: str) -> None:
    """A dying process closes its connections first, and looks alive for a while: longer than 2 s with a large core."""
    seconds = 0.5 if "lost" in error else 2.5
    body = f"""
port = int(os.environ["MASTER_PORT"])
if rank == 1:
    server = socket.create_server(("", port))
begin()
if rank == 1:
    server.accept()[0].close()
    time.sleep({seconds})
    os.kill(os.getpid(), signal.SIGSEGV)
with socket.create_connection(("127.0.0.1", port)) as peer:
    peer.recv(1)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
(here / "failed").touch()
raise RuntimeError({error!r})
"""
    code, _, err = run(tmp_path, 2, "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + body)
    assert code == 1
    assert err.splitlines()[0] == "trainyard: rank 1 was killed by signal 11 (SIGSEGV)"


def test_a_lost_peer_after_a_signal_is_not_a_failure(tmp_path: Path) -> None:
    """The signal ends a rank that is starting, which looks alive for a while; another one loses its peer."""
    body = """
def die(number, frame):
    (here / "lost").touch()
    time.sleep(0.5)
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
signal.signal(signal.SIGUSR1, die if rank else signal.SIG_IGN)
begin()
while rank or not (here / "lost").exists():
    time.sleep(0.01)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
raise RuntimeError("[gloo/transport/tcp/pair.cc:538] Connection closed by peer")
"""
    process = start(tmp_path, 2, "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + body)
    until(lambda: len(pids(tmp_path)) == 4)
    process.send_signal(signal.SIGUSR1)
    assert process.communicate(timeout=240) == ("", "")
    assert process.returncode == 130


def test_the_outcome_is_recorded_although_nobody_reads_the_messages(tmp_path: Path) -> None:
    """The output of a task of srun is a pipe that breaks when slurmstepd dies."""
    driver = DRIVER.replace("sys.argv[1]]))", "sys.argv[1]], log_directory=Path(sys.argv[3])))")
    (tmp_path / "script.py").write_text(PRELUDE + "    raise ValueError('the reason')\n")
    process = subprocess.Popen(
        [sys.executable, "-c", "from pathlib import Path\n" + driver, str(tmp_path / "script.py"), "1", str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    STARTED.append(process)
    assert process.stdout
    assert process.stderr
    process.stdout.close()
    process.stderr.close()
    process.wait(timeout=240)
    outcome = LaunchOutcome.read(tmp_path / OUTCOME_FILE)
    assert outcome
    assert (outcome.kind, outcome.text) == ("crash", "rank 0 failed: ValueError: the reason")


def test_an_abort_caused_by_an_exception_is_not_the_reason(tmp_path: Path) -> None:
    body = """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
begin()
if rank == 1:
    raise ValueError("the reason")
time.sleep(1)
os.abort()
"""
    code, _, err = run(tmp_path, 2, body)
    assert code == 1
    assert "ValueError: the reason" in err
    assert "SIGABRT" not in err


def test_later_failures_stay_in_the_logs(tmp_path: Path) -> None:
    """Rank 1 fails first but exits slowly; rank 0, which lost its peer, exits first."""
    body = """
import atexit
signal.signal(signal.SIGTERM, signal.SIG_IGN)
begin()
if rank == 1:
    atexit.register(time.sleep, 2)
    raise ValueError("error A")
time.sleep(0.7)
raise ConnectionResetError("error B")
"""
    code, _, err = run(tmp_path, 2, body)
    assert code == 1
    assert "ValueError: error A" in err
    assert "error B" not in err
    directory = log_directory(tmp_path, err)
    assert "ConnectionResetError: error B" in (directory / "rank-0.log").read_text()
    assert_all_gone(tmp_path, 2)


@pytest.mark.parametrize(("kind", "code"), [("UserError", 2), pytest.param("RunStopped", 1, marks=pytest.mark.nightly)])
def test_one_line_errors_name_the_rank(tmp_path: Path, kind: str, code: int) -> None:
    body = f"""
begin()
if rank == 1:
    raise {kind}("data.path=x: not here")
time.sleep(600)
"""
    found, _, err = run(tmp_path, 2, body)
    assert found == code
    assert err.splitlines()[:-1] == ["trainyard: rank 1: data.path=x: not here"]
    assert_all_gone(tmp_path, 2)


def test_a_user_error_on_all_ranks_is_one_line(tmp_path: Path) -> None:
    code, out, err = run(tmp_path, 3, 'begin(); time.sleep(0.1 * rank); raise UserError("model.hidden=3: odd")')
    assert (code, out, err) == (2, "", "trainyard: model.hidden=3: odd\n")
    assert_all_gone(tmp_path, 3)
    assert not list((tmp_path / "tmp").iterdir())


def test_an_exit_without_a_failure_file_shows_the_end_of_the_log(tmp_path: Path) -> None:
    code, _, err = run(tmp_path, 2, 'if rank: print("last words", flush=True); os._exit(5)\ntime.sleep(600)')
    assert code == 5
    assert err.splitlines()[:-1] == ["trainyard: rank 1 exited with code 5", "last words"]


def test_ranks_may_end_at_different_times(tmp_path: Path) -> None:
    body = """
begin()
if rank == 0:
    time.sleep(1)
    print("last")
"""
    assert run(tmp_path, 3, body) == (0, "last\n", "")
    assert_all_gone(tmp_path, 3)


def test_ranks_do_not_outlive_a_killed_launcher(tmp_path: Path) -> None:
    body = "[signal.signal(n, signal.SIG_IGN) for n in (signal.SIGTERM, signal.SIGHUP)]; begin(); time.sleep(600)"
    process = start(tmp_path, 2, body)
    until(lambda: len(pids(tmp_path)) == 4)
    assert not any(is_gone(pid) for pid in pids(tmp_path))
    process.kill()
    process.communicate(timeout=240)
    assert_all_gone(tmp_path, 2)


COUNT = """
count = 0
def note(number, frame):
    global count
    count += 1
    if count == LIMIT:
        raise KeyboardInterrupt
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, note)
begin()
try:
    while count == 0 or LIMIT > 1:
        time.sleep(0.05)
    time.sleep(0.5 * (rank + 1))
except KeyboardInterrupt:
    pass
(here / f"{rank}.count").write_text(str(count))
if LIMIT > 1 and rank:
    raise ConnectionResetError("rank 0 left")
sys.exit(130)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_is_forwarded_once_and_the_stop_is_orderly(tmp_path: Path, number: int) -> None:
    process = start(tmp_path, 2, COUNT.replace("LIMIT", "-1"))
    until(lambda: len(pids(tmp_path)) == 4)
    process.send_signal(number)
    assert process.communicate(timeout=240) == ("", "")
    assert process.returncode == 130
    assert [(tmp_path / f"{rank}.count").read_text() for rank in (0, 1)] == ["1", "1"]
    assert_all_gone(tmp_path, 2)
    assert not list((tmp_path / "tmp").iterdir())


def test_a_second_signal_is_forwarded_and_a_third_kills(tmp_path: Path) -> None:
    for limit, sent in ((2, 2), (100, 3)):
        here = tmp_path / str(limit)
        here.mkdir()
        process = start(here, 2, COUNT.replace("LIMIT", str(limit)))
        until(lambda here=here: len(pids(here)) == 4)
        for _ in range(sent):
            assert process.poll() is None
            process.send_signal(signal.SIGINT)
            time.sleep(0.3)
        assert process.communicate(timeout=240) == ("", "")
        assert process.returncode == 130
        assert_all_gone(here, 2)


def test_a_signal_before_ranks_handle_it_ends_them_quietly(tmp_path: Path) -> None:
    process = start(tmp_path, 2, "if rank: signal.signal(15, signal.SIG_IGN)\nbegin(); time.sleep(600)")
    until(lambda: len(pids(tmp_path)) == 4)
    process.terminate()
    assert process.communicate(timeout=240) == ("", "")
    assert process.returncode == 130
    assert_all_gone(tmp_path, 2)


def test_the_real_command(tmp_path: Path) -> None:
    code = "import sys; from trainyard.launch.launcher import launch; sys.exit(launch(['config', 'no-such-recipe'], 2))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("trainyard: no-such-recipe: no such file or recipe")
