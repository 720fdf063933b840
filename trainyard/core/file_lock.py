"""One process at a time, by a lock on a file that ends with the process, however it ends."""

import fcntl
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def file_lock(path: Path, on_busy: Callable[[], None]) -> Iterator[None]:
    """Hold an exclusive lock. A process that finds it taken calls `on_busy` (which may raise), then waits.

    On file systems without locks, and where the file cannot be opened, there is no lock.
    """
    try:
        file = path.open("ab")
    except OSError:
        yield
        return
    with file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            on_busy()
            fcntl.lockf(file, fcntl.LOCK_EX)
        except OSError:
            pass
        yield


class NumberedLocks:
    """Locks of all processes of a host, by number, in one file: the byte at that position is locked.

    Such locks belong to a process, not to a thread: threads must agree among themselves first. Waiting for one is
    trying again, since a blocked call of a process with several threads may be taken for a deadlock.
    """

    def __init__(self, path: Path) -> None:
        self.file = path.open("ab")  # never closed: that would release all locks of this process

    def acquire(self, number: int) -> bool:
        """Try to take a lock. True as well on file systems without locks."""
        try:
            fcntl.lockf(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, number)
        except (BlockingIOError, PermissionError):
            return False
        except OSError:
            pass
        return True

    def release(self, number: int) -> None:
        with suppress(OSError):
            fcntl.lockf(self.file, fcntl.LOCK_UN, 1, number)
