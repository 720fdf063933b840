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

from trainyard.core.atomic_files import sync_directory, whole_file
from trainyard.core.errors import UserError, one_line

STORES = ("s3", "s3a", "gs", "gcs", "abfs", "abfss", "az")
"""Object stores: a file is there, whole, when it was closed well; directories are but beginnings of names."""
EXTRAS = {"s3": "s3", "s3a": "s3"}
"""What to install with trainyard for a URL of this kind."""


class Unreachable(UserError):
    """A store that gave no answer, or would not."""


class Readable(Protocol):
    """Bytes of a file, by place. EOFError where it ends too early."""

    size: int

    def read(self, start: int, stop: int) -> memoryview: ...

    def strips(self, start: int, width: int, apart: int, count: int) -> memoryview:
        """`count` times `width` bytes, the first at `start`, `apart` bytes from one to the next."""
        ...


class Place(Protocol):
    """A directory of files, and of directories one level down; names use `/`."""

    def __str__(self) -> str: ...

    def __truediv__(self, name: str) -> "Place": ...

    def prepare(self) -> None:
        """Make the directory."""
        ...

    def names(self) -> list[str]:
        """What it holds; nothing where it does not exist."""
        ...

    def size(self, name: str) -> int | None:
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

    def free(self) -> int | None:
        """Bytes that can still be written; None where that cannot be known."""
        ...


def open_place(where: str | Path) -> Place:
    text = str(where)
    if "://" not in text:
        return LocalPlace(Path(text).expanduser())
    if text.startswith("file://"):
        return LocalPlace(Path(text.removeprefix("file://")))
    import fsspec

    kind = text.partition("://")[0]
    try:
        system, path = fsspec.core.url_to_fs(text)
    except ImportError as error:
        extra = f"pip install 'trainyard[{EXTRAS[kind]}]'" if kind in EXTRAS else one_line(error)
        raise UserError(f"{text}: {kind}:// needs a package that is not installed: {extra}") from None
    except ValueError as error:
        raise UserError(f"{text}: {one_line(error)}") from None
    return RemotePlace(system, path.rstrip("/"), text.rstrip("/"), kind in STORES)


class LocalPlace:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __str__(self) -> str:
        return str(self.path)

    def __truediv__(self, name: str) -> "LocalPlace":
        return LocalPlace(self.path / name)

    def prepare(self) -> None:
        if not self.path.is_dir():
            self.path.mkdir(parents=True, exist_ok=True)
            sync_directory(self.path.parent)

    def names(self) -> list[str]:
        try:
            return sorted(os.listdir(self.path))
        except (FileNotFoundError, NotADirectoryError):
            return []

    def size(self, name: str) -> int | None:
        try:
            found = (self.path / name).stat()
        except OSError:
            return None
        return found.st_size if stat.S_ISREG(found.st_mode) else None

    @contextmanager
    def write(self, name: str) -> Iterator[BinaryIO]:
        with whole_file(self.path / name) as file:
            yield file

    @contextmanager
    def open(self, name: str) -> Iterator[Readable]:
        with (self.path / name).open("rb", buffering=0) as file:
            yield _LocalFile(file.fileno())

    def remove(self, name: str) -> None:
        path = self.path / name
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)

    def free(self) -> int | None:
        here = self.path
        while not here.exists():
            here = here.parent
        return shutil.disk_usage(here).free


class _LocalFile:
    def __init__(self, handle: int) -> None:
        self.handle = handle
        self.size = os.fstat(handle).st_size

    def read(self, start: int, stop: int) -> memoryview:
        out = memoryview(bytearray(stop - start))
        self._into(out, start)
        return out

    def strips(self, start: int, width: int, apart: int, count: int) -> memoryview:
        out = memoryview(bytearray(width * count))
        for number in range(count):
            self._into(out[number * width : (number + 1) * width], start + number * apart)
        return out

    def _into(self, out: memoryview, start: int) -> None:
        done = 0
        while done < len(out):
            count = os.preadv(self.handle, [out[done:]], start + done)
            if not count:
                raise EOFError
            done += count


