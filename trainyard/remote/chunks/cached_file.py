"""Random access to a remote object by byte range, through the cache of chunks."""

import ctypes
import io
import mmap
import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from trainyard.remote.chunks.chunk_cache import Bytes, Chunk, ChunkCache
from trainyard.remote.chunks.chunk_reader import NUM_THREADS, ChunkReader
from trainyard.remote.chunks.object_reader import ObjectReader
from trainyard.remote.object_store import StoredObject

LARGE_CHUNK_BYTES = 8 << 20
"""For objects that fit in the cache together: everything is read once, in few requests."""
SMALL_CHUNK_BYTES = 64 << 10
"""For objects that do not fit: most of a large chunk would be evicted before another sample of it is due."""
MAX_MAPPED_LARGE, MAX_MAPPED_SMALL = 1 << 14, 1 << 8
"""Chunks of an object that a process keeps mapped."""
SEQUENTIAL_AHEAD = 4
"""Chunks that a sequential reader fetches ahead."""
MAP_FIXED = 0x10
"""The same on Linux and macOS; Python's mmap does not take an address."""
ALIGNMENT = 2 << 20
"""Of large files that the kernel maps itself: without it, reads take a few percent longer."""
MAP_FAILED = ctypes.c_void_p(-1).value

Positions = NDArray[np.int64]


