"""One process at a time, by a lock on a file that ends with the process, however it ends."""

import fcntl
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
