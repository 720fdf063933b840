"""The supervisor's decisions, with a scheduler whose attempts are scripted: no Slurm, no rank, milliseconds."""

import errno
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import cast

import pytest

from trainyard.cluster import attempt, supervisor
from trainyard.cluster.job import Job
from trainyard.cluster.jobs import JobRecord
from trainyard.cluster.supervisor import MAX_IDLE_STOPS, Supervisor
from trainyard.core import atomic_files
from trainyard.core.errors import UserError
from trainyard.launch.heartbeat import RankPlace
from trainyard.launch.outcome import LaunchOutcome

NODES = ("n1", "n2")
PEER_LOST = (
    "rank 0 failed: RuntimeError: [/pytorch/gloo/transport/tcp/pair.cc:547] Connection closed by peer [10.0.0.2]"
)
INTERRUPTED = dict.fromkeys(NODES, LaunchOutcome.now(130))
COMPLETE = dict.fromkeys(NODES, LaunchOutcome.now(0))
NEVER = 3000


def crash(text: str = "rank 1 was killed by signal 9 (SIGKILL)", kind: str = "crash", code: int = 1) -> LaunchOutcome:
    return LaunchOutcome.now(code, kind, text)


@dataclass
class Attempt:
    """What happens after srun was started."""

    code: int
    """Exit code of srun."""
    outcomes: Mapping[str, LaunchOutcome | None] = field(default_factory=lambda: COMPLETE)
    """What the launcher of each node records; None: it starts, and records nothing."""
    checkpoint: int = 0
    """Step of a checkpoint that the run saves."""
    polls: int = 1
    """Polls of srun until it ends."""
    event: Callable[[], object] = lambda: None
    """Something that happens meanwhile."""


class FakeProcess:
    """srun."""

    def __init__(self, attempt: Attempt) -> None:
        self.attempt, self.polls = attempt, attempt.polls
        self.returncode: int | None = None
        self.signals: list[int] = []

    def poll(self) -> int | None:
        self.polls -= 1
        if self.returncode is None and (self.polls < 0 or self.signals):
            self.returncode = self.attempt.code
        return self.returncode

    def send_signal(self, signum: int) -> None:
        self.signals.append(signum)

    def kill(self) -> None:
        if self.returncode is None:
            self.returncode = -signal.SIGKILL

    def wait(self) -> int:
        assert self.returncode is not None
        return self.returncode


class FakeJob(Job):
    """A job of two nodes."""

    job_id, nodes, node_count = "7", "n[1-2]", 2

    def __init__(self, run: Path, attempts: Sequence[Attempt]) -> None:
        self.run, self.attempts = run, list(attempts)
        self.processes: list[FakeProcess] = []
        self.commands: list[list[str]] = []
        self.requeues, self.ended_steps = 0, 0
        self.trouble: dict[str, str] = {}
        self.cancelled, self.shares_files = False, True
        self.unanswered = 0
        """Questions that the controller does not answer."""

    def start(self, command: Sequence[str], nodes: int) -> subprocess.Popen[bytes]:
        script = self.attempts.pop(0)
        self.commands.append(list(command))
        logs = Path(command[list(command).index("--logs") + 1])
        for host, outcome in script.outcomes.items():
            (logs / host).mkdir()
            if outcome:
                outcome.write(logs / host)
        if script.checkpoint:
            with (self.run / "metrics.jsonl").open("a") as file:
                print(json.dumps({"step": script.checkpoint, "checkpoint": "x"}), file=file)
        script.event()
        self.processes.append(FakeProcess(script))
        return cast(subprocess.Popen[bytes], self.processes[-1])

    def _answer(self) -> None:
        self.unanswered -= 1
        if self.unanswered >= 0:
            raise UserError("scontrol: munge does not work on n1")

    def sees_on_all_nodes(self, file: Path) -> bool:
        return self.shares_files

    def end_steps(self) -> None:
        self._answer()
        self.ended_steps += 1

    def failed_nodes(self, nodes: str) -> dict[str, str]:
        self._answer()
        return self.trouble

    def is_cancelled(self) -> bool:
        self._answer()
        return self.cancelled

    def requeue(self) -> bool:
        self._answer()
        self.requeues += 1
        return True


