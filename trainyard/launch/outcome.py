"""The outcome of the ranks of one host, which their launcher records for the supervisor of the job."""

import json
import re
import socket
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

from trainyard.core.atomic_files import atomic_write_text
from trainyard.launch.heartbeat import RankPlace, find_suspect

OUTCOME_FILE = "outcome.json"
PEER_LOSS = re.compile(
    r"/gloo/|Connection (closed|reset) by peer|DistNetworkError|DistStoreError|Connection was likely closed"
    r"|ncclRemoteError|communicator was aborted"
)
"""Errors of gloo, NCCL and torch's store in a rank whose peer has ended or does not answer."""


@dataclass(frozen=True)
class LaunchOutcome:
    """The result of a launcher: its exit code, and the first failure among its ranks."""

    code: int
    kind: str | None
    """None: no failure. user: a mistake in the configuration. in use: another process has
    the run directory. not writable: a file system is full or read-only. stopped: the run stopped itself. hang: no step
    for too long. crash: anything else."""
    text: str
    """One line that says what failed."""
    time: float
    """Wall-clock time of the failure, which hosts share as well as their clocks agree."""
    host: str
    places: Sequence[RankPlace] = ()
    """Places of the ranks of this host during a hang."""

    @classmethod
    def now(
        cls, code: int, kind: str | None = None, text: str = "", ago: float = 0.0, places: Sequence[RankPlace] = ()
    ) -> Self:
        """An outcome of this host, whose failure came `ago` seconds ago."""
        return cls(code, kind, text, time.time() - ago, socket.gethostname(), places)

    @classmethod
    def read(cls, path: Path) -> Self | None:
        """Read what a launcher recorded; None if it did not."""
        try:
            fields = json.loads(path.read_text(encoding="utf-8"))
            return cls(**fields | {"places": [RankPlace(*place) for place in fields["places"]]})
        except (OSError, ValueError, TypeError, KeyError):
            return None

    def write(self, directory: Path, patience_s: float = 0.0) -> None:
        atomic_write_text(directory / OUTCOME_FILE, json.dumps(asdict(self)), patience_s)


def is_peer_loss(text: str) -> bool:
    """True if a rank failed because another one did."""
    return PEER_LOSS.search(text) is not None


def read_outcomes(directories: Sequence[Path]) -> list[LaunchOutcome]:
    """The outcomes that the launchers of an attempt recorded, each in the log directory of its host."""
    return [outcome for path in directories if (outcome := LaunchOutcome.read(path / OUTCOME_FILE))]


def first_failure(outcomes: Sequence[LaunchOutcome]) -> LaunchOutcome | None:
    """The failure that caused the others; None if no launcher recorded one. A hang is seen by all hosts: the one that
    has the rank which differs from the ranks of all others knows most about it."""
    suspect = find_suspect([place for outcome in outcomes for place in outcome.places])
    return min(
        (outcome for outcome in outcomes if outcome.kind),
        key=lambda failure: (
            is_peer_loss(failure.text),
            failure.kind == "hang",
            suspect is not None and suspect not in failure.places,
            failure.time,
        ),
        default=None,
    )
