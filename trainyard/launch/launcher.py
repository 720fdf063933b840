"""Run a command as several ranks on this host, with one error message, one exit code and no leftover processes.

A rank that fails breaks its peers: they lose their connection or hang. The launcher therefore records the time of every
failure, shows the first one, and terminates the remaining ranks. Every rank has its own session, so its child processes
(compile workers, for example) end with it, and Ctrl-C in the terminal reaches only the launcher.

A run on several hosts has a launcher on each, which srun or mpirun start.
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

from trainyard.core.constants import EXIT_INTERRUPTED
from trainyard.core.errors import UserError
from trainyard.core.world import LOOPBACK, ONE_RANK, World
from trainyard.launch.flight_recorder import FlightRecorders, RecorderEnvironment, describe_dumps
from trainyard.launch.heartbeat import HEARTBEAT_ENV, STACK_SIGNAL, RankPlace, StepTimes, describe_hang
from trainyard.launch.outcome import LaunchOutcome, is_peer_loss
from trainyard.launch.rank_guard import EXIT_CODES, LAUNCHER_ENV, RECORD_PATIENCE_S, RankFailure

POLL_S = 0.05
"""Seconds between two polls of the ranks."""
TERM_GRACE_S = 3.0
"""Seconds between SIGTERM and SIGKILL to the remaining ranks."""
SAME_ERROR_WAIT_S = 2.0
"""Seconds during which the other ranks may report the same user error."""
SUDDEN_DEATHS = (signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE)
"""Signals that end a rank because of what it did itself, never because it lost its peers."""
DEATH_VISIBLE_S = 2.0
"""Seconds for which such a rank may still look alive although its connections are closed."""
STACK_DUMP_S = 2.0
"""Seconds in which the ranks of a hung run print their stacks."""
MAX_INTERRUPTS = 2
"""Ctrl-C that the ranks receive: one stops after the step, two stop at once. The next one kills them."""
RANK_BYTES = 100 << 20
"""Memory of a rank with the smallest model, of which the libraries are shared."""
MAX_RANKS_PER_CORE = 32
MAX_ERROR_LINES = 20
"""Lines of a traceback or log that are shown."""


class RankProcess:
    """One rank: its process, its log and failure file, and how it ended."""

    def __init__(
        self, rank: int, local_rank: int, command: list[str], environment: dict[str, str], pipe: int, directory: Path
    ) -> None:
        self.rank, self.local_rank = rank, local_rank
        self.log_path = directory / f"rank-{rank}.log"
        self.failure_path = directory / f"rank-{rank}.json"
        self.exit_code: int | None = None
        self.sent_signals: set[int] = set()
        self.steps = StepTimes(directory / f"rank-{rank}.step")
        variables = {
            "RANK": str(rank),
            "LOCAL_RANK": str(local_rank),
            LAUNCHER_ENV: f"{pipe}:{self.failure_path}",
            HEARTBEAT_ENV: str(self.steps.path),
        }
        with self.log_path.open("wb") as log:
            self.process = subprocess.Popen(
                command,
                env=environment | variables,
                stdin=subprocess.DEVNULL,
                stdout=log if rank else None,  # rank 0 has the terminal
                stderr=log,
                pass_fds=[pipe],
                start_new_session=True,
            )
        self.last_alive = time.monotonic()
        """Time of the last poll that found it running. Its end, and everything that followed from it, came later."""

    def poll(self) -> None:
        now = time.monotonic()
        if self.exit_code is None:
            self.exit_code = self.process.poll()
            if self.exit_code is None:
                self.last_alive = now
            else:
                self._signal_group(signal.SIGKILL)  # child processes that it did not wait for

    def send_signal(self, signum: int, group: bool) -> None:
        """Send a signal to the rank if it still runs, alone or with its whole process group."""
        if self.exit_code is None:
            self.sent_signals.add(signum)
            if group:
                self._signal_group(signum)
            else:
                self.process.send_signal(signum)

    def _signal_group(self, signum: int) -> None:
        with suppress(ProcessLookupError, PermissionError):  # empty group; macOS refuses if all are zombies
            os.killpg(self.process.pid, signum)

    def read_failure(self) -> RankFailure | None:
        return RankFailure.read(self.failure_path)

    def failure_time_and_text(self) -> tuple[float, str | None]:
        """Return when this rank failed and what to show; None as text if the launcher's own signal ended it."""
        failure, code, name = self.read_failure(), self.exit_code or 0, f"rank {self.rank}"
        if failure and failure.kind == "crash":
            return failure.time, "\n".join([f"{name} failed:", *failure.text.splitlines()[-MAX_ERROR_LINES:]])
        if failure:
            return failure.time, f"{name}: {failure.text}"
        if -code in self.sent_signals:
            return self.last_alive, None
        died_at = self.last_alive - (DEATH_VISIBLE_S if -code in SUDDEN_DEATHS else 0)
        if code == -signal.SIGKILL:
            return died_at, f"{name} was killed by signal 9 (SIGKILL); often the machine ran out of memory"
        names = {known.value: known.name for known in signal.Signals}
        cause = f"was killed by signal {-code} ({names.get(-code, '?')})" if code < 0 else f"exited with code {code}"
        shown = MAX_ERROR_LINES if self.local_rank else 0  # the log of the first rank was forwarded already
        with self.log_path.open(errors="replace") as log:
            last_lines = [line.rstrip("\n") for line in deque(log, shown)]
        return died_at, "\n".join([f"{name} {cause}", *last_lines])


