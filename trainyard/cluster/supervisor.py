"""Supervises a run inside its job: starts the ranks, and starts them again from the latest checkpoint if they fail.

An attempt ends in one of four ways. The run is complete, or made a mistake that a restart repeats: the job ends. A
signal asked it to stop (time limit, preemption): the job is requeued, unless a user cancelled it. A node is lost: the
job is requeued, and Slurm chooses other nodes. A rank died: the ranks are started again on the same nodes. Restarts
without a new checkpoint in between are bounded.
"""

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType

from trainyard.cluster.job_record import RECORD_FILE, JobRecord, attempt_directory
from trainyard.cluster.scheduler import Scheduler
from trainyard.core.constants import EXIT_INTERRUPTED
from trainyard.core.errors import RunStopped
from trainyard.launch.outcome import OUTCOME_FILE, LaunchOutcome
from trainyard.metrics.json_lines import read_json_lines

POLL_S = 0.2
REQUEUE_WAIT_S = 120
"""Time that Slurm has to end this process after it requeued the job."""
LOCK_RETRY_S = 10.0
LOCK_LIMIT_S = 1800.0
"""How long another process may still hold the run directory."""
EXIT_USER_ERROR = 2
FINAL_KINDS = ("user", "stopped")
"""Failures that a restart would repeat."""


@dataclass(frozen=True)
class AttemptEnd:
    """How one attempt ended."""

    code: int
    failure: LaunchOutcome | None
    """The first failure of all nodes."""


