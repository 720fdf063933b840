"""The rank's side of the launcher: a rank exits when its launcher dies, and records its failure in a file.

Without the first, a killed launcher would leave ranks that hold devices forever. Without the second, the cause of a
failure would be one traceback among those of all ranks that lost their peer.
"""

import json
import os
import signal
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

from trainyard.core.atomic_files import atomic_write_text
from trainyard.core.errors import DirectoryInUse, NotWritable, RunStopped, UserError

LAUNCHER_ENV = "TRAINYARD_LAUNCHER"
"""Environment variable of each rank, `FD:PATH`: the read end of the launcher's pipe, and the file for a failure."""

RECORD_PATIENCE_S = 60.0
"""Seconds for which a rank or launcher tries to record its end while the disk is full or read-only."""
EXIT_CODES = {"user": 2, "in use": 2, "not writable": 1, "stopped": 1, "crash": 1}
"""Exit code by kind of failure, the same as without a launcher."""
FAILURE_KINDS: dict[type[Exception], str] = {
    DirectoryInUse: "in use",
    UserError: "user",
    NotWritable: "not writable",
    RunStopped: "stopped",
}
"""Kind of failure by exception, the first that fits; any other one is a crash."""


@dataclass(frozen=True)
class RankFailure:
    """The failure of one rank, as the rank recorded it."""

    rank: int
    time: float
    """Seconds of the monotonic clock, which all processes of a machine share."""
    kind: str
    """One of FAILURE_KINDS, or `crash`."""
    text: str
    """One line, or the traceback of a crash."""

    @classmethod
    def read(cls, path: Path) -> Self | None:
        """Read the failure that a rank recorded at `path`; None if there is none."""
        return cls(**json.loads(path.read_text(encoding="utf-8"))) if path.exists() else None


@contextmanager
def rank_process_guard() -> Iterator[None]:
    """Bind this process to its launcher; does nothing if the process was not started by one.

    An exception that would end the process becomes a failure file and an exit code. The launcher shows the failure if
    it is the first one. An interrupt is not a failure and propagates.
    """
    value = os.environ.pop(LAUNCHER_ENV, None)  # removed, so that child processes do not act as ranks
    if value is None:
        yield
        return
    fd, _, failure_path = value.partition(":")
    os.set_inheritable(int(fd), False)
    threading.Thread(target=_kill_group_when_launcher_dies, args=(int(fd),), daemon=True).start()
    try:
        yield
    except Exception as error:
        now = time.monotonic()
        kind = next((name for kind, name in FAILURE_KINDS.items() if isinstance(error, kind)), "crash")
        text = traceback.format_exc() if kind == "crash" else str(error)
        failure = RankFailure(int(os.environ["RANK"]), now, kind, text)
        atomic_write_text(Path(failure_path), json.dumps(asdict(failure)), RECORD_PATIENCE_S)
        raise SystemExit(EXIT_CODES[kind]) from None


def _kill_group_when_launcher_dies(fd: int) -> None:
    """Block until the launcher is gone: nobody writes to the pipe, and only the launcher holds its write end."""
    os.read(fd, 1)
    os.killpg(os.getpgrp(), signal.SIGKILL)
