"""How an attempt to train ended, from the exit code of its step and from what the launchers of its nodes recorded."""

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from trainyard.core.constants import EXIT_INTERRUPTED
from trainyard.launch.outcome import OUTCOME_FILE, LaunchOutcome, first_failure, is_peer_loss, read_outcomes

START_LIMIT_S = 1800.0
"""For the first launcher of an attempt. Python may be on a slow file system."""


@dataclass(frozen=True)
class AttemptEnd:
    """How one attempt ended."""

    code: int
    failure: LaunchOutcome | None = None
    """The first failure of all nodes."""
    cause: str = ""
    """One line that says what failed."""
    asked_to_stop: bool = False
    step_remains: bool = False
    """The step could not be ended, so that its nodes cannot run another one."""


def is_over(logs: Path, launchers: int) -> bool:
    """True if a step with this number of launchers has no reason to run on: one has recorded a failure, or all have
    recorded their end, or none has started for long. One that has ended without a failure waits for others."""
    hosts = find_hosts(logs)
    if not hosts:
        with suppress(OSError):  # the file system does not answer
            return time.time() > logs.stat().st_mtime + START_LIMIT_S
    outcomes = read_outcomes(hosts)
    return len(outcomes) >= launchers or first_failure(outcomes) is not None


def judge_attempt(logs: Path, launchers: int, code: int, signals: Sequence[int]) -> AttemptEnd:
    """`code` is that of srun, which says little: it is that of any task, and 0 if srun has waited in vain for the end
    of a node. `signals` are those that this job has received."""
    hosts = find_hosts(logs)
    outcomes = read_outcomes(hosts)
    failure, all_recorded = first_failure(outcomes), len(outcomes) >= launchers
    if all_recorded and not any(outcome.code for outcome in outcomes):
        return AttemptEnd(0)
    # A preemption is a signal to the ranks only. srun, which ends all launchers when one has failed, sends one too.
    stopped = bool(signals) or (all_recorded and any(outcome.code == EXIT_INTERRUPTED for outcome in outcomes))
    if stopped and (failure is None or is_peer_loss(failure.text)):
        return AttemptEnd(EXIT_INTERRUPTED, asked_to_stop=True)
    return AttemptEnd(code or 1, failure, failure.text if failure else describe_silence(hosts, code))


def find_hosts(logs: Path) -> list[Path]:
    """The log directories of all launchers that have started; none if the file system does not answer."""
    try:
        return sorted(path for path in logs.iterdir() if path.is_dir())
    except OSError:
        return []


def describe_silence(hosts: list[Path], code: int) -> str:
    """Why an attempt may have failed although no launcher recorded a failure."""
    silent = [path.name for path in hosts if not (path / OUTCOME_FILE).exists()]
    if silent:
        return f"the launcher on {', '.join(silent)} was killed, or could not write to {hosts[0].parent}"
    return f"the ranks ended with code {code}" if hosts else f"no launcher has started; srun ended with code {code}"