class Harness:
    """A run directory with a record, and a supervisor in a scripted job."""

    def __init__(self, run: Path, *attempts: Attempt, **fields: object) -> None:
        self.run = run
        JobRecord(**{"scheduler": "slurm", "job_id": "7", "nodes": "2", "nproc": 1, **fields}).write(run)  # type: ignore[arg-type]
        self.job = FakeJob(run, attempts)

    def supervise(self, asked_to_stop: bool = False) -> int:
        code = Supervisor(self.run, self.job, ["train"]).run(asked_to_stop)
        assert signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL
        return code

    @property
    def record(self) -> JobRecord:
        record = JobRecord.read(self.run)
        assert record
        return record

    @property
    def events(self) -> list[str]:
        return [event["text"] for event in self.record.events]


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    times = {"POLL_S": 0.0, "WATCH_S": 0.0, "STEP_GRACE_S": 0.05, "REQUEUE_WAIT_S": 0.0}
    for name, value in {**times, "RETRY_S": 0.005, "WAIT_LIMIT_S": 60.0}.items():
        monkeypatch.setattr(supervisor, name, value)


def ask_to_stop() -> None:
    os.kill(os.getpid(), signal.SIGUSR1)


def test_complete_run_ends_the_job(tmp_path: Path) -> None:
    harness = Harness(tmp_path, Attempt(0))
    assert harness.supervise() == 0
    assert harness.events == ["attempt 1: job 7 on n[1-2]; no checkpoint yet"]
    assert (harness.record.attempt_nodes, harness.job.requeues) == ("", 0)


def test_srun_that_ends_with_0_is_not_a_complete_run(tmp_path: Path) -> None:
    """As it does after it has waited in vain for the end of a step whose slurmstepd is gone."""
    harness = Harness(
        tmp_path, Attempt(0, {"n1": None, "n2": None}), Attempt(0, {"n1": LaunchOutcome.now(0)}), Attempt(0)
    )
    assert harness.supervise() == 0
    assert harness.record.attempts == 3
    assert harness.events[1].startswith("the launcher on n1, n2 was killed, or could not write to ")
    assert harness.record.failures_in_a_row == 2


def test_failures_without_a_new_checkpoint_are_bounded(tmp_path: Path) -> None:
    failing = Attempt(1, {"n1": crash(), "n2": LaunchOutcome.now(130)})
    harness = Harness(tmp_path, failing, failing, max_restarts=1)
    assert harness.supervise() == 1
    assert harness.events[1].endswith("(SIGKILL); restart 1 of 1")
    assert harness.events[-1].endswith(
        "(SIGKILL); giving up after 2 failures in a row without a new checkpoint (--max-restarts 1)"
    )


def test_new_checkpoint_resets_the_count(tmp_path: Path) -> None:
    failures = [Attempt(1, {"n1": crash()}, checkpoint=10 * number) for number in range(1, 6)]
    harness = Harness(tmp_path, *failures, Attempt(0), max_restarts=1)
    assert harness.supervise() == 0
    assert [event for event in harness.events if "restart" in event] == [
        "rank 1 was killed by signal 9 (SIGKILL); restart 1 of 1"
    ] * 5
    assert harness.events[-1] == "attempt 6: job 7 on n[1-2]; the latest checkpoint is of step 50"


def test_checkpoint_that_the_metrics_do_not_name(tmp_path: Path) -> None:
    """The run was killed between the two."""
    (tmp_path / "checkpoints/step_00000030").mkdir(parents=True)
    (tmp_path / "checkpoints/step_00000030/complete.json").touch()
    (tmp_path / "checkpoints/step_00000040").mkdir()
    harness = Harness(tmp_path, Attempt(0))
    harness.supervise()
    assert harness.events[0].endswith("the latest checkpoint is of step 30")


@pytest.mark.parametrize(("kind", "code"), [("user", 2), ("stopped", 1)])
def test_mistake_is_not_repeated(tmp_path: Path, kind: str, code: int) -> None:
    harness = Harness(tmp_path, Attempt(code, {"n1": crash("train.steps=0: no", kind, code), "n2": None}))
    assert harness.supervise() == code
    assert harness.events[-1] == "stopped: train.steps=0: no"