def launch(
    arguments: Sequence[str],
    rank_count: int,
    environment: Mapping[str, str] = {},
    command: Sequence[str] = (sys.executable, "-m", "trainyard"),
    hosts: World = ONE_RANK,
    log_directory: Path | None = None,
    hang_timeout: float = 0.0,
    recorder_environment: RecorderEnvironment = lambda directory: {},
) -> int:
    """Run `command` with `arguments` in `rank_count` processes, show the first error, and return the exit code.

    `environment` is added to that of this process. `hosts` is the world of the launchers, one on each host, where the
    ranks of all of them meet. Logs go to `log_directory` and stay there, or to a temporary directory. A run without a
    step for `hang_timeout` seconds (0: any time), and for a multiple of its median step, is ended as hung;
    `recorder_environment` then gives the variables that make its ranks record their collectives.
    """
    _check_rank_count(rank_count)
    ranks: list[RankProcess] = []
    with recorded_signals() as signals, _master(hosts) as (address, port):
        directory = log_directory or Path(tempfile.mkdtemp(prefix="trainyard-"))
        directory.mkdir(parents=True, exist_ok=True)
        recorders = FlightRecorders(directory, recorder_environment if hang_timeout else lambda directory: {})
        pipe, write_end = os.pipe()  # closed when this process ends, however it ends; no rank inherits the write end
        sys.stdout.flush()
        try:
            variables = _rank_environment(rank_count, hosts.size, environment)
            variables |= {"MASTER_ADDR": address, "MASTER_PORT": str(port)} | recorders.environment
            for local_rank in range(rank_count):
                rank = hosts.rank * rank_count + local_rank
                ranks.append(RankProcess(rank, local_rank, [*command, *arguments], variables, pipe, directory))
            signal_times, hang = _monitor(ranks, signals, hang_timeout, recorders)
        except BaseException as error:
            error.add_note(f"logs of all ranks: {directory}")
            raise
        finally:
            for process in ranks:  # ranks still run here only after an exception in the launcher
                process.send_signal(signal.SIGKILL, group=True)
            for process in ranks:
                process.process.wait()
            os.close(pipe)
            os.close(write_end)
            recorders.close()
    outcome, keep_logs = _report_outcome(ranks, signal_times, directory, hang)
    if log_directory:
        outcome.write(log_directory, RECORD_PATIENCE_S)
    elif not keep_logs:
        shutil.rmtree(directory, ignore_errors=True)
    return outcome.code


