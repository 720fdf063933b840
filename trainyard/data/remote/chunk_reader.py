"""Numbered chunks of the cache, mapped into this process as they are needed."""

import threading
import time
from collections.abc import Callable, Iterable
from functools import partial

from trainyard.data.remote.chunk_cache import Bytes, Chunk, ChunkCache
from trainyard.data.remote.fetch_pool import fetch_pool

TOUCH_INTERVAL_S = 30.0
"""Seconds after which chunks in use are marked again as used, for the eviction by other processes."""
MAX_AHEAD_FRACTION = 0.25
"""Fraction of the cache that may be on its way before a step needs it."""


class ChunkReader:
    def __init__(
        self, cache: ChunkCache, chunk_bytes: int, max_mapped: int, make_chunk: Callable[[int], Chunk]
    ) -> None:
        """`chunk_bytes`: size of most chunks; `max_mapped`: how many stay mapped. Evicted ones take space on the disk
        while they are."""
        self.cache, self.max_mapped, self.make_chunk = cache, max_mapped, make_chunk
        self.max_ahead = int(cache.max_bytes * MAX_AHEAD_FRACTION / chunk_bytes)
        self.mapped: dict[int, Bytes] = {}
        self.used: set[int] = set()
        """Chunks read since they were last marked as used."""
        self.touched_at = time.monotonic()
        self.mutex = threading.Lock()

    def get(self, numbers: Iterable[int]) -> dict[int, Bytes]:
        """The chunks of these numbers; the missing ones are fetched at the same time."""
        mapped, found, missing = self.mapped, {}, []
        for number in numbers:
            if (content := mapped.get(number)) is None:
                missing.append(number)
            else:
                found[number] = content
        if missing:
            found.update(self._map(missing))
        self.used.update(found)
        self.touch_if_due()
        return found

    def fetch(self, numbers: Iterable[int]) -> None:
        """Fetch chunks in the background, as far as there is room in the cache."""
        pool = fetch_pool()
        for number in numbers:
            if number not in self.mapped and len(pool.pending) < self.max_ahead:
                chunk = self.make_chunk(number)
                pool.submit(chunk.identity, partial(self._load, chunk))

    def _load(self, chunk: Chunk) -> None:
        if not self.cache.contains(chunk):
            self.cache.get(chunk)

    def _map(self, numbers: list[int]) -> dict[int, Bytes]:
        chunks = [self.make_chunk(number) for number in numbers]
        pool = fetch_pool()
        if len(chunks) > 1 and not pool.is_worker():
            missing = [chunk for chunk in chunks if not self.cache.contains(chunk)]
            for future in [pool.submit(chunk.identity, partial(self._load, chunk), urgent=True) for chunk in missing]:
                future.result()
        found = {number: self.cache.get(chunk) for number, chunk in zip(numbers, chunks, strict=True)}
        with self.mutex:
            self.mapped.update(found)
            for number in list(self.mapped)[: max(len(self.mapped) - self.max_mapped, 0)]:
                del self.mapped[number]
        return found

    def touch_if_due(self, all_used: bool = False) -> None:
        """Mark the chunks in use, and drop those that were evicted: their space is free only then."""
        if time.monotonic() - self.touched_at < TOUCH_INTERVAL_S:
            return
        with self.mutex:
            self.touched_at = time.monotonic()
            used, self.used = self.used, set()
            for number in list(self.mapped) if all_used else used & self.mapped.keys():
                if not self.cache.touch(self.make_chunk(number)):
                    del self.mapped[number]
