"""Run directories: NAME, NAME-2, NAME-3, ... for the starts of a run named NAME.

Each has an identity, run.json, so that no run is mistaken for another one with a similar name. A process that trains in
a directory holds a lock on that file; the system releases it when the process ends, however it ends.
"""

import errno
import fcntl
import json
import logging
import os
import re
import time
import uuid
from pathlib import Path
from typing import Any, NamedTuple, Self

from trainyard.core.errors import DirectoryInUse, NotWritable, UserError, is_not_writable, one_line

IDENTITY_FILE = "run.json"
LOCK_FILE = ".lock"
LOCKED = (errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES)
"""Errors of flock for a file that another process has locked."""
LOCK_WAIT_S = 0.2
"""Seconds to wait for a lock: `is_training` takes it for an instant."""
logger = logging.getLogger(__name__)


class RunIdentity(NamedTuple):
    """The content of run.json."""

    name: str
    """log.name of the run."""
    run_id: str
    """Unique to a start of a run."""


class RunDirectory:
    """A run directory and its identity. The process that opened it holds its lock until `close`."""

    def __init__(self, path: Path, run_id: str, lock: int | None = None) -> None:
        """`lock` is an open file whose lock this process holds."""
        self.path, self.run_id = path, run_id
        self._locks = [] if lock is None else [lock]

    @classmethod
    def create(cls, parent: Path, name: str, run_id: str | None = None) -> Self:
        """Create NAME, or NAME-2, NAME-3, ... if it exists. Never touches an old run. `run_id`: of a run that continues
        there because its directory is lost."""
        number = 1
        while True:
            path = parent / (name if number == 1 else f"{name}-{number}")
            try:
                path.mkdir(parents=True)
            except FileExistsError:
                number += 1
            except OSError as error:
                raise UserError(f"log.directory={parent}: cannot be written: {error.strerror}") from None
            else:
                return cls(path, *_write_identity(path, name, run_id))

    @classmethod
    def open(cls, path: Path, name: str) -> Self:
        """Open an existing directory of the run `name` and lock it."""
        identity = read_identity(path)
        if not identity:
            return cls(path, *_write_identity(path, name))
        try:
            handle = os.open(path / IDENTITY_FILE, os.O_RDWR)
        except OSError as error:
            kind = NotWritable if error.errno == errno.EROFS else UserError
            raise kind(f"{path / IDENTITY_FILE}: {error.strerror}") from None
        _lock_file(handle, path)
        return cls(path, identity.run_id, handle)

    def lock_checkpoints(self, directory: Path) -> None:
        """Also lock a directory outside the run directory, which another run may name too."""
        try:
            directory.mkdir(parents=True, exist_ok=True)
            # Opened for reading: a file that is open for writing keeps the file system from becoming read-only.
            handle = os.open(directory / LOCK_FILE, os.O_RDONLY | os.O_CREAT, 0o644)
            if not _can_lock(handle):  # NFS locks only files that are open for writing
                os.close(handle)
                handle = os.open(directory / LOCK_FILE, os.O_RDWR)
        except OSError as error:
            raise UserError(f"checkpoint.directory={directory}: cannot be written: {error.strerror}") from None
        _lock_file(handle, directory, "checkpoint.directory")
        self._locks.append(handle)

    def discard(self) -> None:
        """Remove a new directory, which holds nothing yet but its identity, and release the locks."""
        (self.path / IDENTITY_FILE).unlink()
        self.path.rmdir()
        self.close()

    def close(self) -> None:
        """Release the locks."""
        for lock in self._locks:
            fcntl.flock(lock, fcntl.LOCK_UN)  # also if a forked process still has the file open
            os.close(lock)
        self._locks.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        """Release the locks. An error that a full disk causes names the directory: writing a file, unlike opening one,
        does not name it."""
        self.close()
        if isinstance(error, OSError) and is_not_writable(error) and not error.filename:
            error.filename = str(self.path)

    def __del__(self) -> None:
        for lock in self._locks:
            os.close(lock)

    def __reduce__(self) -> Any:
        return type(self), (self.path, self.run_id)  # another rank gets no lock


def find_run_directories(parent: Path, name: str) -> list[Path]:
    """The existing directories of the run `name`, latest first. A directory of another run whose name looks like NAME-2
    is not one of them."""
    pattern = re.compile(rf"{re.escape(name)}(?:-(\d+))?")
    matches = [(pattern.fullmatch(path.name), path) for path in parent.glob(f"{name}*") if path.is_dir()]
    numbered = sorted(((int(match[1] or 1), path) for match, path in matches if match), reverse=True)
    identities = {path: identity for _, path in numbered if (identity := read_identity(path)) and identity.name == name}
    by_id: dict[str, Path] = {}
    for path, identity in identities.items():
        if identity.run_id in by_id:
            raise UserError(
                f"{by_id[identity.run_id]} and {path}: one is a copy of the other, their {IDENTITY_FILE} is the same; "
                f"nearest: checkpoint.resume={path}"
            )
        by_id[identity.run_id] = path
    return list(identities)


def read_identity(path: Path) -> RunIdentity | None:
    """The identity of the run in a directory; None if it is not a run directory."""
    try:
        identity = json.loads((path / IDENTITY_FILE).read_text(encoding="utf-8"))
        return RunIdentity(str(identity["name"]), str(identity["id"]))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise UserError(f"{path / IDENTITY_FILE}: not the identity of a run: {one_line(error)}") from None


def is_training(path: Path) -> bool:
    """True if a process of this host, or of another one that shares locks, trains in the run directory `path`."""
    try:
        handle = os.open(path / IDENTITY_FILE, os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno in LOCKED
    finally:
        os.close(handle)
    return False


def _lock_file(handle: int, directory: Path, key: str = "log.name") -> None:
    """Lock an open file, or close it and raise UserError if another process has locked it. `key` chooses the
    directory."""
    deadline = time.monotonic() + LOCK_WAIT_S
    try:
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except OSError as error:
                if error.errno not in LOCKED or time.monotonic() > deadline:
                    raise
            time.sleep(0.01)
    except OSError as error:
        if error.errno in LOCKED:
            os.close(handle)
            raise DirectoryInUse(
                f"{directory}: another process is training in this directory; wait for it, or choose another {key}"
            ) from None
        logger.warning("%s: cannot be locked (%s); do not start a second run there", directory, error.strerror)


def _can_lock(handle: int) -> bool:
    """False if the file must be open for writing to be locked."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno != errno.EBADF
    return True


def _write_identity(path: Path, name: str, run_id: str | None = None) -> tuple[str, int]:
    """Write an identity, which is locked from the moment it is visible. Returns its id and the open file."""
    run_id, temporary = run_id or uuid.uuid4().hex, path / f".{IDENTITY_FILE}.part"
    handle = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
    _lock_file(handle, path)
    os.write(handle, json.dumps({"id": run_id, "name": name}).encode())
    os.replace(temporary, path / IDENTITY_FILE)
    return run_id, handle
