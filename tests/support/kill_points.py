"""Kill a process right before a chosen one of its calls that change the file system.

Between two such calls the files do not change by Python's hand, so that killing before each of them in turn shows every
state that a kill can leave (other than half-written content of one file).
"""

import atexit
import contextlib
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

WRITE_FLAGS = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
CHANGES = ("os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.link", "os.symlink", "os.truncate", "os.chmod")


def count_changes(kill_at: int | None, report: Path | None = None, reads: bool = False) -> None:
    """Count this process' calls that change the file system, and write their number to `report` when it exits. Kill its
    process group before call number `kill_at`. With `reads`, count each file that is opened: an upload changes none."""
    seen, main_process = 0, os.getpid()

    def on_event(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal seen
        if event == "open":
            if not reads and not (isinstance(arguments[2], int) and arguments[2] & WRITE_FLAGS):
                return
        elif event not in CHANGES:
            return
        seen += 1
        if seen == kill_at:
            os.killpg(0, signal.SIGKILL)

    def on_exit() -> None:
        if report and os.getpid() == main_process:
            report.write_text(str(seen))

    atexit.register(on_exit)
    sys.addaudithook(on_event)


def killed_before_change(function: Callable[[], object], number: int) -> bool:
    """Call a function in a fork that is killed before its change `number` of the file system. False if it has fewer."""
    pid = os.fork()
    if not pid:
        with contextlib.suppress(BaseException):
            os.setsid()
            count_changes(number)
            function()
            os._exit(0)
        os._exit(1)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert code in (0, -signal.SIGKILL)
    return code != 0