def test_full_disk_is_not_final(tmp_path: Path) -> None:
    full = crash("rank 0: metrics.jsonl: No space left on device", "not writable")
    harness = Harness(tmp_path, Attempt(1, {"n1": full, "n2": LaunchOutcome.now(130)}), Attempt(0))
    assert harness.supervise() == 0
    assert harness.events[1].endswith("No space left on device; restart 1 of 3")


def test_directory_in_use_is_waited_for(tmp_path: Path) -> None:
    taken = Attempt(2, {"n1": crash("in use", "in use", 2)})
    harness = Harness(tmp_path, *[taken] * 5, Attempt(0), max_restarts=0)
    assert harness.supervise() == 0
    assert harness.record.failures_in_a_row == 0
    assert "another process still trains in the run directory; waiting for its end" in harness.events


def test_directory_in_use_for_too_long_is_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "WAIT_LIMIT_S", 0.0)
    harness = Harness(tmp_path, *[Attempt(2, {"n1": crash("in use", "in use", 2)})] * 2, max_restarts=0)
    assert harness.supervise() == 2
    assert harness.events[-1].startswith("in use; giving up after 1 failures")


@pytest.mark.parametrize("where", ["record", "Slurm"])
def test_cancelled_job_is_not_requeued(tmp_path: Path, where: str) -> None:
    """`trainyard cancel` changes the record while the ranks run, scancel the job."""
    harness = Harness(tmp_path, Attempt(130, INTERRUPTED, checkpoint=5))

    def cancel() -> None:
        if where == "record":
            replace(harness.record, cancelled=True).write(tmp_path)
        harness.job.cancelled = where == "Slurm"
        os.kill(os.getpid(), signal.SIGTERM)

    harness.job.attempts[0].event = cancel
    assert harness.supervise() == 130
    assert harness.events[-1] == "cancelled; the latest checkpoint is of step 5"
    assert harness.job.requeues == 0
    assert harness.record.cancelled == (where == "record")


def test_cancelled_between_two_attempts(tmp_path: Path) -> None:
    """A line about a failure must not overwrite what `trainyard cancel` wrote."""
    harness = Harness(tmp_path, Attempt(1, {"n1": crash()}), Attempt(130, INTERRUPTED))
    harness.job.attempts[0].event = lambda: replace(harness.record, cancelled=True).write(tmp_path)
    assert harness.supervise() == 130
    assert harness.record.cancelled


def test_notice_is_forwarded_and_requeues(tmp_path: Path) -> None:
    harness = Harness(tmp_path, Attempt(1, INTERRUPTED, checkpoint=9, polls=NEVER, event=ask_to_stop))
    assert harness.supervise() == 130
    assert harness.job.processes[0].signals == [signal.SIGUSR1]
    assert harness.events[-1] == "asked to stop; the latest checkpoint is of step 9"
    assert harness.job.requeues == 1
    assert harness.record.failures_in_a_row == harness.record.idle_stops == 0


def test_preemption_reaches_only_the_ranks(tmp_path: Path) -> None:
    harness = Harness(tmp_path, Attempt(130, INTERRUPTED, checkpoint=9))
    assert harness.supervise() == 130
    assert harness.job.requeues == 1


def test_launcher_without_a_record_is_not_a_stop(tmp_path: Path) -> None:
    """srun ends all launchers with a signal when one has failed, which looks like a preemption to them."""
    harness = Harness(tmp_path, Attempt(130, {"n1": LaunchOutcome.now(130), "n2": None}), Attempt(0))
    assert harness.supervise() == 0
    assert harness.events[1].startswith("the launcher on n2 was killed, or could not write to")
    assert "asked to stop" not in str(harness.events)


@pytest.mark.parametrize("outcomes", [{}, {"n1": crash(PEER_LOST), "n2": LaunchOutcome.now(130)}])
def test_notice_while_the_ranks_start_is_not_a_failure(tmp_path: Path, outcomes: dict[str, LaunchOutcome]) -> None:
    """The signal ends ranks and launchers that are not ready for it; others lose their peers."""
    harness = Harness(tmp_path, Attempt(138, outcomes, polls=NEVER, event=ask_to_stop))
    assert harness.supervise() == 130
    assert (harness.record.failures_in_a_row, harness.job.requeues) == (0, 1)


