"""How the ranks of one host ended, as their launcher records it for the supervisor of the job."""

import json
import socket
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

from trainyard.core.atomic_files import atomic_write_text

OUTCOME_FILE = "outcome.json"


@dataclass(frozen=True)
class LaunchOutcome:
    """The result of a launcher: its exit code, and the first failure among its ranks."""

    code: int
    kind: str | None
    """None: no failure. user: a mistake in the configuration. in use: another process has
    the run directory. stopped: the run stopped itself. hang: no step for too
    long. crash: anything else."""
    text: str
    """One line that says what failed."""
    time: float
    """Wall-clock time of the failure, which hosts share as well as their clocks agree."""
    host: str

    @classmethod
    def now(cls, code: int, kind: str | None = None, text: str = "", ago: float = 0.0) -> Self:
        """An outcome of this host, whose failure came `ago` seconds ago."""
        return cls(code, kind, text, time.time() - ago, socket.gethostname())

    @classmethod
    def read(cls, path: Path) -> Self | None:
        """Read what a launcher recorded; None if it did not."""
        try:
            return cls(**json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            return None

    def write(self, directory: Path) -> None:
        atomic_write_text(directory / OUTCOME_FILE, json.dumps(asdict(self)))
