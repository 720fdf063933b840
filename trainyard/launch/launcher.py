"""Runs a command as several ranks on this machine, and answers for them: one error, one exit code, nothing left behind.

A rank that fails takes its peers with it, each of which then fails as well, in a lost connection or not at all. So the
launcher dates every failure, shows the first, and ends what goes on. Every rank has a session of its own: what it
starts, compile workers for instance, is ended with it, and Ctrl-C in the terminal reaches the launcher alone.
"""

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from trainyard.launch.rank_guard import CODES, VARIABLE, Failure

LOOK = 0.05
"""Seconds between two looks at the ranks."""
GRACE = 3.0
"""Seconds between asking the other ranks to end and killing them."""
AGREE = 2.0
"""Seconds in which the other ranks may find the same mistake of the user by themselves."""
DYING = 2.0
"""Seconds for which a process that was killed may still look alive, its connections being closed already."""
LINES = 20
"""How much of a traceback or log is shown."""
INTERRUPTED = 130
"""Exit code of a rank, and of the launcher, after an orderly end that a signal asked for."""


class Rank:
    """One process, its files, and how it ended."""

    def __init__(self, number: int, command: list[str], environment: dict[str, str], pipe: int, directory: Path):
        self.number = number
        self.log = directory / f"rank-{number}.log"
        self.note = directory / f"rank-{number}.json"
        self.code: int | None = None
        self.sent: set[int] = set()
        variables = {"RANK": str(number), "LOCAL_RANK": str(number), VARIABLE: f"{pipe}:{self.note}"}
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                command,
                env=environment | variables,
                stdin=subprocess.DEVNULL,
                stdout=log if number else None,  # rank 0 has the terminal
                stderr=log,
                pass_fds=[pipe],
                start_new_session=True,
            )
        self.seen = time.monotonic()
        """When it was last seen running. What ended it came later, and so did all that followed from that."""

    def look(self) -> None:
        now = time.monotonic()
        if self.code is None:
            self.code = self.process.poll()
            if self.code is None:
                self.seen = now
            else:
                self._kill(signal.SIGKILL)  # what it started and did not wait for

    def send(self, number: int, group: bool) -> None:
        """A signal to the rank if it still runs, alone or with all that it started."""
        if self.code is None:
            self.sent.add(number)
            if group:
                self._kill(number)
            else:
                self.process.send_signal(number)

    def _kill(self, number: int) -> None:
        with suppress(ProcessLookupError, PermissionError):  # nobody there; macOS refuses if all are zombies
            os.killpg(self.process.pid, number)

    def failure(self) -> Failure | None:
        return Failure.read(self.note)

    def ending(self) -> tuple[float, str | None]:
        """When it went wrong here, and what to show; None if it was by our own signal."""
        failure, code, me = self.failure(), self.code or 0, f"rank {self.number}"
        if failure and failure.kind == "crash":
            return failure.time, "\n".join([f"{me} failed:", *failure.text.splitlines()[-LINES:]])
        if failure:
            return failure.time, f"{me}: {failure.text}"
        if -code in self.sent:
            return self.seen, None
        if code == -signal.SIGKILL:
            return self.seen - DYING, f"{me} was killed by signal 9 (SIGKILL); often the machine ran out of memory"
        names = {known.value: known.name for known in signal.Signals}
        how = f"was killed by signal {-code} ({names.get(-code, '?')})" if code < 0 else f"ended with exit code {code}"
        with self.log.open(errors="replace") as log:
            last = [line.rstrip("\n") for line in deque(log, LINES if self.number else 0)]  # rank 0's was passed on
        return self.seen, "\n".join([f"{me} {how}", *last])


def launch(
    arguments: Sequence[str],
    ranks: int,
    environment: Mapping[str, str] = {},
    command: Sequence[str] = (sys.executable, "-m", "trainyard"),
) -> int:
    """Run `command` with `arguments` as `ranks` processes, show the first error if there is one; gives the exit code.

    `environment` is added to this process's own.
    """
    crew: list[Rank] = []
    with _noted_signals() as signals, free_port() as port:
        directory = Path(tempfile.mkdtemp(prefix="trainyard-"))
        pipe, held = os.pipe()  # `held` is closed by our end, however that comes; no rank inherits it
        sys.stdout.flush()
        try:
            variables = _variables(ranks, port, environment)
            for number in range(ranks):
                crew.append(Rank(number, [*command, *arguments], variables, pipe, directory))
            passed = _watch(crew, signals)
        except BaseException as error:
            error.add_note(f"logs of all ranks: {directory}")
            raise
        finally:
            for rank in crew:  # one still runs only after an exception of our own
                rank.send(signal.SIGKILL, group=True)
            for rank in crew:
                rank.process.wait()
            os.close(pipe)
            os.close(held)
    code, keep = _conclude(crew, passed, directory)
    if not keep:
        shutil.rmtree(directory, ignore_errors=True)
    return code