def test_notice_before_the_supervisor_was_ready(tmp_path: Path) -> None:
    harness = Harness(tmp_path)
    assert harness.supervise(asked_to_stop=True) == 130
    assert (harness.job.requeues, harness.record.attempts) == (1, 0)


def test_stops_without_a_new_checkpoint_are_bounded(tmp_path: Path) -> None:
    """A start that takes longer than the time limit would be requeued for ever."""
    harness = Harness(tmp_path, last_checkpoint=0)
    for count in range(1, MAX_IDLE_STOPS + 1):
        harness.job.attempts = [Attempt(130, INTERRUPTED)]
        assert harness.supervise() == 130
        assert harness.record.idle_stops == harness.job.requeues == count
    assert harness.supervise(asked_to_stop=True) == 1
    assert harness.events[-1].startswith(f"asked to stop {MAX_IDLE_STOPS + 1} times in a row before a new checkpoint; ")
    assert harness.job.requeues == MAX_IDLE_STOPS


def test_stop_with_a_new_checkpoint_starts_the_count_again(tmp_path: Path) -> None:
    harness = Harness(tmp_path, Attempt(130, INTERRUPTED, checkpoint=3), idle_stops=MAX_IDLE_STOPS)
    assert harness.supervise() == 130
    assert harness.record.idle_stops == 0
    assert harness.supervise(asked_to_stop=True) == 130  # before anything was saved again
    assert harness.record.idle_stops == 1


def test_lost_node_requeues(tmp_path: Path) -> None:
    harness = Harness(tmp_path, Attempt(1, {"n1": crash(PEER_LOST), "n2": None}))
    harness.job.trouble = {"n2": "DOWN*"}
    assert harness.supervise() == 130
    assert harness.events[-1] == "node n2 is DOWN*; restart 1 of 3"
    assert harness.job.requeues == 1


def test_lost_node_whose_job_slurm_ends_at_once_is_no_wish_to_stop(tmp_path: Path) -> None:
    """Slurm sends SIGTERM to the supervisor while srun still waits for the lost node."""
    harness = Harness(tmp_path, Attempt(1, {"n1": crash(PEER_LOST), "n2": None}))
    harness.job.attempts[0].event = lambda: os.kill(os.getpid(), signal.SIGTERM)
    harness.job.trouble = {"n2": "DOWN*"}
    assert harness.supervise() == 130
    assert harness.events[-1] == "node n2 is DOWN*; restart 1 of 3"
    assert (harness.job.requeues, harness.record.idle_stops) == (1, 0)


def test_killed_supervisor_is_counted_and_its_step_ended(tmp_path: Path) -> None:
    harness = Harness(tmp_path, Attempt(0), attempt_nodes="n[1-2]", attempts=4)
    assert harness.supervise() == 0
    assert harness.events[0] == "the job or its supervisor was ended on n[1-2] and started again; restart 1 of 3"
    assert harness.job.ended_steps == 1
    assert harness.record.attempts == 5


@pytest.mark.parametrize(
    ("outcomes", "code"), [({"n1": crash(), "n2": None}, 1), (COMPLETE, 0)], ids=["a failure", "all have ended"]
)
def test_step_that_does_not_end_is_ended(tmp_path: Path, outcomes: dict[str, LaunchOutcome], code: int) -> None:
    """srun waits for ever for a node whose slurmstepd is gone."""
    harness = Harness(tmp_path, Attempt(0, outcomes, polls=NEVER), max_restarts=0)
    assert harness.supervise() == (9 if code else 0)
    assert harness.job.ended_steps == 1
    assert not code or "(SIGKILL); srun did not end, and was ended after 0.05 s; giving up" in harness.events[-1]


def test_step_that_cannot_be_ended_requeues(tmp_path: Path) -> None:
    harness = Harness(tmp_path, Attempt(0, {"n1": crash(), "n2": None}, polls=NEVER))
    harness.job.unanswered = 1
    assert harness.supervise() == 130
    assert harness.job.requeues == 1


