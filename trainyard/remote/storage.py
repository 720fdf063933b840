"""Storage of checkpoints: a local directory, or any fsspec URL (s3://, memory://, file://).

Both have the same operations, so that saving and resuming do not depend on the kind of storage. A file gets its final
name only when complete and, if local, after fsync. Object stores guarantee the same themselves.
"""

import errno
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from trainyard.core.atomic_files import atomic_file, fsync_directory
from trainyard.core.disk_space import free_bytes
from trainyard.core.errors import UserError, one_line
from trainyard.remote.object_store import ObjectStore, translate_error
from trainyard.remote.sources.retry import SourceUnavailable

OBJECT_STORES = ("s3", "s3a", "gs", "gcs", "abfs", "abfss", "az")
"""Protocols of object stores: a file becomes visible when it is closed, and directories are only name prefixes."""


class LocalStorage:
    """A directory of files and of subdirectories. FsspecStorage has the same methods."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __str__(self) -> str:
        return str(self.path)

    def __truediv__(self, name: str) -> "LocalStorage":
        return LocalStorage(self.path / name)

    def mkdir(self) -> None:
        """Create the directory and its parents if needed."""
        if not self.path.is_dir():
            self.path.mkdir(parents=True, exist_ok=True)
            fsync_directory(self.path.parent)

    def listdir(self) -> list[str]:
        """Names of files and subdirectories, sorted; empty if the directory does not exist."""
        try:
            return sorted(os.listdir(self.path))
        except (FileNotFoundError, NotADirectoryError):
            return []

    def file_size(self, name: str) -> int | None:
        """Size of a file in bytes; None if there is no such file."""
        try:
            status = (self.path / name).stat()
        except OSError:
            return None
        return status.st_size if stat.S_ISREG(status.st_mode) else None

    def write(self, name: str) -> AbstractContextManager[BinaryIO]:
        """Yield a file to write. It gets its name only if the block succeeds."""
        return atomic_file(self.path / name)

    @contextmanager
    def open(self, name: str) -> Iterator["RandomAccessFile"]:
        with (self.path / name).open("rb", buffering=0) as file:
            yield _LocalFile(file.fileno())

    def remove(self, name: str) -> None:
        """Remove a file or directory if it exists."""
        path = self.path / name
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)

    def free_bytes(self) -> int | None:
        """Free space in bytes; None if unknown."""
        return free_bytes(self.path)


class _LocalFile:
    """A file that is read by byte range. Raises EOFError if the range exceeds the file."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.size = os.fstat(fd).st_size

    def read(self, start: int, stop: int) -> memoryview:
        out = memoryview(bytearray(stop - start))
        self._read_into(out, start)
        return out

    def read_strided(self, start: int, width: int, stride: int, count: int) -> memoryview:
        """Read `count` ranges of `width` bytes; they start at `start`, `start + stride` and so on."""
        out = memoryview(bytearray(width * count))
        for i in range(count):
            self._read_into(out[i * width : (i + 1) * width], start + i * stride)
        return out

    def _read_into(self, out: memoryview, start: int) -> None:
        done = 0
        while done < len(out):
            count = os.preadv(self.fd, [out[done:]], start + done)
            if not count:
                raise EOFError
            done += count


