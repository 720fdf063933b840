"""Checks of the file system of run directories: space, locks between processes and atomic renames on one host; the same
files and locks on all nodes.

Nodes look files up by name: a listing may be minutes old on NFS, the lookup of a name that was never asked for is not.
"""

import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from trainyard.cluster.doctor.host import MIN_FREE_DISK
from trainyard.cluster.doctor.node_findings import compress_hosts
from trainyard.core.constants import GIB
from trainyard.core.disk_space import free_bytes
from trainyard.core.finding import Finding

LOCK_PROBE = """
import fcntl, sys
with open(sys.argv[1]) as file:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        sys.exit(3)
"""
REFUSED = 3
FIRST, LAST = "first", "last"
"""Files that the first and the last node create."""


def nearest_directory(directory: Path) -> Path:
    """The directory, or the nearest one above it that exists."""
    return next(path for path in (directory.absolute(), *directory.absolute().parents) if path.is_dir())


def file_system_findings(directory: Path) -> Iterator[Finding]:
    """Findings about the directory in which runs are created, or the nearest one that exists."""
    existing = nearest_directory(directory)
    free = free_bytes(existing)
    level, fix = ("ok", "") if free >= MIN_FREE_DISK else ("warning", "remove files, or set log.directory elsewhere")
    yield Finding("disk", level, f"{existing}: {free / GIB:.1f} GiB free", fix)  # type: ignore[arg-type]
    if not os.access(existing, os.W_OK):
        yield Finding(
            "disk", "error", f"{existing}: cannot be written", "set log.directory to a directory that you own"
        )
        return
    try:
        with tempfile.TemporaryDirectory(prefix=".trainyard-doctor-", dir=existing) as temporary:
            yield _check_lock(Path(temporary))
            yield _check_rename(Path(temporary))
    except OSError as error:  # a full disk, or one with a quota
        yield Finding(
            "disk", "error", f"{existing}: cannot be written: {error.strerror}", "remove files, or set log.directory"
        )


def _check_lock(directory: Path) -> Finding:
    path = directory / "lock"
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            text = f"{directory.parent}: locks do not work here ({error.strerror}); two runs could share a directory"
            return Finding("locks", "warning", text, "mount it with locks (Lustre: -o flock), or take care yourself")
        code = subprocess.run([sys.executable, "-c", LOCK_PROBE, str(path)], check=False).returncode
    if code != REFUSED:
        text = f"{directory.parent}: a second process can lock the same file"
        return Finding("locks", "warning", text, "mount it with locks (Lustre: -o flock), or take care yourself")
    return Finding("locks", "ok", f"{directory.parent}: work between processes")


def _check_rename(directory: Path) -> Finding:
    """A directory replaces nothing half-written: rename, and look for it under its new name."""
    source, target = directory / "part", directory / "whole"
    source.mkdir()
    (source / "file").write_text("x")
    source.rename(target)
    if (target / "file").read_text() == "x" and not source.exists():
        return Finding("renames", "ok", f"{directory.parent}: atomic")
    return Finding("renames", "error", f"{directory.parent}: a renamed directory is not complete", "use another disk")


class SharedDirectoryProbe:
    """One node's part in finding out whether nodes share a directory. The first one creates a file and locks it, the
    others look for it, the last one creates another, and the first looks for that."""

    def __init__(self) -> None:
        self.path: Path | None = None
        self.locked: IO[str] | None = None

    def create(self, directory: str) -> str:
        """On the first node. Returns the temporary directory; raises OSError if it cannot be created."""
        parent = nearest_directory(Path(directory))
        self.path = Path(tempfile.mkdtemp(prefix=".trainyard-doctor-", dir=parent))
        self.locked = (self.path / FIRST).open("w")
        with suppress(OSError):  # the checks of the file system report it
            fcntl.flock(self.locked, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return str(self.path)

    def look(self, path: str, is_last: bool) -> dict[str, bool]:
        """On the other nodes."""
        try:
            if is_last:
                (Path(path) / LAST).touch()
            with (Path(path) / FIRST).open("r+") as file:  # NFS locks files that are open for writing
                return {"seen": True, "refused": _is_refused(file)}
        except OSError:
            return {"seen": False, "refused": False}

    def finish(self) -> dict[str, bool]:
        """On the first node: look for the file of the last one."""
        seen = self.path is not None and (self.path / LAST).exists()
        self.close()
        return {"seen": seen}

    def close(self) -> None:
        if self.locked:
            self.locked.close()
        if self.path:
            shutil.rmtree(self.path, ignore_errors=True)
        self.path = self.locked = None


def _is_refused(file: IO[str]) -> bool:
    """True if another node's lock keeps this one from locking the file."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    fcntl.flock(file, fcntl.LOCK_UN)
    return False


def shared_directory_finding(directory: str, nodes: list[str], looks: dict[str, Any], first_sees_last: bool) -> Finding:
    """What the nodes saw. `looks` has the answers of all nodes but the first."""
    blind = [node for node in nodes[1:] if not looks[node]["seen"]]
    fix = "set log.directory to a file system that all nodes mount (NFS, Lustre, EFS)"
    if blind:
        see = "does not see" if len(blind) == 1 else "do not see"
        text = f"{directory}: {compress_hosts(blind)} {see} a file that {nodes[0]} created"
        return Finding("shared directory", "error", text, fix)
    if not first_sees_last:
        text = f"{directory}: {nodes[0]} does not see a file that {nodes[-1]} created"
        return Finding("shared directory", "error", text, fix)
    granted = [node for node in nodes[1:] if not looks[node]["refused"]]
    if granted:
        text = f"{directory}: {compress_hosts(granted)} can lock a file that {nodes[0]} has locked"
        fix = "mount it with locks (Lustre: -o flock; NFS: without nolock), or start no run twice"
        return Finding("shared directory", "warning", text, fix)
    return Finding("shared directory", "ok", f"{directory}: all nodes see the same files and locks")
