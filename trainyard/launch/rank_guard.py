"""What a rank does for its launcher: it ends when the launcher is gone, and it leaves a note when it fails.

Without this, a killed launcher leaves ranks that hold devices for ever, and the reason of a failure is one traceback
among those of all the ranks that lost their peer.
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
from trainyard.core.errors import RunStopped, UserError

LAUNCHER_ENV = "TRAINYARD_LAUNCHER"
"""In the environment of each rank: `FD:PATH`, the read end of the launcher's pipe and the file for a failure."""

EXIT_CODES = {"user": 2, "stopped": 1, "crash": 1}
"""Exit code by kind of failure, the same as without a launcher."""


@dataclass(frozen=True)
class RankFailure:
    """Why a rank failed, in its own words."""

    rank: int
    time: float
    """When, in seconds of the monotonic clock, which all processes of a machine share."""
    kind: str
    """user (UserError), stopped (RunStopped) or crash (anything else)."""
    text: str
    """One line, or for a crash the traceback."""

    @classmethod
    def read(cls, path: Path) -> Self | None:
        """The failure that a rank has left at `path`, if it has."""
        return cls(**json.loads(path.read_text(encoding="utf-8"))) if path.exists() else None


@contextmanager
def rank_process_guard() -> Iterator[None]:
    """Inside, this process belongs to its launcher; if there is none, nothing is different.

    An exception that would end the process becomes a file and an exit code, for the launcher to show if it was the
    first. An interrupt is no failure and passes.
    """
    value = os.environ.pop(LAUNCHER_ENV, None)  # gone, so that a command started from here is nobody's rank
    if value is None:
        yield
        return
    number, _, name = value.partition(":")
    os.set_inheritable(int(number), False)
    threading.Thread(target=_kill_group_when_launcher_dies, args=(int(number),), daemon=True).start()
    try:
        yield
    except Exception as error:
        now = time.monotonic()
        kind = "user" if isinstance(error, UserError) else "stopped" if isinstance(error, RunStopped) else "crash"
        text = traceback.format_exc() if kind == "crash" else str(error)
        atomic_write_text(Path(name), json.dumps(asdict(RankFailure(int(os.environ["RANK"]), now, kind, text))))
        raise SystemExit(EXIT_CODES[kind]) from None


def _kill_group_when_launcher_dies(fd: int) -> None:
    """Nobody writes to the pipe and only the launcher has the other end: the read returns when it is gone."""
    os.read(fd, 1)
    os.killpg(os.getpgrp(), signal.SIGKILL)