def _monitor(
    ranks: list[RankProcess], signals: list[int], hang_timeout: float, recorders: FlightRecorders
) -> tuple[list[float], LaunchOutcome | None]:
    """Wait until every rank has ended. Return the times at which signals were forwarded to the ranks, and the hang if
    there was one."""
    done = threading.Event()
    forwarder = threading.Thread(target=_forward_log, args=(ranks[0].log_path, done), daemon=True)
    forwarder.start()
    signal_times: list[float] = []
    hang: LaunchOutcome | None = None
    kill_plan: list[tuple[float, int]] | None = None  # after a failure: when the others get which signal
    while any(rank.exit_code is None for rank in ranks):
        time.sleep(POLL_S)
        for rank in ranks:
            rank.poll()
        now = time.monotonic()
        for signum in signals[len(signal_times) :]:
            signal_times.append(now)
            kill = signum == signal.SIGINT and signals[: len(signal_times)].count(signum) > MAX_INTERRUPTS
            for rank in ranks:
                rank.send_signal(signal.SIGKILL if kill else signum, group=kill)
        orderly_codes = (None, 0, EXIT_INTERRUPTED) if signal_times else (None, 0)
        failed = [rank for rank in ranks if rank.exit_code not in orderly_codes]
        if hang_timeout and not failed and not hang and (hang := _find_hang(ranks, hang_timeout, recorders)):
            kill_plan = [(now, signal.SIGKILL)]
        if failed and kill_plan is None:
            failures = [rank.read_failure() for rank in failed]
            wait = SAME_ERROR_WAIT_S if any(failure and failure.kind != "crash" for failure in failures) else 0
            kill_plan = [(now + wait, signal.SIGTERM), (now + wait + TERM_GRACE_S, signal.SIGKILL)]
        while kill_plan and kill_plan[0][0] <= now:
            done.set()
            forwarder.join(timeout=1)  # before the signal: later output of rank 0 is only a consequence
            _, signum = kill_plan.pop(0)
            for rank in ranks:
                rank.send_signal(signum, group=True)
    done.set()
    forwarder.join(timeout=1)  # takes longer only if nobody reads our stderr
    return signal_times, hang


def _find_hang(ranks: list[RankProcess], timeout: float, recorders: FlightRecorders) -> LaunchOutcome | None:
    """If no rank has made a step for too long, dump the stacks of all ranks to their logs and their last collectives to
    files, and say who is to blame."""
    for rank in ranks:
        rank.steps.poll()
    limits = [rank.steps.hang_limit(timeout) for rank in ranks]
    idle = time.monotonic() - max(rank.steps.time for rank in ranks)
    if not all(limit is not None and idle > limit for limit in limits):
        return None
    sizes = [rank.log_path.stat().st_size for rank in ranks]
    for rank in ranks:
        rank.process.send_signal(STACK_SIGNAL)
    requested = recorders.request_dumps()
    time.sleep(STACK_DUMP_S)
    dumps = [
        rank.log_path.read_bytes()[size:].decode(errors="replace") for rank, size in zip(ranks, sizes, strict=True)
    ]
    places = [RankPlace.from_dump(rank.rank, rank.steps.step, dump) for rank, dump in zip(ranks, dumps, strict=True)]
    text, collectives = describe_hang(idle, places), describe_dumps(recorders.wait_for_dumps(requested))
    return LaunchOutcome.now(1, "hang", f"{text}; {collectives}" if collectives else text, places=places)


def _report_outcome(
    ranks: list[RankProcess], signal_times: list[float], directory: Path, hang: LaunchOutcome | None
) -> tuple[LaunchOutcome, bool]:
    """Print the first error, if any. Return the outcome and whether to keep the logs."""
    if hang:
        _print_error(f"{hang.text}\ntrainyard: stacks and logs of all ranks: {directory}")
        return hang, True
    failures = [rank.read_failure() for rank in ranks]
    codes = {rank.exit_code or 0 for rank in ranks}
    orderly_codes = {0, EXIT_INTERRUPTED} if signal_times or codes <= {0, EXIT_INTERRUPTED} else {0}
    failed = [rank for rank in ranks if rank.read_failure() or rank.exit_code not in orderly_codes]
    if not failed:
        return LaunchOutcome.now(max(codes)), False
    if sys.stdout.isatty():
        print("\x1b[?25h", flush=True)  # a killed progress bar leaves its line open and the cursor hidden
    outcomes = [(*rank.failure_time_and_text(), rank) for rank in failed]
    failed_at, text, first = min(outcomes, key=lambda outcome: _blame_order(outcome[0], outcome[1], bool(signal_times)))
    if text is None or any(failed_at >= second_signal for second_signal in signal_times[1:2]):  # stopped on request
        return LaunchOutcome.now(EXIT_INTERRUPTED), False
    for rank, failure in zip(ranks, failures, strict=True):
        if failure:
            with rank.log_path.open("a", encoding="utf-8") as log:
                print(failure.text.rstrip("\n"), file=log)
    failure = first.read_failure()
    same_on_all = failure is not None and all(other and other.text == failure.text for other in failures)
    if failure and failure.kind != "crash" and same_on_all:
        text = failure.text
    _print_error(text)
    code, kind = (EXIT_CODES[failure.kind], failure.kind) if failure else (max(first.exit_code or 0, 1), "crash")
    summary = text.splitlines()[0] if kind != "crash" else _crash_summary(text)
    outcome = LaunchOutcome.now(code, kind, summary, time.monotonic() - failed_at)
    if kind in ("user", "in use") and same_on_all:
        return outcome, False  # the logs contain nothing else
    _print_error(f"logs of all ranks: {directory}")
    return outcome, True


