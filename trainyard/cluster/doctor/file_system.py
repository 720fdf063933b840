"""Checks of the file system of run directories: space, locks between processes, and atomic renames."""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from trainyard.cluster.doctor.host import MIN_FREE_DISK
from trainyard.core.constants import GIB
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


def nearest_directory(directory: Path) -> Path:
    """The directory, or the nearest one above it that exists."""
    return next(path for path in (directory.absolute(), *directory.absolute().parents) if path.is_dir())


def file_system_findings(directory: Path) -> Iterator[Finding]:
    """Findings about the directory in which runs are created, or the nearest one that exists."""
    existing = nearest_directory(directory)
    free = shutil.disk_usage(existing).free
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
    import fcntl

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