def test_step_that_starts_no_launcher_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """srun waits for resources that another step never gives back."""
    monkeypatch.setattr(attempt, "START_LIMIT_S", 0.05)
    harness = Harness(tmp_path, Attempt(0, {}, polls=NEVER), max_restarts=0)
    assert harness.supervise() == 9
    assert harness.events[-1].startswith("no launcher has started; srun ended with code 9; srun did not end, and was ")
    assert harness.job.ended_steps == 1


def test_running_step_is_left_alone(tmp_path: Path) -> None:
    """One launcher has ended without a failure: others may still write."""
    harness = Harness(tmp_path, Attempt(0, COMPLETE | {"n2": None}, polls=200), Attempt(0))
    harness.supervise()
    assert harness.job.ended_steps == 0
    assert harness.job.processes[0].polls < 0


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Fault injection: as long as the list has an error number, creating a file fails with it."""
    errors: list[int] = []
    create = atomic_files.tempfile.mkstemp

    def fail_or_create(**options: str) -> tuple[int, str]:
        if errors:
            number = errors.pop(0)
            raise OSError(number, os.strerror(number))
        return create(**options)

    monkeypatch.setattr(atomic_files.tempfile, "mkstemp", fail_or_create)
    return errors


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EIO, errno.ESTALE])
def test_write_errors_are_outlived(
    tmp_path: Path, disk: list[int], number: int, capfd: pytest.CaptureFixture[str]
) -> None:
    attempts = [Attempt(1, {"n1": crash()}, event=lambda: disk.extend([number] * 8)), Attempt(0)]
    harness = Harness(tmp_path, *attempts)
    assert harness.supervise() == 0
    assert not disk
    assert [event.split(";")[-1].strip() for event in harness.events] == [
        "no checkpoint yet",
        "waiting until it can be written",
        "restart 1 of 3",
        "no checkpoint yet",
    ]
    line = f"trainyard: {tmp_path}: {os.strerror(number)}; waiting until it can be written\n"
    assert capfd.readouterr().out.count(line) == 1


def test_directory_that_stays_full_requeues(tmp_path: Path, disk: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "WAIT_LIMIT_S", 0.1)
    harness = Harness(tmp_path, Attempt(1, {"n1": crash()}, event=lambda: disk.extend([errno.ENOSPC] * 100_000)))
    assert harness.supervise() == 130
    assert harness.job.requeues == 1
    disk.clear()
    harness.job.attempts = [Attempt(0)]
    assert harness.supervise() == 0
    assert "the job or its supervisor was ended on n[1-2] and started again; restart 1 of 3" in harness.events


def test_notice_while_nothing_can_be_written_waits_before_it_requeues(tmp_path: Path, disk: list[int]) -> None:
    """Slurm fails a job that starts again while its log cannot be opened."""
    harness = Harness(tmp_path, Attempt(130, INTERRUPTED))
    harness.job.attempts[0].event = lambda: (disk.extend([errno.EROFS] * 5), ask_to_stop())
    assert harness.supervise() == 130
    assert harness.job.requeues == 1
    assert not disk


def test_notice_on_a_disk_that_stays_full_requeues_in_time(
    tmp_path: Path, disk: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "NOTICE_WAIT_S", 0.1)
    harness = Harness(tmp_path, Attempt(130, INTERRUPTED))
    harness.job.attempts[0].event = lambda: (disk.extend([errno.ENOSPC] * 100_000), ask_to_stop())
    assert harness.supervise() == 130
    assert harness.job.requeues == 1
    assert disk


def test_short_notice_on_a_disk_that_stays_full_requeues_before_the_time_limit(tmp_path: Path, disk: list[int]) -> None:
    harness = Harness(tmp_path, Attempt(130, INTERRUPTED), notice_s=1)
    harness.job.attempts[0].event = lambda: (disk.extend([errno.ENOSPC] * 100_000), ask_to_stop())
    start = time.monotonic()
    assert harness.supervise() == 130
    assert time.monotonic() - start < 10  # NOTICE_WAIT_S is 30
    assert harness.job.requeues == 1


def test_cancelled_job_is_not_requeued_because_of_its_disk(tmp_path: Path, disk: list[int]) -> None:
    harness = Harness(tmp_path, Attempt(130, INTERRUPTED))
    harness.job.attempts[0].event = lambda: (disk.extend([errno.ENOSPC] * 10), os.kill(os.getpid(), signal.SIGTERM))
    harness.job.cancelled = True
    assert harness.supervise() == 130
    assert harness.job.requeues == 0


def test_silent_controller_is_waited_for(tmp_path: Path) -> None:
    harness = Harness(tmp_path, Attempt(1, {}), Attempt(0))
    harness.job.unanswered = 3
    assert harness.supervise() == 0
    assert harness.events[1:3] == [
        "scontrol: munge does not work on n1; waiting for an answer",
        "no launcher has started; srun ended with code 1; restart 1 of 3",
    ]


def test_older_supervisor_leaves_the_job_alone(tmp_path: Path) -> None:
    """Its node came back after the job was requeued; the newer one has written to the record."""
    harness = Harness(tmp_path, Attempt(1, {"n1": crash()}, polls=NEVER))

    def take_over() -> None:
        replace(harness.record, supervisor="another", attempts=9).write(tmp_path)

    harness.job.attempts[0].event = take_over
    assert harness.supervise() == 130
    assert (harness.record.supervisor, harness.record.attempts) == ("another", 9)
    assert harness.job.requeues == 0
    assert harness.job.processes[0].returncode == -signal.SIGKILL


def test_older_supervisor_does_not_requeue_the_job(tmp_path: Path, disk: list[int]) -> None:
    """Its node had neither disk nor network, and asks Slurm as soon as that answers again."""
    harness = Harness(tmp_path, Attempt(130, INTERRUPTED))

    def lose_node() -> None:
        replace(harness.record, supervisor="another").write(tmp_path)
        (tmp_path / "job.json").rename(tmp_path / "away")
        disk.extend([errno.EIO] * 100)
        harness.job.unanswered = 2
        ask_to_stop()

    harness.job.attempts[0].event = lose_node
    answer = harness.job._answer

    def come_back() -> None:
        if harness.job.unanswered == 1:
            (tmp_path / "away").rename(tmp_path / "job.json")
        answer()

    harness.job._answer = come_back  # type: ignore[method-assign]
    assert harness.supervise() == 130
    assert harness.job.requeues == 0


def test_directory_that_nodes_do_not_share(tmp_path: Path) -> None:
    harness = Harness(tmp_path)
    harness.job.shares_files = False
    assert harness.supervise() == 2
    assert harness.events[-1].startswith("stopped: not all nodes of n[1-2] see ")


def test_elastic_layout(tmp_path: Path) -> None:
    layouts = {"2": {"nodes": 1, "overrides": ["layout.tp=2"], "layout": "tensor 2"}}
    harness = Harness(tmp_path, Attempt(0, {"n1": LaunchOutcome.now(0)}), layouts=layouts)
    assert harness.supervise() == 0
    assert harness.events == ["attempt 1: job 7 on n[1-2], tensor 2 on 1 of them; no checkpoint yet"]
    assert harness.job.commands[0][:2] == ["train", "layout.tp=2"]


def test_victim_of_a_crash_is_not_blamed(tmp_path: Path) -> None:
    """Whatever the clocks of the hosts say."""
    victim = replace(crash(PEER_LOST), time=1.0)
    culprit = replace(crash("rank 1 was killed by signal 11 (SIGSEGV)"), time=2.0)
    harness = Harness(tmp_path, Attempt(1, {"n1": victim, "n2": culprit}), Attempt(0))
    harness.supervise()
    assert harness.events[1] == "rank 1 was killed by signal 11 (SIGSEGV); restart 1 of 3"


def test_hung_rank_is_named_over_all_hosts(tmp_path: Path) -> None:
    """With one rank on each host, no launcher alone can tell who waits for whom."""
    places = [RankPlace(0, 6, True, "/x/collectives.py:3 wait"), RankPlace(1, 6, False, "/x/mine.py:12 loss")]
    outcomes = {
        host: LaunchOutcome.now(1, "hang", f"no step for 12 s after step 6; {place.describe()}", places=[place])
        for host, place in zip(NODES, places, strict=True)
    }
    harness = Harness(tmp_path, Attempt(1, outcomes), Attempt(0))
    harness.supervise()
    expected = "no step for 12 s after step 6; rank 1 is outside of a collective, at /x/mine.py:12 loss; restart 1 of 3"
    assert harness.events[1] == expected
