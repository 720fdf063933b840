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

from trainyard.launch.rank_guard import EXIT_CODES, LAUNCHER_ENV, RankFailure

POLL_S = 0.05
"""Seconds between two looks at the ranks."""
TERM_GRACE_S = 3.0
"""Seconds between asking the other ranks to end and killing them."""
SAME_ERROR_WAIT_S = 2.0
"""Seconds in which the other ranks may find the same mistake of the user by themselves."""
SIGKILL_VISIBLE_S = 2.0
"""Seconds for which a process that was killed may still look alive, its connections being closed already."""
MAX_ERROR_LINES = 20
"""How much of a traceback or log is shown."""
EXIT_INTERRUPTED = 130
"""Exit code of a rank, and of the launcher, after an orderly end that a signal asked for."""


class RankProcess:
    """One process, its files, and how it ended."""

    def __init__(self, number: int, command: list[str], environment: dict[str, str], pipe: int, directory: Path):
        self.rank = number
        self.log_path = directory / f"rank-{number}.log"
        self.failure_path = directory / f"rank-{number}.json"
        self.exit_code: int | None = None
        self.sent_signals: set[int] = set()
        variables = {"RANK": str(number), "LOCAL_RANK": str(number), LAUNCHER_ENV: f"{pipe}:{self.failure_path}"}
        with self.log_path.open("wb") as log:
            self.process = subprocess.Popen(
                command,
                env=environment | variables,
                stdin=subprocess.DEVNULL,
                stdout=log if number else None,  # rank 0 has the terminal
                stderr=log,
                pass_fds=[pipe],
                start_new_session=True,
            )
        self.last_alive = time.monotonic()
        """When it was last seen running. What ended it came later, and so did all that followed from that."""

    def poll(self) -> None:
        now = time.monotonic()
        if self.exit_code is None:
            self.exit_code = self.process.poll()
            if self.exit_code is None:
                self.last_alive = now
            else:
                self._signal_group(signal.SIGKILL)  # what it started and did not wait for

    def send_signal(self, signum: int, group: bool) -> None:
        """A signal to the rank if it still runs, alone or with all that it started."""
        if self.exit_code is None:
            self.sent_signals.add(signum)
            if group:
                self._signal_group(signum)
            else:
                self.process.send_signal(signum)

    def _signal_group(self, signum: int) -> None:
        with suppress(ProcessLookupError, PermissionError):  # nobody there; macOS refuses if all are zombies
            os.killpg(self.process.pid, signum)

    def read_failure(self) -> RankFailure | None:
        return RankFailure.read(self.failure_path)

    def failure_time_and_text(self) -> tuple[float, str | None]:
        """When it went wrong here, and what to show; None if it was by our own signal."""
        failure, code, me = self.read_failure(), self.exit_code or 0, f"rank {self.rank}"
        if failure and failure.kind == "crash":
            return failure.time, "\n".join([f"{me} failed:", *failure.text.splitlines()[-MAX_ERROR_LINES:]])
        if failure:
            return failure.time, f"{me}: {failure.text}"
        if -code in self.sent_signals:
            return self.last_alive, None
        if code == -signal.SIGKILL:
            return (
                self.last_alive - SIGKILL_VISIBLE_S,
                f"{me} was killed by signal 9 (SIGKILL); often the machine ran out of memory",
            )
        names = {known.value: known.name for known in signal.Signals}
        how = f"was killed by signal {-code} ({names.get(-code, '?')})" if code < 0 else f"ended with exit code {code}"
        with self.log_path.open(errors="replace") as log:
            last = [
                line.rstrip("\n") for line in deque(log, MAX_ERROR_LINES if self.rank else 0)
            ]  # rank 0's was passed on
        return self.last_alive, "\n".join([f"{me} {how}", *last])


def launch(
    arguments: Sequence[str],
    ranks: int,
    environment: Mapping[str, str] = {},
    command: Sequence[str] = (sys.executable, "-m", "trainyard"),
) -> int:
    """Run `command` with `arguments` as `ranks` processes, show the first error if there is one; gives the exit code.

    `environment` is added to this process's own.
    """
    crew: list[RankProcess] = []
    with _recorded_signals() as signals, reserved_port() as port:
        directory = Path(tempfile.mkdtemp(prefix="trainyard-"))
        pipe, held = os.pipe()  # `held` is closed by our end, however that comes; no rank inherits it
        sys.stdout.flush()
        try:
            variables = _rank_environment(ranks, port, environment)
            for number in range(ranks):
                crew.append(RankProcess(number, [*command, *arguments], variables, pipe, directory))
            passed = _monitor(crew, signals)
        except BaseException as error:
            error.add_note(f"logs of all ranks: {directory}")
            raise
        finally:
            for rank in crew:  # one still runs only after an exception of our own
                rank.send_signal(signal.SIGKILL, group=True)
            for rank in crew:
                rank.process.wait()
            os.close(pipe)
            os.close(held)
    code, keep = _report_outcome(crew, passed, directory)
    if not keep:
        shutil.rmtree(directory, ignore_errors=True)
    return code


