"""Where checkpoints live: a local directory, or whatever an fsspec URL names (s3://, memory://, file://).

One set of operations for both, so that saving and resuming know no difference. A file gets its name when it is whole,
and a local one safe on disk too; object stores do the same by themselves.
"""

import errno
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from trainyard.core.atomic_files import atomic_file, fsync_directory
from trainyard.core.errors import UserError, one_line

OBJECT_STORES = ("s3", "s3a", "gs", "gcs", "abfs", "abfss", "az")
"""Object stores: a file is there, whole, when it was closed well; directories are but beginnings of names."""
PIP_EXTRAS = {"s3": "s3", "s3a": "s3"}
"""What to install with trainyard for a URL of this kind."""


class StorageUnavailable(UserError):
    """A store that gave no answer, or would not."""


class RandomAccessFile(Protocol):
    """Bytes of a file, by place. EOFError where it ends too early."""

    size: int

    def read(self, start: int, stop: int) -> memoryview: ...

    def read_strided(self, start: int, width: int, stride: int, count: int) -> memoryview:
        """`count` times `width` bytes, the first at `start`, `apart` bytes from one to the next."""
        ...


class Storage(Protocol):
    """A directory of files, and of directories one level down; names use `/`."""

    def __str__(self) -> str: ...

    def __truediv__(self, name: str) -> "Storage": ...

    def mkdir(self) -> None:
        """Make the directory."""
        ...

    def listdir(self) -> list[str]:
        """What it holds; nothing where it does not exist."""
        ...

    def file_size(self, name: str) -> int | None:
        """Bytes of a file; None where there is none."""
        ...

    def write(self, name: str) -> Any:
        """A context that gives a file to write to; it is there, whole, when the context ends well."""
        ...

    def open(self, name: str) -> Any:
        """A context that gives a Readable."""
        ...

    def remove(self, name: str) -> None:
        """A file or a directory; nothing happens where there is none."""
        ...

    def free_bytes(self) -> int | None:
        """Bytes that can still be written; None where that cannot be known."""
        ...


def open_storage(location: str | Path) -> Storage:
    text = str(location)
    if "://" not in text:
        return LocalStorage(Path(text).expanduser())
    if text.startswith("file://"):
        return LocalStorage(Path(text.removeprefix("file://")))
    import fsspec

    kind = text.partition("://")[0]
    try:
        system, path = fsspec.core.url_to_fs(text)
    except ImportError as error:
        extra = f"pip install 'trainyard[{PIP_EXTRAS[kind]}]'" if kind in PIP_EXTRAS else one_line(error)
        raise UserError(f"{text}: {kind}:// needs a package that is not installed: {extra}") from None
    except ValueError as error:
        raise UserError(f"{text}: {one_line(error)}") from None
    return FsspecStorage(system, path.rstrip("/"), text.rstrip("/"), kind in OBJECT_STORES)


class LocalStorage:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __str__(self) -> str:
        return str(self.path)

    def __truediv__(self, name: str) -> "LocalStorage":
        return LocalStorage(self.path / name)

    def mkdir(self) -> None:
        if not self.path.is_dir():
            self.path.mkdir(parents=True, exist_ok=True)
            fsync_directory(self.path.parent)

    def listdir(self) -> list[str]:
        try:
            return sorted(os.listdir(self.path))
        except (FileNotFoundError, NotADirectoryError):
            return []

    def file_size(self, name: str) -> int | None:
        try:
            found = (self.path / name).stat()
        except OSError:
            return None
        return found.st_size if stat.S_ISREG(found.st_mode) else None

    @contextmanager
    def write(self, name: str) -> Iterator[BinaryIO]:
        with atomic_file(self.path / name) as file:
            yield file

    @contextmanager
    def open(self, name: str) -> Iterator[RandomAccessFile]:
        with (self.path / name).open("rb", buffering=0) as file:
            yield _LocalFile(file.fileno())

    def remove(self, name: str) -> None:
        path = self.path / name
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)

    def free_bytes(self) -> int | None:
        here = self.path
        while not here.exists():
            here = here.parent
        return shutil.disk_usage(here).free


