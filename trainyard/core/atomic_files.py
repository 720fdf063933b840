"""Files and directories that are either whole or not there: nothing half-written under a final name."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


@contextmanager
def atomic_file(path: Path) -> Iterator[BinaryIO]:
    """A file that gets its name when the block ends well, safe on disk; when it does not, nothing is left."""
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


def atomic_write_text(path: Path, text: str) -> None:
    """Write `text` to `path` in one rename, so that a reader or a crash never sees a part of it."""
    with atomic_file(path) as file:
        file.write(text.encode())


@contextmanager
def atomic_directory(path: Path) -> Iterator[Path]:
    """A directory that takes the place of `path` when the block ends well; when it does not, nothing is left. Its files
    are for the block to make safe."""
    path = path.absolute()
    part = path.with_name(f".{path.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    try:
        yield part
        fsync_directory(part)
        shutil.rmtree(path, ignore_errors=True)
        part.rename(path)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise
    fsync_directory(path.parent)


def fsync_directory(path: Path) -> None:
    """Make the names in a directory safe on disk too."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
