"""Opens files below a directory of runs, and nothing outside of it.

Every component of a path is opened relative to the one before and must not be a symbolic link, so neither `..`, nor an
absolute path, nor a link that somebody places there while it is read leads out of the directory.
"""

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, NamedTuple

from trainyard.core.errors import UserError
from trainyard.metrics.json_lines import JsonLines, read_open_file

DIRECTORY_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
FILE_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # a named pipe must not block


class FileState(NamedTuple):
    """What changes when a file changes."""

    inode: int
    size: int
    modified: float
    """Unix seconds."""


class RunDirectoryReader:
    """The files of one run, read-only."""

    def __init__(self, root: Path, name: str) -> None:
        """`root` is the directory of runs. Raises UserError if `name` is not one of its subdirectories."""
        self.root, self.name, self.path = root, name, root / name
        if not is_plain_name(name):
            raise UserError("not the name of a run")
        try:
            with self._directory(()):
                pass
        except OSError:
            raise UserError(f"{name}: no such run") from None

    @contextmanager
    def _directory(self, parts: tuple[str, ...]) -> Iterator[int]:
        """An open directory of the run. Raises OSError if there is none."""
        handle = os.open(self.root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            for part in (self.name, *parts):
                if not is_plain_name(part):
                    raise FileNotFoundError(part)
                inner = os.open(part, DIRECTORY_FLAGS, dir_fd=handle)
                os.close(handle)
                handle = inner
            yield handle
        finally:
            os.close(handle)

    @contextmanager
    def open(self, *parts: str) -> Iterator[BinaryIO]:
        """An open regular file of the run. Raises OSError if there is none."""
        *above, name = parts
        if not is_plain_name(name):
            raise FileNotFoundError(name)
        with self._directory(tuple(above)) as directory:
            handle = os.open(name, FILE_FLAGS, dir_fd=directory)
        with os.fdopen(handle, "rb") as file:
            if not stat.S_ISREG(os.fstat(handle).st_mode):
                raise FileNotFoundError(name)
            yield file

    def state(self, *parts: str) -> FileState | None:
        """The state of a regular file; None if there is none."""
        *above, name = parts
        try:
            with self._directory(tuple(above)) as directory:
                found = os.stat(name, dir_fd=directory, follow_symlinks=False)
        except (OSError, ValueError):
            return None
        return FileState(found.st_ino, found.st_size, found.st_mtime) if stat.S_ISREG(found.st_mode) else None

    def list(self, *parts: str) -> tuple[list[str], list[str]]:
        """The names of regular files and of directories, sorted; none if there is no such directory."""
        files, directories = [], []
        try:
            with self._directory(parts) as directory, os.scandir(directory) as entries:
                for entry in entries:
                    if entry.is_file(follow_symlinks=False):
                        files.append(entry.name)
                    elif entry.is_dir(follow_symlinks=False):
                        directories.append(entry.name)
        except (OSError, ValueError):
            return [], []
        return sorted(filter(is_plain_name, files)), sorted(filter(is_plain_name, directories))

    def read_head(self, size: int, *parts: str) -> bytes:
        """The first bytes of a file; none if there is no such file."""
        try:
            with self.open(*parts) as file:
                return file.read(size)
        except (OSError, ValueError):
            return b""

    def read_tail(self, size: int, *parts: str) -> bytes:
        """The last bytes of a file, from the start of a line on; none if there is no such file."""
        try:
            with self.open(*parts) as file:
                start = max(file.seek(0, os.SEEK_END) - size, 0)
                file.seek(start)
                content = file.read(size)
        except (OSError, ValueError):
            return b""
        return content.partition(b"\n")[2] if start else content

    def read_json_lines(self, *parts: str, offset: int = 0, max_bytes: int | None = None) -> JsonLines:
        """As `trainyard.metrics.json_lines.read_json_lines`."""
        try:
            with self.open(*parts) as file:
                return read_open_file(file, offset, max_bytes)
        except (OSError, ValueError):
            return JsonLines([], 0)


def is_plain_name(name: str) -> bool:
    """True for a name of a file or directory that is not hidden and has no path separator."""
    if not name or name.startswith(".") or "/" in name or "\0" in name:
        return False
    return name.isprintable()