class _LocalFile:
    def __init__(self, handle: int) -> None:
        self.fd = handle
        self.size = os.fstat(handle).st_size

    def read(self, start: int, stop: int) -> memoryview:
        out = memoryview(bytearray(stop - start))
        self._read_into(out, start)
        return out

    def read_strided(self, start: int, width: int, stride: int, count: int) -> memoryview:
        out = memoryview(bytearray(width * count))
        for number in range(count):
            self._read_into(out[number * width : (number + 1) * width], start + number * stride)
        return out

    def _read_into(self, out: memoryview, start: int) -> None:
        done = 0
        while done < len(out):
            count = os.preadv(self.fd, [out[done:]], start + done)
            if not count:
                raise EOFError
            done += count


class FsspecStorage:
    def __init__(self, filesystem: Any, path: str, url: str, is_object_store: bool) -> None:
        self.filesystem, self.path, self.url, self.is_object_store = filesystem, path, url, is_object_store

    def __str__(self) -> str:
        return self.url

    def __truediv__(self, name: str) -> "FsspecStorage":
        return FsspecStorage(self.filesystem, f"{self.path}/{name}", f"{self.url}/{name}", self.is_object_store)

    def mkdir(self) -> None:
        if not self.is_object_store:  # there it could only make a bucket, which nobody asked for
            self.filesystem.makedirs(self.path, exist_ok=True)

    def listdir(self) -> list[str]:
        self.filesystem.invalidate_cache()
        try:
            with _storage_errors(self.url):
                found = self.filesystem.ls(self.path, detail=False)
        except FileNotFoundError:
            return []
        inside = [each.strip("/") for each in found if each.strip("/") != self.path.strip("/")]  # not itself, a file
        return sorted(each.rsplit("/", 1)[-1] for each in inside)

    def file_size(self, name: str) -> int | None:
        self.filesystem.invalidate_cache()
        try:
            with _storage_errors(f"{self.url}/{name}"):
                found = self.filesystem.info(f"{self.path}/{name}")
        except FileNotFoundError:
            return None
        return int(found["size"] or 0) if found["type"] == "file" else None

    @contextmanager
    def write(self, name: str) -> Iterator[BinaryIO]:
        final = f"{self.path}/{name}"
        path = final if self.is_object_store else f"{self.path}/.{name}.part"
        file = self.filesystem.open(path, "wb")
        try:
            yield file
        except BaseException:
            with suppress(Exception):  # what went wrong first is what counts
                if self.is_object_store:
                    file.closed = True  # closing would put what there is under the final name
                    file.discard()
                else:
                    file.close()
                    self.filesystem.rm(path)
            raise
        file.close()
        if path != final:
            self.filesystem.mv(path, final)

    @contextmanager
    def open(self, name: str) -> Iterator[RandomAccessFile]:
        if (size := self.file_size(name)) is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), f"{self.url}/{name}")
        yield _RemoteFile(self.filesystem, f"{self.path}/{name}", f"{self.url}/{name}", size)

    def remove(self, name: str) -> None:
        try:
            self.filesystem.rm(f"{self.path}/{name}", recursive=True)
        except FileNotFoundError:
            return

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
        """In one request: each costs more than the bytes between the strips."""
        between = self.read(start, start + (count - 1) * stride + width)
        strips = (between[number * stride : number * stride + width] for number in range(count))
        return memoryview(bytearray(b"".join(strips)))


@contextmanager
def _storage_errors(location: str) -> Iterator[None]:
    """A store's trouble as one line, whichever library tells it. That there is no such file is an answer."""
    try:
        yield
    except FileNotFoundError:
        raise
    except Exception as error:
        raise StorageUnavailable(f"{location}: {type(error).__name__}: {one_line(error)}") from None


def resolve_new_directory(path: Path) -> Path:
    """Where a checkpoint can be put: there is nothing yet, but a place for it."""
    if path.parts and path.parts[0].endswith(":"):  # what a Path leaves of a URL
        raise UserError(f"{path}: a directory of this machine was expected, not a URL")
    try:
        directory = path.expanduser().resolve()
        if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
            raise UserError(f"{path}: is there already and not empty; give a directory that is new")
        directory.parent.mkdir(parents=True, exist_ok=True)
        os.rmdir(tempfile.mkdtemp(dir=directory.parent))
    except (OSError, RuntimeError) as error:
        raise UserError(f"{path}: cannot be made: {one_line(error)}") from None
    return directory
