"""Chunks of remote objects in a directory of bounded size, one copy for all processes of a host.

A chunk is a file named by what it holds: URL, version, size and byte range of an object. It is written under a
temporary name and renamed, ends with a checksum, and is mapped into memory by its readers. One process produces a
chunk, by a lock, and the others wait for its file. If the directory would exceed its bound, or the disk become full,
the chunks that were used longest ago are removed; a mapped one stays readable until its reader drops it.
"""

import hashlib
import logging
import mmap
import os
import shutil
import tempfile
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from trainyard.core.constants import GIB
from trainyard.core.errors import UserError, is_disk_full
from trainyard.core.file_lock import NumberedLocks

logger = logging.getLogger(__name__)

CHECKSUM_BYTES = 4
EVICT_TO = 0.9
"""Fraction of the bound that eviction leaves, so that it is not needed for every chunk."""
FREE_FRACTION = 0.01
"""Fraction of the disk that is left free."""
POLL_S = 0.005
USAGE_LOCK = 0

Bytes = NDArray[np.uint8]


class Chunk(NamedTuple):
    """What a chunk holds, and how it is made."""

    identity: str
    size: int
    produce: Callable[[], bytes | memoryview]

    @property
    def name(self) -> str:
        return hashlib.blake2b(self.identity.encode(), digest_size=16).hexdigest()


class ChunkCache:
    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.max_bytes = 0
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self.locks = NumberedLocks(directory / "locks")
        except OSError as error:
            raise UserError(f"data.cache.directory={directory}: {error.strerror}") from None
        self.usage_path = directory / "usage"
        """Bytes of all chunks, at least. Corrected whenever chunks are evicted."""
        self.usage_mutex = threading.Lock()
        self.in_production: set[str] = set()
        self.produced = threading.Condition()

    def get(self, chunk: Chunk) -> Bytes:
        """The content of a chunk, which this process produces unless it is in the directory or being produced."""
        name = chunk.name
        while True:
            if (content := self._open(name, chunk.size)) is not None:
                return content
            with self.produced:
                if name in self.in_production:
                    self.produced.wait(1.0)
                    continue
                self.in_production.add(name)
            try:
                lock = 1 + int(name[:14], 16)
                if not self.locks.acquire(lock):
                    time.sleep(POLL_S)
                    continue
                try:
                    content = self._open(name, chunk.size)  # may have been produced since the first look
                    return self._store(name, chunk.produce()) if content is None else content
                finally:
                    self.locks.release(lock)
            finally:
                with self.produced:
                    self.in_production.remove(name)
                    self.produced.notify_all()

    def contains(self, chunk: Chunk) -> bool:
        return self.path(chunk.name).exists()

    def touch(self, chunk: Chunk) -> bool:
        """Note that a chunk is in use. False if it was evicted."""
        try:
            os.utime(self.path(chunk.name))
        except OSError:
            return False
        return True

    def path(self, name: str) -> Path:
        return self.directory / name[:2] / name

    def _open(self, name: str, size: int) -> Bytes | None:
        path = self.path(name)
        try:
            with path.open("rb") as file:
                content = np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)
        except (OSError, ValueError):  # no such file, or an empty one
            return None
        if len(content) != size + CHECKSUM_BYTES or _checksum(content[:size].data) != content[size:].tobytes():
            logger.warning("%s: damaged; read again from the store", path)
            path.unlink(missing_ok=True)
            return None
        with suppress(OSError):
            os.utime(path)
        return content[:size]

    def _store(self, name: str, content: bytes | memoryview) -> Bytes:
        """Write a chunk. One process writes at a time, so that all together stay below the bound."""
        path, data = self.path(name), memoryview(content)
        for attempt in range(2):
            with self._usage_lock():
                self._make_room(len(data) + CHECKSUM_BYTES, disk_is_full=attempt > 0)
                try:
                    path.parent.mkdir(exist_ok=True)
                    return self._write(path, data)
                except OSError as error:
                    if not is_disk_full(error):
                        raise UserError(f"data.cache.directory={self.directory}: {error.strerror}") from None
        raise self._disk_full()

    def _write(self, path: Path, data: memoryview) -> Bytes:
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".", suffix=".part", delete=False) as file:
            try:
                file.write(data)
                file.write(_checksum(data))
                file.flush()
                mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
                os.replace(file.name, path)
            except BaseException:
                with suppress(OSError):
                    os.unlink(file.name)
                raise
        return np.frombuffer(mapped, np.uint8)[: len(data)]

    def _disk_full(self) -> UserError:
        return UserError(
            f"data.cache.directory={self.directory}: the disk is full; free space, or use another directory"
        )

    def _make_room(self, size: int, disk_is_full: bool) -> None:
        """Count `size` bytes more, and evict chunks if they exceed the bound or what the disk has left."""
        if size > self.max_bytes:
            raise UserError(
                f"data.cache.gib={self.max_bytes / GIB:g}: too small to hold {size / GIB:.2g} GiB at once; nearest: "
                f"{size * 2 / GIB:.2g}"
            )
        usage, limit = self._read_usage(), self.max_bytes
        disk = shutil.disk_usage(self.directory)
        free = 0 if disk_is_full else disk.free - int(disk.total * FREE_FRACTION)
        if usage is None or usage + size > limit or free < size:
            chunks = self._scan()
            usage = sum(chunk_size for _, chunk_size, _ in chunks)
            limit = min(limit, usage + free)
            if limit < size:
                raise self._disk_full()
            goal = min(limit - size, int(limit * EVICT_TO))
            for _, chunk_size, path in chunks if usage + size > limit else []:
                if usage <= goal:
                    break
                path.unlink(missing_ok=True)
                usage -= chunk_size
        with suppress(OSError):  # a full disk: without this file, the next call counts again
            self.usage_path.write_text(str(usage + size))

    @contextmanager
    def _usage_lock(self) -> Iterator[None]:
        with self.usage_mutex:
            while not self.locks.acquire(USAGE_LOCK):
                time.sleep(POLL_S)
            try:
                yield
            finally:
                self.locks.release(USAGE_LOCK)

    def _read_usage(self) -> int | None:
        try:
            return int(self.usage_path.read_text())
        except (OSError, ValueError):
            return None

    def _scan(self) -> list[tuple[int, int, Path]]:
        """Time of last use, size and path of each chunk, oldest first. What killed processes left is the oldest."""
        chunks = []
        for directory in self.directory.iterdir():
            for entry in os.scandir(directory) if directory.is_dir() else ():
                with suppress(OSError):
                    stat = entry.stat()
                    is_partial = entry.name.startswith(".")
                    chunks.append((0 if is_partial else stat.st_mtime_ns, stat.st_size, Path(entry.path)))
        return sorted(chunks)


def _checksum(content: bytes | memoryview) -> bytes:
    return zlib.crc32(content).to_bytes(CHECKSUM_BYTES, "little")


_open_directory = cache(ChunkCache)  # one per process and directory: the locks of two would not exclude each other


def open_cache(directory: Path, max_bytes: int) -> ChunkCache:
    opened = _open_directory(directory.expanduser().absolute())
    opened.max_bytes = max_bytes
    return opened
