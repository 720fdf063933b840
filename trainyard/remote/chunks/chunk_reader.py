"""Numbered chunks of the cache, mapped into this process as they are needed, and fetched in the background before.

A process that ends does not wait for downloads that nobody will read, only for those that have begun, and not for long.
"""

import atexit
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterable
from concurrent.futures import Future
from functools import cache, partial
from typing import Any

from trainyard.remote.chunks.chunk_cache import Bytes, Chunk, ChunkCache
from trainyard.remote.sources.retry import process_ends

TOUCH_INTERVAL_S = 30.0
"""Seconds after which chunks in use are marked again as used, for the eviction by other processes."""
MAX_AHEAD_FRACTION = 0.25
"""Fraction of the cache that may be on its way before a step needs it."""
NUM_THREADS = 16
MAX_EXIT_S = 5.0


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


class FetchPool:
    """Runs each task once, however often it is submitted until it is done. Urgent tasks come first."""

    def __init__(self, num_threads: int) -> None:
        self.queue: deque[tuple[Hashable, Callable[[], Any]]] = deque()
        self.pending: dict[Hashable, Future[Any]] = {}
        self.changed = threading.Condition()
        self.threads = [threading.Thread(target=self._work, daemon=True) for _ in range(num_threads)]
        for thread in self.threads:
            thread.start()
        atexit.register(self._stop)

    def submit(self, key: Hashable, task: Callable[[], Any], urgent: bool = False) -> Future[Any]:
        with self.changed:
            future = self.pending.get(key)
            if future is None:
                future = self.pending[key] = Future()
            elif not urgent or future.running():
                return future
            (self.queue.appendleft if urgent else self.queue.append)((key, task))
            self.changed.notify()
        return future

    def _work(self) -> None:
        while True:
            with self.changed:
                while not self.queue:
                    if process_ends.is_set():
                        return
                    self.changed.wait()
                key, task = self.queue.popleft()
                future = self.pending.get(key)
                if future is None or future.running():  # an urgent copy of this entry came before it
                    continue
                future.set_running_or_notify_cancel()
            try:
                result, error = task(), None
            except BaseException as raised:
                result, error = None, raised
            with self.changed:
                del self.pending[key]
            if error is None:
                future.set_result(result)
            else:
                future.set_exception(error)

    def is_worker(self) -> bool:
        """True in a thread of the pool, which must not wait for others of its kind."""
        return threading.current_thread() in self.threads

    def _stop(self) -> None:
        process_ends.set()
        with self.changed:
            self.queue.clear()
            self.changed.notify_all()
        deadline = time.monotonic() + MAX_EXIT_S
        for thread in self.threads:
            thread.join(max(deadline - time.monotonic(), 0.0))


@cache
def fetch_pool() -> FetchPool:
    """The threads of this process."""
    return FetchPool(NUM_THREADS)