class FsspecStorage:
    def __init__(self, store: ObjectStore, path: str, url: str) -> None:
        self.store, self.path, self.url = store, path, url
        self.filesystem, self.is_object_store = store.filesystem, store.protocol in OBJECT_STORES

    def __str__(self) -> str:
        return self.url

    def __truediv__(self, name: str) -> "FsspecStorage":
        return FsspecStorage(self.store, f"{self.path}/{name}", f"{self.url}/{name}")

    def mkdir(self) -> None:
        if not self.is_object_store:  # there, it could only create a bucket
            self.filesystem.makedirs(self.path, exist_ok=True)

    def listdir(self) -> list[str]:
        self.filesystem.invalidate_cache()
        try:
            with _storage_errors(self.url):
                paths = [path.strip("/") for path in self.filesystem.ls(self.path, detail=False)]
        except FileNotFoundError:
            return []
        return sorted(path.rsplit("/", 1)[-1] for path in paths if path != self.path.strip("/"))  # ls of a file: itself

    def file_size(self, name: str) -> int | None:
        with _storage_errors(f"{self.url}/{name}"):
            info = self.store.info(f"{self.path}/{name}")
        return int(info["size"] or 0) if info and info["type"] == "file" else None

    @contextmanager
    def write(self, name: str) -> Iterator[BinaryIO]:
        final = f"{self.path}/{name}"
        path = final if self.is_object_store else f"{self.path}/.{name}.part"
        file = self.filesystem.open(path, "wb")
        try:
            yield file
        except BaseException:
            with suppress(Exception):  # the first error is the one to report
                if self.is_object_store:
                    file.closed = True  # close() would store the partial content under the final name
                    file.discard()
                else:
                    file.close()
                    self.filesystem.rm(path)
            raise
        file.close()
        if path != final:
            self.filesystem.mv(path, final)

    @contextmanager
    def open(self, name: str) -> Iterator["RandomAccessFile"]:
        if (size := self.file_size(name)) is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), f"{self.url}/{name}")
        yield _RemoteFile(self.filesystem, f"{self.path}/{name}", f"{self.url}/{name}", size)

    def remove(self, name: str) -> None:
        with suppress(FileNotFoundError):
            self.filesystem.rm(f"{self.path}/{name}", recursive=True)

    def free_bytes(self) -> int | None:
        return None


class _RemoteFile:
    def __init__(self, filesystem: Any, path: str, url: str, size: int) -> None:
        self.filesystem, self.path, self.url, self.size = filesystem, path, url, size

    def read(self, start: int, stop: int) -> memoryview:
        if start == stop:
            return memoryview(bytearray())
        if stop > self.size:
            raise EOFError
        with _storage_errors(self.url):
            data = self.filesystem.cat_file(self.path, start=start, end=stop)
        if len(data) != stop - start:
            raise EOFError
        return memoryview(bytearray(data))

    def read_strided(self, start: int, width: int, stride: int, count: int) -> memoryview:
        """Read everything in one request: requests cost more than the bytes between the ranges."""
        data = self.read(start, start + (count - 1) * stride + width)
        return memoryview(bytearray(b"".join(data[i * stride : i * stride + width] for i in range(count))))


Storage = LocalStorage | FsspecStorage
RandomAccessFile = _LocalFile | _RemoteFile


def open_storage(location: str | Path) -> Storage:
    text = str(location)
    if "://" not in text:
        return LocalStorage(Path(text).expanduser())
    if text.startswith("file://"):
        return LocalStorage(Path(text.removeprefix("file://")))
    store = ObjectStore(text)
    return FsspecStorage(store, store.path, text.rstrip("/"))


@contextmanager
def _storage_errors(location: str) -> Iterator[None]:
    """Turn the errors of any storage library, other than FileNotFoundError, into a one-line SourceUnavailable."""
    try:
        yield
    except FileNotFoundError:
        raise
    except Exception as error:
        raise SourceUnavailable(str(translate_error(error, location, {}))) from None


def resolve_new_directory(path: Path) -> Path:
    """The absolute path of a directory for a new checkpoint. It must be empty or absent, and its parent writable."""
    if path.parts and path.parts[0].endswith(":"):  # Path turns s3://bucket into s3:/bucket
        raise UserError(f"{path}: expected a local directory, not a URL")
    try:
        directory = path.expanduser().resolve()
        if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
            raise UserError(f"{path}: already exists and is not empty; choose a new directory")
        directory.parent.mkdir(parents=True, exist_ok=True)
        os.rmdir(tempfile.mkdtemp(dir=directory.parent))
    except (OSError, RuntimeError) as error:
        raise UserError(f"{path}: cannot be created: {one_line(error)}") from None
    return directory
