"""Supervises a run inside its job: starts the ranks, and starts them again from the latest checkpoint if they fail.

An attempt ends in one of four ways. The run is complete, or made a mistake that a restart repeats: the job ends. A
signal asked it to stop (time limit, preemption): the job is requeued, unless a user cancelled it. A node is lost: the
job is requeued, and Slurm chooses other nodes. A rank died: the ranks are started again on the same nodes. Restarts
without a new checkpoint in between are bounded.

The supervisor outlives what it depends on: it waits while the run directory cannot be written or Slurm does not answer,
ends a step that does not end itself, and leaves the job to a newer supervisor if there is one.
"""

import os
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from trainyard.checkpoint.file_names import COMMIT_FILE, STEP_DIRECTORY
from trainyard.cluster.attempt import AttemptEnd, is_over, judge_attempt
from trainyard.cluster.job import Job
from trainyard.cluster.jobs import RECORD_FILE, JobRecord, attempt_directory
from trainyard.core.constants import EXIT_INTERRUPTED
from trainyard.core.errors import RunStopped, UserError
from trainyard.core.world import host_name
from trainyard.launch.launcher import recorded_signals
from trainyard.metrics.json_lines import read_json_lines

POLL_S = 0.2
WATCH_S = 2.0
"""Seconds between two looks at the files of an attempt."""
STEP_GRACE_S = 60.0
"""How long srun may run on after a launcher has recorded a failure, or all have recorded their end. srun waits for ever
for a node whose slurmstepd is gone."""
REQUEUE_WAIT_S = 120
"""Time that Slurm has to end this process after it requeued the job."""
RETRY_S = 10.0
"""Seconds before something that the run waits for is tried again."""
WAIT_LIMIT_S = 1800.0
"""How long another process may still hold the run directory, the directory may not be writable, or Slurm may not
answer."""
NOTICE_WAIT_S = 30.0
"""How long the directory may not be writable after a signal, which leaves little time; at most half of the notice.
Slurm cannot open the log of a job that starts again too early, and fails it."""
MAX_IDLE_STOPS = 5
"""Stops in a row without a new checkpoint; a job whose start takes longer than its time would be requeued for ever."""
EXIT_USER_ERROR = 2
FINAL_KINDS = ("user", "stopped")
"""Failures that a restart would repeat."""
T = TypeVar("T")


class Superseded(Exception):
    """The job has another supervisor now."""


class NotWritableForLong(Exception):
    """The run directory could not be written for too long."""


