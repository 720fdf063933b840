"""Free space of local disks."""

import shutil
from pathlib import Path

from trainyard.core.errors import UserError
from trainyard.core.quantities import shortage_text


def closest_existing(path: Path) -> Path:
    """The path, or the closest parent of it that exists."""
    return next(parent for parent in (path.absolute(), *path.absolute().parents) if parent.exists())


def free_bytes(path: Path) -> int:
    """Free bytes of the file system that a path is on, or will be."""
    return shutil.disk_usage(closest_existing(path)).free


def check_space(directory: Path, needed: int, what: str | None = None) -> None:
    """Refuse to write more bytes than are free for `directory`. The message names `what`, or the directory."""
    free = free_bytes(directory)
    if needed > free:
        raise UserError(f"{what or directory}: {shortage_text(needed, free)} in {closest_existing(directory)}")