class CachedFile:
    """One version of an object. Reads return arrays that stay valid after their chunk is evicted."""

    def __init__(self, store: ObjectReader, stored: StoredObject, cache: ChunkCache, chunk_bytes: int) -> None:
        self.store, self.stored, self.cache, self.chunk_bytes = store, stored, cache, chunk_bytes
        self.name, self.size = stored.url, stored.size
        max_mapped = MAX_MAPPED_LARGE if chunk_bytes == LARGE_CHUNK_BYTES else MAX_MAPPED_SMALL
        self.reader = ChunkReader(cache, chunk_bytes, max_mapped, self._chunk)
        self.num_chunks = -(-stored.size // chunk_bytes)
        self.joined: Bytes | None = None

    def read(self, start: int, stop: int) -> Bytes:
        """Bytes `start` to `stop` (exclusive)."""
        if stop <= start:
            return np.zeros(0, np.uint8)
        if (content := self.content()) is not None:
            return content[start:stop]
        first, last = start // self.chunk_bytes, (stop - 1) // self.chunk_bytes
        chunks = self.chunks(range(first, last + 1))
        if first == last:
            return chunks[first][start - first * self.chunk_bytes : stop - first * self.chunk_bytes]
        joined = np.concatenate([chunks[number] for number in range(first, last + 1)])
        return joined[start - first * self.chunk_bytes : stop - first * self.chunk_bytes]

    def chunks(self, numbers: Iterable[int]) -> dict[int, Bytes]:
        return self.reader.get(numbers)

    def fetch(self, starts: Positions, stops: Positions, wait: bool = False) -> None:
        """Fetch these byte ranges in the background, or now."""
        if self.content() is None:
            (self.reader.get if wait else self.reader.fetch)(self.chunk_numbers(starts, stops))

    def content(self) -> Bytes | None:
        """The object as one array, if this process has mapped all of its chunks and none was evicted since."""
        mapped = self.reader.mapped
        if len(mapped) < self.num_chunks or not mapped or self.chunk_bytes % mmap.PAGESIZE:
            self.joined = None
            return None
        if self.joined is None:
            self._join()
        self.reader.touch_if_due(all_used=True)
        return self.joined

    def _join(self) -> None:
        paths = [self.cache.path(self._chunk(number).name) for number in range(self.num_chunks)]
        content = join_chunks(paths, self.chunk_bytes, self.size)
        with self.reader.mutex:
            if content is not None:
                starts = range(0, self.size, self.chunk_bytes)
                parts = {number: content[start : start + self.chunk_bytes] for number, start in enumerate(starts)}
                self.reader.mapped.update(parts)
            else:
                self.reader.touched_at = 0.0  # a chunk was evicted: find out which
            self.joined = content

    def chunk_numbers(self, starts: Positions, stops: Positions) -> list[int]:
        first, last = starts // self.chunk_bytes, (stops - 1) // self.chunk_bytes
        numbers = dict.fromkeys(first.tolist())
        for position in np.flatnonzero(last != first).tolist():
            numbers.update(dict.fromkeys(range(int(first[position]), int(last[position]) + 1)))
        return list(numbers)

    def local_copy(self) -> Bytes:
        """The whole object as one array, from one file in the cache."""
        if self.size <= self.chunk_bytes:
            return self.read(0, self.size)
        return self.cache.get(Chunk(self.identity("whole"), self.size, self._download))

    def open(self) -> io.BufferedReader:
        return io.BufferedReader(RawReader(self), 1 << 16)

    def identity(self, content: str) -> str:
        """Names something made from this version of the object."""
        return f"{self.stored.url} {self.stored.version} {self.size} {content}"

    def _chunk(self, number: int) -> Chunk:
        start = number * self.chunk_bytes
        stop = min(start + self.chunk_bytes, self.size)
        return Chunk(self.identity(f"{start}-{stop}"), stop - start, partial(self.store.read, self.stored, start, stop))

    def _download(self) -> memoryview:
        content = np.empty(self.size, np.uint8)

        def read(start: int) -> None:
            stop = min(start + LARGE_CHUNK_BYTES, self.size)
            content[start:stop] = np.frombuffer(self.store.read(self.stored, start, stop), np.uint8)

        with ThreadPoolExecutor(NUM_THREADS) as threads:
            list(threads.map(read, range(0, self.size, LARGE_CHUNK_BYTES)))
        return content.data


class RawReader(io.RawIOBase):
    """A file object, for libraries that read one."""

    def __init__(self, file: CachedFile) -> None:
        self.file, self.position = file, 0
        self.name = file.name
        self.last_chunk = -1
        self.last_error: Exception | None = None

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self.position, io.SEEK_END: self.file.size}[whence]
        self.position = base + offset
        return self.position

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        stop = min(self.position + len(buffer), self.file.size)
        try:
            content = self.file.read(self.position, stop)
        except Exception as error:
            self.last_error = error
            raise
        np.frombuffer(buffer, np.uint8)[: len(content)] = content
        self.position += len(content)
        self._fetch_next()
        return len(content)

    def _fetch_next(self) -> None:
        """Fetch the next chunks if the last two reads were of neighbors."""
        chunk, chunk_bytes = self.position // self.file.chunk_bytes, self.file.chunk_bytes
        if chunk == self.last_chunk + 1 > 0:
            stop = min((chunk + 1 + SEQUENTIAL_AHEAD) * chunk_bytes, self.file.size)
            if stop > self.position:
                self.file.fetch(np.array([self.position]), np.array([stop]))
        self.last_chunk = chunk


def join_chunks(paths: Sequence[Path], chunk_bytes: int, size: int) -> Bytes | None:
    """An array of `size` bytes over files of `chunk_bytes` (a multiple of the page size), the last one shorter; None if
    one is gone. The files stay mapped as long as the array or a view of it exists."""
    mmap_at = ctypes.CDLL(None, use_errno=True).mmap
    mmap_at.restype = ctypes.c_void_p
    mmap_at.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    # The reservation owns its addresses: what is mapped over them ends with it.
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    reservation = np.frombuffer(mmap.mmap(-1, size + ALIGNMENT, flags=flags, prot=mmap.PROT_READ), np.uint8)
    offset = -reservation.ctypes.data % ALIGNMENT
    content = reservation[offset : offset + size]
    for number, path in enumerate(paths):
        start = number * chunk_bytes
        try:
            descriptor = os.open(path, os.O_RDONLY)
        except OSError:
            return None
        length = min(chunk_bytes, size - start)
        place = content.ctypes.data + start
        address = mmap_at(place, length, mmap.PROT_READ, mmap.MAP_SHARED | MAP_FIXED, descriptor, 0)
        os.close(descriptor)
        if address == MAP_FAILED:
            return None
    return content