def _monitor(ranks: list[RankProcess], signals: list[int]) -> list[float]:
    """Until every rank has ended. Gives the times at which a signal was passed to the ranks."""
    done = threading.Event()
    tail = threading.Thread(target=_forward_log, args=(ranks[0].log_path, done), daemon=True)
    tail.start()
    passed: list[float] = []
    plan: list[tuple[float, int]] | None = None  # once a rank has failed: when the others get which signal
    while any(rank.exit_code is None for rank in ranks):
        time.sleep(POLL_S)
        for rank in ranks:
            rank.poll()
        now = time.monotonic()
        for number in signals[len(passed) :]:
            passed.append(now)
            for rank in ranks:
                if len(passed) <= 2:
                    rank.send_signal(number, group=False)
                else:
                    rank.send_signal(signal.SIGKILL, group=True)
        failed = [rank for rank in ranks if rank.exit_code and not (passed and rank.exit_code == EXIT_INTERRUPTED)]
        if failed and plan is None:
            notes = [rank.read_failure() for rank in failed]
            start = now + (SAME_ERROR_WAIT_S if any(note and note.kind != "crash" for note in notes) else 0)
            plan = [(start, signal.SIGTERM), (start + TERM_GRACE_S, signal.SIGKILL)]
        while plan and plan[0][0] <= now:
            done.set()
            tail.join(timeout=1)  # before the signal: what rank 0 says from then on is a consequence
            _, number = plan.pop(0)
            for rank in ranks:
                rank.send_signal(number, group=True)
    done.set()
    tail.join(timeout=1)  # it takes longer only if nobody reads our stderr
    return passed


def _report_outcome(ranks: list[RankProcess], signal_times: list[float], directory: Path) -> tuple[int, bool]:
    """Shows the first error, if there is one. Gives the exit code and whether the logs are worth keeping."""
    failures = [rank.read_failure() for rank in ranks]
    codes = {rank.exit_code or 0 for rank in ranks}
    orderly = {0, EXIT_INTERRUPTED} if signal_times or codes <= {0, EXIT_INTERRUPTED} else {0}
    endings = [
        (*rank.failure_time_and_text(), rank) for rank in ranks if rank.read_failure() or rank.exit_code not in orderly
    ]
    if not endings:
        return max(codes), False
    if sys.stdout.isatty():
        print("\x1b[?25h", flush=True)  # a bar that was killed left its line open and the cursor hidden
    when, text, first = min(endings, key=lambda ending: ending[0])
    if text is None or any(when >= second for second in signal_times[1:2]):  # ended at once, as asked
        return EXIT_INTERRUPTED, False
    for rank, failure in zip(ranks, failures, strict=True):
        if failure:
            with rank.log_path.open("a", encoding="utf-8") as log:
                print(failure.text.rstrip("\n"), file=log)
    failure = first.read_failure()
    same = failure is not None and all(other and other.text == failure.text for other in failures)
    if failure and failure.kind != "crash" and same:
        text = failure.text
    print(f"trainyard: {text}", file=sys.stderr)
    if failure and failure.kind == "user" and same:
        return EXIT_CODES["user"], False  # the logs say nothing else
    print(f"trainyard: logs of all ranks: {directory}", file=sys.stderr)
    return EXIT_CODES[failure.kind] if failure else max(first.exit_code or 0, 1), True


def threads_per_rank(ranks: int) -> int:
    """For each of so many ranks on this machine. OpenMP threads spin while they wait: two ranks with all cores each
    were 8 times slower than one alone."""
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    return max(1, cores // ranks)


def _rank_environment(ranks: int, port: int, environment: Mapping[str, str]) -> dict[str, str]:
    """What torch.distributed reads, the same for all ranks."""
    return {
        "OMP_NUM_THREADS": str(threads_per_rank(ranks)),
        **os.environ,
        **environment,
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


@contextmanager
def reserved_port() -> Iterator[int]:
    """A port of the loopback that stays ours while the ranks run.

    The socket is bound and does not listen. So the system gives the port to nobody who asks for any free one, while
    rank 0, which asks for this one with SO_REUSEADDR as every server does, gets it: no moment is left for a race.
    """
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        yield holder.getsockname()[1]


@contextmanager
def _recorded_signals() -> Iterator[list[int]]:
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


def _forward_log(log: Path, done: threading.Event) -> None:
    """Copies a growing log to our stderr. In a thread, so that a reader who pauses does not pause the launcher."""
    with log.open("rb") as file, suppress(OSError):  # without a reader, the log is all there is
        last = False
        while not last:
            last = done.wait(POLL_S)
            piece = file.read()
            while piece:
                piece = piece[os.write(2, piece) :]