class Supervisor:
    """Runs the attempts of one job."""

    def __init__(self, directory: Path, job: Job, train_command: list[str]) -> None:
        """`train_command` starts the ranks of one node; the supervisor adds overrides and the log directory."""
        self.directory, self.job, self.train_command = directory, job, train_command
        record = JobRecord.read(directory)
        if record is None:
            raise RunStopped(f"{directory}: the record of its job is gone")
        self.record = replace(record, supervisor=f"{host_name()} {os.getpid()} {time.time()}")
        self.signals: list[int] = []
        self.process: subprocess.Popen[bytes] | None = None
        """The step of the attempt in progress."""
        self.waiting_since = 0.0
        """When another process was first found in the run directory."""

    def run(self, asked_to_stop: bool = False) -> int:
        """Run attempts until the run is complete or cannot continue. Returns the exit code of the job. `asked_to_stop`
        says that the notice before the time limit has come already."""
        with recorded_signals() as self.signals:
            if asked_to_stop:
                self.signals.append(signal.SIGUSR1)
            try:
                try:
                    self._patiently(lambda: self.record.write(self.directory))
                    return self._run_attempts()
                except NotWritableForLong:
                    print_line(f"{self.directory} cannot be written; requeueing the job")
                    return self._requeue()
            except Superseded:
                print_line(f"job {self.job.job_id} has another supervisor; this one ends")
                return EXIT_INTERRUPTED
            finally:
                if self.process and self.process.poll() is None:
                    self.process.kill()

    def _run_attempts(self) -> int:
        if self.record.attempt_nodes:
            if not self._end_steps():
                return self._requeue()
            if code := self._count_failure(self._lost_attempt_cause(), 1):
                return code
        if not self.job.sees_on_all_nodes(self.directory / RECORD_FILE):
            self._report(
                f"stopped: not all nodes of {self.job.nodes} see {self.directory}; nearest: a directory on a "
                "file system that they share (log.directory)"
            )
            return EXIT_USER_ERROR
        while True:
            end = self._attempt()
            if end.code == 0:
                return 0
            if end.failure and end.failure.kind in FINAL_KINDS:
                self._report(f"stopped: {end.failure.text}")
                return end.failure.code
            if end.failure and end.failure.kind == "in use" and self._wait_for_directory():
                continue
            if self._is_cancelled():
                self._report(f"cancelled; {describe_checkpoint(self._last_checkpoint())}")
                return EXIT_INTERRUPTED
            if end.asked_to_stop and signal.SIGUSR1 in self.signals:  # a notice leaves no time to ask for nodes
                return self._stop()
            failed_nodes = self._ask(partial(self.job.failed_nodes, self.job.nodes))
            if end.asked_to_stop and not failed_nodes:  # Slurm ends a job that has lost a node with SIGTERM, too
                return self._stop()
            if code := self._count_failure(describe_nodes(failed_nodes) or end.cause, end.code):
                return code
            if failed_nodes or end.step_remains:
                return self._requeue()
            if end.failure and end.failure.kind == "not writable":
                self._sleep(RETRY_S)

    def _attempt(self) -> AttemptEnd:
        """Start the ranks on all nodes, forward signals to them and wait for their end."""
        logs = attempt_directory(self.directory, replace(self.record, attempts=self.record.attempts + 1))
        self._patiently(partial(logs.mkdir, parents=True, exist_ok=True))
        if self.signals:  # since the last attempt
            return AttemptEnd(EXIT_INTERRUPTED, asked_to_stop=True)
        step, nodes = self._last_checkpoint(), self.job.nodes
        attempts = self.record.attempts + 1
        self.record = replace(self.record, attempts=attempts, last_checkpoint=step, attempt_nodes=nodes)
        count, overrides, layout = self._node_layout()
        self._report(f"attempt {attempts}: job {self.job.job_id} on {nodes}{layout}; {describe_checkpoint(step)}")
        process = self.process = self.job.start([*self.train_command, *overrides, "--logs", str(logs)], count)
        in_time = self._wait_for_step(process, partial(is_over, logs, count))
        remains = not in_time and not self._end_steps()
        process.kill()
        end = judge_attempt(logs, count, abs(process.wait()), self.signals)
        self.record = replace(self.record, attempt_nodes="")
        self._write()
        late = "" if in_time else f"; srun did not end, and was ended after {STEP_GRACE_S:g} s"
        return replace(end, cause=f"{end.cause}{late}", step_remains=remains)

    def _wait_for_step(self, process: subprocess.Popen[bytes], is_over: Callable[[], bool]) -> bool:
        """Forward signals until the step ends. Returns False if it does not end although it is over."""
        sent, over_since, next_look = 0, float("inf"), 0.0
        while process.poll() is None:
            for signum in self.signals[sent:]:
                process.send_signal(signum)
                sent += 1
            now = time.monotonic()
            if now >= next_look:
                next_look = now + WATCH_S
                self._read_changes()
                over_since = min(over_since, now if is_over() else float("inf"))
            if now > over_since + STEP_GRACE_S:
                return False
            time.sleep(POLL_S)
        return True

    def _end_steps(self) -> bool:
        """End what runs on the nodes of this job. Returns False if that is not possible."""
        try:
            self.job.end_steps()
        except UserError as error:
            self._report(str(error))
            return False
        return True

    def _node_layout(self) -> tuple[int, list[str], str]:
        """The number of nodes to use, overrides of the configuration, and a description for the log."""
        count = self.job.node_count
        if not (entry := self.record.layouts.get(str(count))):
            return count, [], ""
        used = entry["nodes"]
        return used, entry["overrides"], f", {entry['layout']}" + (f" on {used} of them" if used < count else "")

    def _wait_for_directory(self) -> bool:
        """A lost node may run on without its network, and hold the lock of the run until its ranks notice. Returns
        False if that has taken too long."""
        now = time.monotonic()
        self.waiting_since = self.waiting_since or now
        self._report("another process still trains in the run directory; waiting for its end")
        self._sleep(RETRY_S)
        return now < self.waiting_since + WAIT_LIMIT_S

    def _sleep(self, seconds: float) -> None:
        """Wait, or until a signal comes."""
        deadline, received = time.monotonic() + seconds, len(self.signals)
        while time.monotonic() < deadline and len(self.signals) == received:
            time.sleep(POLL_S)

    def _lost_attempt_cause(self) -> str:
        """Why an attempt ended together with its supervisor."""
        nodes = describe_nodes(self._ask(partial(self.job.failed_nodes, self.record.attempt_nodes)))
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

    def _stop(self) -> int:
        """Requeue a job that was asked to stop, unless that has happened too often without a new checkpoint."""
        step = self._last_checkpoint()
        idle = 0 if step > self.record.last_checkpoint else self.record.idle_stops + 1
        self.record = replace(self.record, idle_stops=idle, last_checkpoint=step)
        if idle > MAX_IDLE_STOPS:
            self._report(
                f"asked to stop {idle} times in a row before a new checkpoint; giving up: the start of the run takes "
                "longer than --time minus --notice, or the job is preempted too early"
            )
            return 1
        self._report(f"asked to stop; {describe_checkpoint(step)}")
        return self._requeue()

    def _requeue(self) -> int:
        """Requeue the job, unless a user cancelled it, and wait to be ended."""

        def requeue() -> bool:
            self._read_changes()  # a newer supervisor must not be requeued when Slurm answers again
            return self.job.requeue()

        if not self._is_cancelled() and self._ask(requeue):
            self._sleep(REQUEUE_WAIT_S)
        return EXIT_INTERRUPTED

    def _is_cancelled(self) -> bool:
        ended = signal.SIGTERM in self.signals and signal.SIGUSR1 not in self.signals
        return self.record.cancelled or (ended and self._ask(self.job.is_cancelled))

    def _last_checkpoint(self) -> int:
        """The step of the latest checkpoint that is known; 0 if there is none. The metrics name every checkpoint, but a
        kill may come before; and they may be unreadable for a moment."""
        records = read_json_lines(self.directory / "metrics.jsonl").records
        steps = [record["step"] for record in records if "checkpoint" in record]
        with suppress(OSError):
            committed = self.directory.glob(f"checkpoints/step_*/{COMMIT_FILE}")
            steps += [int(match[1]) for path in committed if (match := STEP_DIRECTORY.fullmatch(path.parent.name))]
        return max(steps, default=0) or self.record.last_checkpoint

    def _report(self, text: str) -> None:
        """Add one line to the log of the job and to its record."""
        self._note(text)
        self._write()

    def _note(self, text: str) -> None:
        """Add one line to the log of the job now, and to its record when that is next written; not twice in a row."""
        if not self.record.events or self.record.events[-1]["text"] != text:
            print_line(text)
            self.record = self.record.with_event(text)

    def _write(self) -> None:
        """Write the record, unless the job has another supervisor."""
        self._read_changes()
        self._patiently(lambda: self.record.write(self.directory))

    def _read_changes(self) -> None:
        """Look at what others write to the record: `trainyard cancel`, and another supervisor of the job."""
        try:
            stored = JobRecord.read(self.directory)
        except UserError:  # the file system does not answer
            return
        if stored and stored.supervisor not in ("", self.record.supervisor):
            raise Superseded
        self.record = replace(self.record, cancelled=self.record.cancelled or bool(stored and stored.cancelled))

    def _patiently(self, write: Callable[[], None]) -> None:
        """Write something to the run directory, and wait while that is not possible."""
        limit = time.monotonic() + WAIT_LIMIT_S
        while True:
            try:
                return write()
            except OSError as error:
                self._note(f"{self.directory}: {error.strerror}; waiting until it can be written")
            if self.signals:
                limit = min(limit, time.monotonic() + min(NOTICE_WAIT_S, self.record.notice_s / 2))
            remaining = limit - time.monotonic()
            if remaining <= 0:
                raise NotWritableForLong
            self._sleep(min(RETRY_S, remaining))

    def _ask(self, question: Callable[[], T]) -> T:
        """Ask the scheduler, and wait while it does not answer."""
        start = time.monotonic()
        while True:
            try:
                return question()
            except UserError as error:
                if time.monotonic() > start + WAIT_LIMIT_S:
                    raise
                self._note(f"{error}; waiting for an answer")
            self._sleep(RETRY_S)


def print_line(text: str) -> None:
    with suppress(OSError):  # the log is in the run directory
        print(f"trainyard: {text}", flush=True)


def describe_checkpoint(step: int) -> str:
    return f"the latest checkpoint is of step {step}" if step else "no checkpoint yet"


def describe_nodes(states: dict[str, str]) -> str:
    return ", ".join(f"node {name} is {state}" for name, state in states.items())