def _blame_order(failed_at: float, text: str | None, asked_to_stop: bool) -> tuple[bool, float]:
    """Sorts failures: causes before consequences, each by time. A rank that lost a peer did not fail first, whatever
    the clock says; nor did one without a text, which a signal of this launcher ended, unless it was asked to stop."""
    return is_peer_loss(text) if text else not asked_to_stop, failed_at


def _print_error(text: str) -> None:
    with suppress(OSError):  # nobody reads, or the disk is full: the outcome must still be recorded
        print(f"trainyard: {text}", file=sys.stderr)


def _crash_summary(text: str) -> str:
    """The first line of a report and, if a traceback follows, its last line."""
    first, *rest = text.splitlines()
    return f"{first} {rest[-1]}" if rest and first.endswith(":") else first


def _check_rank_count(ranks: int) -> None:
    """Refuse more ranks than this machine can start. Each is a process that imports torch."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = max(min(memory // RANK_BYTES, MAX_RANKS_PER_CORE * (os.cpu_count() or 1)), 1)
    if ranks > limit:
        raise UserError(f"--nproc {ranks}: too many for the cores and the memory of this machine; at most {limit}")


def threads_per_rank(ranks: int) -> int:
    """Return the number of threads for each of `ranks` ranks on this machine.

    OpenMP threads spin while they wait: two ranks with all cores each were 8 times slower than one alone.
    """
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    return max(1, cores // ranks)


def _rank_environment(ranks: int, hosts: int, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment that torch.distributed reads, as far as it is the same for all ranks of this host."""
    return {
        "OMP_NUM_THREADS": str(threads_per_rank(ranks)),
        **os.environ,
        **environment,
        "WORLD_SIZE": str(ranks * hosts),
        "LOCAL_WORLD_SIZE": str(ranks),
    }


@contextmanager
def _master(hosts: World) -> Iterator[tuple[str, int]]:
    """The address and port where all ranks meet."""
    if hosts.size > 1:
        yield hosts.master_addr, hosts.master_port
    else:
        with reserved_port() as port:
            yield LOOPBACK, port


@contextmanager
def reserved_port() -> Iterator[int]:
    """Reserve a loopback port while the ranks run.

    The socket is bound but does not listen. The system then gives the port to no process that asks for any free port,
    while rank 0, which asks for this one with SO_REUSEADDR like every server, gets it. There is no race.
    """
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        yield holder.getsockname()[1]


@contextmanager
def recorded_signals() -> Iterator[list[int]]:
    """Record the signals that ask for an end, in order of arrival; the caller forwards them between two polls."""
    received: list[int] = []
    previous = {
        number: signal.signal(number, lambda number, frame: received.append(number))
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
    }
    try:
        yield received
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _forward_log(log_path: Path, done: threading.Event) -> None:
    """Copy a growing log to stderr. Runs in a thread, so that a reader who pauses does not pause the launcher."""
    with log_path.open("rb") as file, suppress(OSError):  # without a reader, the log file remains
        last_pass = False
        while not last_pass:
            last_pass = done.wait(POLL_S)
            data = file.read()
            while data:
                data = data[os.write(2, data) :]