class RemotePlace:
    def __init__(self, system: Any, path: str, url: str, store: bool) -> None:
        self.system, self.path, self.url, self.store = system, path, url, store

    def __str__(self) -> str:
        return self.url

    def __truediv__(self, name: str) -> "RemotePlace":
        return RemotePlace(self.system, f"{self.path}/{name}", f"{self.url}/{name}", self.store)

    def prepare(self) -> None:
        if not self.store:  # there it could only make a bucket, which nobody asked for
            self.system.makedirs(self.path, exist_ok=True)

    def names(self) -> list[str]:
        self.system.invalidate_cache()
        try:
            with _asking(self.url):
                found = self.system.ls(self.path, detail=False)
        except FileNotFoundError:
            return []
        inside = [each.strip("/") for each in found if each.strip("/") != self.path.strip("/")]  # not itself, a file
        return sorted(each.rsplit("/", 1)[-1] for each in inside)

    def size(self, name: str) -> int | None:
        self.system.invalidate_cache()
        try:
            with _asking(f"{self.url}/{name}"):
                found = self.system.info(f"{self.path}/{name}")
        except FileNotFoundError:
            return None
        return int(found["size"] or 0) if found["type"] == "file" else None

    @contextmanager
    def write(self, name: str) -> Iterator[BinaryIO]:
        final = f"{self.path}/{name}"
        path = final if self.store else f"{self.path}/.{name}.part"
        file = self.system.open(path, "wb")
        try:
            yield file
        except BaseException:
            with suppress(Exception):  # what went wrong first is what counts
                if self.store:
                    file.closed = True  # closing would put what there is under the final name
                    file.discard()
                else:
                    file.close()
                    self.system.rm(path)
            raise
        file.close()
        if path != final:
            self.system.mv(path, final)

    @contextmanager
    def open(self, name: str) -> Iterator[Readable]:
        if (size := self.size(name)) is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), f"{self.url}/{name}")
        yield _RemoteFile(self.system, f"{self.path}/{name}", f"{self.url}/{name}", size)

    def remove(self, name: str) -> None:
        try:
            self.system.rm(f"{self.path}/{name}", recursive=True)
        except FileNotFoundError:
            return

    def free(self) -> int | None:
        return None


class _RemoteFile:
    def __init__(self, system: Any, path: str, url: str, size: int) -> None:
        self.system, self.path, self.url, self.size = system, path, url, size

    def read(self, start: int, stop: int) -> memoryview:
        if start == stop:
            return memoryview(bytearray())
        if stop > self.size:
            raise EOFError
        with _asking(self.url):
            data = self.system.cat_file(self.path, start=start, end=stop)
        if len(data) != stop - start:
            raise EOFError
        return memoryview(bytearray(data))

    def strips(self, start: int, width: int, apart: int, count: int) -> memoryview:
        """In one request: each costs more than the bytes between the strips."""
        between = self.read(start, start + (count - 1) * apart + width)
        strips = (between[number * apart : number * apart + width] for number in range(count))
        return memoryview(bytearray(b"".join(strips)))


@contextmanager
def _asking(where: str) -> Iterator[None]:
    """A store's trouble as one line, whichever library tells it. That there is no such file is an answer."""
    try:
        yield
    except FileNotFoundError:
        raise
    except Exception as error:
        raise Unreachable(f"{where}: {type(error).__name__}: {one_line(error)}") from None


def new_directory(given: Path) -> Path:
    """Where a checkpoint can be put: there is nothing yet, but a place for it."""
    if given.parts and given.parts[0].endswith(":"):  # what a Path leaves of a URL
        raise UserError(f"{given}: a directory of this machine was expected, not a URL")
    try:
        directory = given.expanduser().resolve()
        if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
            raise UserError(f"{given}: is there already and not empty; give a directory that is new")
        directory.parent.mkdir(parents=True, exist_ok=True)
        os.rmdir(tempfile.mkdtemp(dir=directory.parent))
    except (OSError, RuntimeError) as error:
        raise UserError(f"{given}: cannot be made: {one_line(error)}") from None
    return directory