class Supervisor:
    """Runs the attempts of one job."""

    def __init__(self, directory: Path, scheduler: Scheduler, train_command: list[str]) -> None:
        """`train_command` starts the ranks of one node; the supervisor adds overrides and the log directory."""
        self.directory, self.scheduler, self.train_command = directory, scheduler, train_command
        record = JobRecord.read(directory)
        if record is None:
            raise RunStopped(f"{directory}: the record of its job is gone")
        self.record = record
        self.waiting_since = 0.0
        """When another process was first found in the run directory."""

    def run(self) -> int:
        """Run attempts until the run is complete or cannot continue. Returns the exit code of the job."""
        with recorded_signals() as signals:
            return self._run_attempts(signals)

    def _run_attempts(self, signals: list[int]) -> int:
        if self.record.attempt_nodes:
            self.scheduler.end_earlier_attempt()
            if code := self._count_failure(self._lost_attempt_cause(), 1):
                return code
        if not self.scheduler.sees_on_all_nodes(self.directory / RECORD_FILE):
            self._report(
                f"stopped: not all nodes of {self.scheduler.nodes} see {self.directory}; nearest: a directory on a "
                "file system that they share (log.directory)"
            )
            return EXIT_USER_ERROR
        while True:
            end = self._attempt(signals)
            if end.code == 0:
                return 0
            if end.failure and end.failure.kind in FINAL_KINDS:
                self._report(f"stopped: {end.failure.text}")
                return end.failure.code
            if end.failure and end.failure.kind == "in use" and self._wait_for_directory(signals):
                continue
            if self.record.cancelled or self.scheduler.is_cancelled():
                self._report(f"cancelled; the latest checkpoint is of step {self._last_checkpoint()}")
                return EXIT_INTERRUPTED
            if end.code == EXIT_INTERRUPTED and not end.failure:
                self._report(f"asked to stop; the latest checkpoint is of step {self._last_checkpoint()}")
                return self._requeue()
            failed_nodes = self.scheduler.failed_nodes(self.scheduler.nodes)
            cause = end.failure.text if end.failure else f"the ranks ended with code {end.code}"
            if code := self._count_failure(describe_nodes(failed_nodes) or cause, end.code):
                return code
            if failed_nodes:
                return self._requeue()

    def _attempt(self, signals: list[int]) -> AttemptEnd:
        """Start the ranks on all nodes, forward signals to them and wait for their end."""
        if signals:  # since the last attempt
            return AttemptEnd(EXIT_INTERRUPTED, None)
        step, nodes = self._last_checkpoint(), self.scheduler.nodes
        attempts = self.record.attempts + 1
        self.record = replace(self.record, attempts=attempts, last_checkpoint=step, attempt_nodes=nodes)
        logs = attempt_directory(self.directory, self.record)
        logs.mkdir(parents=True, exist_ok=True)
        origin = f"from step {step}" if step else "from the start"
        count, overrides, layout = self._node_layout()
        self._report(f"attempt {attempts}: job {self.scheduler.job_id} on {nodes}, {origin}{layout}")
        process = self.scheduler.start([*self.train_command, *overrides, "--logs", str(logs)], count)
        sent = 0
        while (code := process.poll()) is None:
            for signum in signals[sent:]:
                process.send_signal(signum)
                sent += 1
            time.sleep(POLL_S)
        self.record = JobRecord.read(self.directory) or self.record  # `trainyard cancel` may have changed it
        self.record = replace(self.record, attempt_nodes="")
        self.record.write(self.directory)
        failure, interrupted = read_outcomes(logs)
        if code and not failure and (sent or interrupted):  # any code: srun ends all launchers when the first has ended
            return AttemptEnd(EXIT_INTERRUPTED, None)
        return AttemptEnd(abs(code), failure)

    def _node_layout(self) -> tuple[int, list[str], str]:
        """The number of nodes to use, overrides of the configuration, and a description for the log."""
        count = self.scheduler.node_count
        if not (entry := self.record.layouts.get(str(count))):
            return count, [], ""
        used = entry["nodes"]
        return used, entry["overrides"], f", {entry['layout']}" + (f" on {used} of them" if used < count else "")

    def _wait_for_directory(self, signals: list[int]) -> bool:
        """A lost node may run on without its network, and hold the lock of the run until its ranks notice. Returns
        False if that has taken too long."""
        now = time.monotonic()
        self.waiting_since = self.waiting_since or now
        self._report("another process still trains in the run directory; waiting for its end")
        while time.monotonic() < now + LOCK_RETRY_S and not signals:
            time.sleep(POLL_S)
        return now < self.waiting_since + LOCK_LIMIT_S

    def _lost_attempt_cause(self) -> str:
        """Why an attempt ended together with its supervisor."""
        nodes = describe_nodes(self.scheduler.failed_nodes(self.record.attempt_nodes))
        return nodes or f"the job or its supervisor was ended on {self.record.attempt_nodes} and started again"

    def _count_failure(self, cause: str, code: int) -> int:
        """Report a failure. Returns 0 if another attempt follows, and the exit code of the job otherwise."""
        step = self._last_checkpoint()
        failures = 1 if step > self.record.last_checkpoint else self.record.failures_in_a_row + 1
        self.record = replace(self.record, failures_in_a_row=failures, attempt_nodes="")
        if failures > self.record.max_restarts:
            self._report(
                f"{cause}; giving up after {failures} failures in a row without a new checkpoint "
                f"(--max-restarts {self.record.max_restarts})"
            )
            return code
        self._report(f"{cause}; restart {failures} of {self.record.max_restarts}")
        return 0

    def _requeue(self) -> int:
        """Requeue the job and wait to be ended."""
        if not self.scheduler.requeue():
            return EXIT_INTERRUPTED
        time.sleep(REQUEUE_WAIT_S)
        return EXIT_INTERRUPTED

    def _last_checkpoint(self) -> int:
        """The step of the latest checkpoint that the run recorded in its metrics; 0 if there is none."""
        records = read_json_lines(self.directory / "metrics.jsonl").records
        return max((record["step"] for record in records if "checkpoint" in record), default=0)

    def _report(self, text: str) -> None:
        """Add one line to the log of the job and to its record."""
        print(f"trainyard: {text}", flush=True)
        self.record = self.record.with_event(text)
        self.record.write(self.directory)


def describe_nodes(states: dict[str, str]) -> str:
    return ", ".join(f"node {name} is {state}" for name, state in states.items())


def read_outcomes(logs: Path) -> tuple[LaunchOutcome | None, bool]:
    """The first failure that the launchers of an attempt recorded, each in the directory of its node, and whether a
    signal asked one of them to stop: Slurm preempts the ranks, and does not tell their supervisor."""
    outcomes = [LaunchOutcome.read(path) for path in logs.glob(f"*/{OUTCOME_FILE}")]
    failures = [outcome for outcome in outcomes if outcome and outcome.kind]
    # A host on which one rank differs from the others knows more about a hang than one where all wait.
    first = min(failures, key=lambda failure: ("waits for another host" in failure.text, failure.time), default=None)
    return first, any(outcome and outcome.code == EXIT_INTERRUPTED for outcome in outcomes)


@contextmanager
def recorded_signals() -> Iterator[list[int]]:
    """Record the signals that ask a job to stop, in order of arrival."""
    received: list[int] = []

    def record(signum: int, frame: FrameType | None) -> None:
        received.append(signum)

    numbers = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
    previous = {number: signal.signal(number, record) for number in numbers}
    try:
        yield received
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
