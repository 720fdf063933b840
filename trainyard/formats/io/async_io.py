"""Overlaps reading, writing and fsync of files in threads."""

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import BinaryIO, TypeVar

T = TypeVar("T")
PREFETCH_DEPTH = 2
"""Tensors produced ahead of use; this bounds memory."""
NUM_WORKERS = 2
"""Threads of OrderedWorkers."""
MAX_PARALLEL = 8
"""Files in fsync at a time; the disk can then merge their writes."""


def prefetch(producers: Iterable[Callable[[], T]]) -> Iterator[T]:
    """Yield the results of `producers` in order, computed in other threads while earlier results are in use."""
    pool = ThreadPoolExecutor(PREFETCH_DEPTH)
    pending: deque[Future[T]] = deque()
    try:
        for produce in producers:
            pending.append(pool.submit(produce))
            if len(pending) > PREFETCH_DEPTH:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


class OrderedWorkers(AbstractContextManager["OrderedWorkers"]):
    """Threads that run tasks in parallel, but the tasks of one worker in order. Only a few tasks are pending at a time.

    Leaving the `with` block waits for all tasks. The exception of a task is raised there, or by a later `submit`.
    """

    def __init__(self) -> None:
        self.pools = [ThreadPoolExecutor(1) for _ in range(NUM_WORKERS)]
        self.pending: deque[Future[None]] = deque()

    def submit(self, worker: int, task: Callable[[], None]) -> None:
        self.pending.append(self.pools[worker % NUM_WORKERS].submit(task))
        while len(self.pending) > 2 * NUM_WORKERS:
            self.pending.popleft().result()

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        for pool in self.pools:
            pool.shutdown(cancel_futures=error is not None)
        if error is None:
            for future in self.pending:
                future.result()


@contextmanager
def background_fsync() -> Iterator[Callable[[BinaryIO], None]]:
    """Yield a function that fsyncs and closes a file in another thread. All files are on disk when the block ends."""

    def sync_and_close(file: BinaryIO) -> None:
        with file:
            file.flush()
            os.fsync(file.fileno())

    futures: list[Future[None]] = []
    with ThreadPoolExecutor(MAX_PARALLEL) as pool:
        yield lambda file: futures.append(pool.submit(sync_and_close, file))
        for future in futures:
            future.result()


def fsync_files(paths: Iterable[Path]) -> None:
    """Fsync files that are already closed."""
    with background_fsync() as close:
        for path in paths:
            close(path.open("rb+"))


def run_parallel(tasks: Iterable[Callable[[], None]]) -> None:
    """Run all tasks in threads and wait for them."""
    with ThreadPoolExecutor(MAX_PARALLEL) as pool:
        list(pool.map(lambda task: task(), tasks))
