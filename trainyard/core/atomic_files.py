"""Atomic files and directories: nothing half-written ever appears under a final name."""

import ctypes
import errno
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

TRASH_PREFIX = ".removed-"
"""Prefix of directories that hold what is being removed."""
RETRY_S = 1.0
"""Seconds between two tries to write."""
AT_FDCWD, RENAME_EXCHANGE = -100, 2
"""Of Linux: paths are relative to the current directory; the two names are exchanged."""


@contextmanager
def atomic_file(path: Path) -> Iterator[BinaryIO]:
    """Open a temporary file, then fsync it and rename it to `path` if the block succeeds; delete it otherwise."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".part")
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
        fsync_directory(path.parent)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


@contextmanager
def durable_file(path: Path) -> Iterator[BinaryIO]:
    """Open a file of a directory that appears under its name later (`atomic_directory`), and fsync it at the end."""
    with path.open("wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


def atomic_write_text(path: Path, text: str, patience_s: float = 0.0) -> None:
    """Write `text` to `path` with one rename, so that neither a reader nor a crash sees a partial file. Tries again for
    `patience_s` if that fails, since a disk may be full, read-only or unreachable for a while."""
    deadline = time.monotonic() + patience_s
    while True:
        try:
            with atomic_file(path) as file:
                file.write(text.encode())
            return
        except OSError:
            if time.monotonic() >= deadline:
                raise
        time.sleep(RETRY_S)


@contextmanager
def atomic_directory(path: Path) -> Iterator[Path]:
    """Create a temporary directory that replaces `path` if the block succeeds; delete it otherwise.

    The block itself must fsync the files it writes there. If replace_directory was killed between two renames, the next
    call gives the old directory its name back.
    """
    path = path.absolute()
    temporary, old = (path.with_name(f".{path.name}.{suffix}") for suffix in ("part", "old"))
    if old.exists() and not path.exists():
        old.rename(path)
    for leftover in (temporary, old):
        shutil.rmtree(leftover, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        yield temporary
        fsync_directory(temporary)
        replace_directory(temporary, path)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def replace_directory(new: Path, path: Path) -> None:
    """Give `new` the name `path`, and remove the directory that had it.

    The two exchange their names in one step, so that one of them has it whenever the process ends. Some file systems
    (NFS, Lustre) cannot do that: there, the old directory is `.NAME.old` between two renames.
    """
    replaced = new
    if not path.exists():
        new.rename(path)
    elif not _exchange(new, path):
        replaced = path.with_name(f".{path.name}.old")
        shutil.rmtree(replaced, ignore_errors=True)
        path.rename(replaced)
        try:
            new.rename(path)
        except BaseException:
            replaced.rename(path)
            raise
    fsync_directory(path.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def _exchange(first: Path, second: Path) -> bool:
    """Exchange two names. False if the file system, or this platform, cannot."""
    rename = getattr(ctypes.CDLL(None), "renameat2", None)
    return rename is not None and not rename(AT_FDCWD, bytes(first), AT_FDCWD, bytes(second), RENAME_EXCHANGE)


def fsync_directory(path: Path) -> None:
    """Flush a directory's entries to disk, which makes renames in it durable. Some file systems cannot do that."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EBADF, errno.ENOTSUP):
            raise
    finally:
        os.close(handle)


def remove_atomically(path: Path) -> None:
    """Remove a file or a directory. A directory is renamed first, so that nobody sees half of it."""
    if not path.is_dir():
        path.unlink(missing_ok=True)
        return
    trash = Path(tempfile.mkdtemp(dir=path.parent, prefix=TRASH_PREFIX))
    os.replace(path, trash / path.name)
    shutil.rmtree(trash)