def _watch(crew: list[Rank], signals: list[int]) -> list[float]:
    """Until every rank has ended. Gives the times at which a signal was passed to the ranks."""
    done = threading.Event()
    tail = threading.Thread(target=_pass_on, args=(crew[0].log, done), daemon=True)
    tail.start()
    passed: list[float] = []
    plan: list[tuple[float, int]] | None = None  # once a rank has failed: when the others get which signal
    while any(rank.code is None for rank in crew):
        time.sleep(LOOK)
        for rank in crew:
            rank.look()
        now = time.monotonic()
        for number in signals[len(passed) :]:
            passed.append(now)
            for rank in crew:
                if len(passed) <= 2:
                    rank.send(number, group=False)
                else:
                    rank.send(signal.SIGKILL, group=True)
        failed = [rank for rank in crew if rank.code and not (passed and rank.code == INTERRUPTED)]
        if failed and plan is None:
            notes = [rank.failure() for rank in failed]
            start = now + (AGREE if any(note and note.kind != "crash" for note in notes) else 0)
            plan = [(start, signal.SIGTERM), (start + GRACE, signal.SIGKILL)]
        while plan and plan[0][0] <= now:
            done.set()
            tail.join(timeout=1)  # before the signal: what rank 0 says from then on is a consequence
            _, number = plan.pop(0)
            for rank in crew:
                rank.send(number, group=True)
    done.set()
    tail.join(timeout=1)  # it takes longer only if nobody reads our stderr
    return passed


def _conclude(crew: list[Rank], passed: list[float], directory: Path) -> tuple[int, bool]:
    """Shows the first error, if there is one. Gives the exit code and whether the logs are worth keeping."""
    failures = [rank.failure() for rank in crew]
    codes = {rank.code or 0 for rank in crew}
    orderly = {0, INTERRUPTED} if passed or codes <= {0, INTERRUPTED} else {0}
    endings = [(*rank.ending(), rank) for rank in crew if rank.failure() or rank.code not in orderly]
    if not endings:
        return max(codes), False
    if sys.stdout.isatty():
        print("\x1b[?25h", flush=True)  # a bar that was killed left its line open and the cursor hidden
    when, text, first = min(endings, key=lambda ending: ending[0])
    if text is None or any(when >= second for second in passed[1:2]):  # ended at once, as asked
        return INTERRUPTED, False
    for rank, failure in zip(crew, failures, strict=True):
        if failure:
            with rank.log.open("a", encoding="utf-8") as log:
                print(failure.text.rstrip("\n"), file=log)
    failure = first.failure()
    same = failure is not None and all(other and other.text == failure.text for other in failures)
    if failure and failure.kind != "crash" and same:
        text = failure.text
    print(f"trainyard: {text}", file=sys.stderr)
    if failure and failure.kind == "user" and same:
        return CODES["user"], False  # the logs say nothing else
    print(f"trainyard: logs of all ranks: {directory}", file=sys.stderr)
    return CODES[failure.kind] if failure else max(first.code or 0, 1), True


def threads(ranks: int) -> int:
    """For each of so many ranks on this machine. OpenMP threads spin while they wait: two ranks with all cores each
    were 8 times slower than one alone."""
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    return max(1, cores // ranks)


def _variables(ranks: int, port: int, environment: Mapping[str, str]) -> dict[str, str]:
    """What torch.distributed reads, the same for all ranks."""
    return {
        "OMP_NUM_THREADS": str(threads(ranks)),
        **os.environ,
        **environment,
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


@contextmanager
def free_port() -> Iterator[int]:
    """A port of the loopback that stays ours while the ranks run.

    The socket is bound and does not listen. So the system gives the port to nobody who asks for any free one, while
    rank 0, which asks for this one with SO_REUSEADDR as every server does, gets it: no moment is left for a race.
    """
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        yield holder.getsockname()[1]


@contextmanager
def _noted_signals() -> Iterator[list[int]]:
    """SIGINT and SIGTERM in the order they come. They only get noted: ranks are signalled between two looks."""
    noted: list[int] = []
    old = {
        number: signal.signal(number, lambda number, frame: noted.append(number))
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield noted
    finally:
        for number, previous in old.items():
            signal.signal(number, previous)


def _pass_on(log: Path, done: threading.Event) -> None:
    """Copies a growing log to our stderr. In a thread, so that a reader who pauses does not pause the launcher."""
    with log.open("rb") as file, suppress(OSError):  # without a reader, the log is all there is
        last = False
        while not last:
            last = done.wait(LOOK)
            piece = file.read()
            while piece:
                piece = piece[os.write(2, piece) :]
