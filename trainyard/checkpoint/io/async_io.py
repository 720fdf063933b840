"""Reading and making files safe on disk beside writing: each would wait for the others otherwise."""

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, Self, TypeVar

T = TypeVar("T")
PREFETCH_DEPTH = 2
"""Tensors made before they are asked for: what bounds memory."""
NUM_WORKERS = 2
"""Writers beside each other."""
MAX_PARALLEL = 8
"""Files that are made safe on disk together; the disk then writes them in one go."""


def prefetch(producers: Iterable[Callable[[], T]]) -> Iterator[T]:
    """What each of `makers` makes, in order, made in another thread while the one before is used."""
    pool = ThreadPoolExecutor(PREFETCH_DEPTH)
    waiting: deque[Future[T]] = deque()
    try:
        for make in producers:
            waiting.append(pool.submit(make))
            if len(waiting) > PREFETCH_DEPTH:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


class OrderedWorkers:
    """Works that are done beside each other, but for those of the same lane, which keep their order. No more than a few
    wait at a time. Leaving the block waits for all; what one of them raised is raised there, or at the next `put`."""

    def __init__(self) -> None:
        self.pools = [ThreadPoolExecutor(1) for _ in range(NUM_WORKERS)]
        self.pending: deque[Future[None]] = deque()

    def submit(self, worker: int, task: Callable[[], None]) -> None:
        self.pending.append(self.pools[worker % NUM_WORKERS].submit(task))
        while len(self.pending) > 2 * NUM_WORKERS:
            self.pending.popleft().result()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for pool in self.pools:
            pool.shutdown(cancel_futures=kind is not None)
        if kind is None:
            for each in self.pending:
                each.result()


@contextmanager
def background_fsync() -> Iterator[Callable[[BinaryIO], None]]:
    """Gives a function that closes a file once it is safe on disk; all are when the block ends."""
    pool = ThreadPoolExecutor(MAX_PARALLEL)
    started: list[Future[None]] = []

    def finish(file: BinaryIO) -> None:
        with file:
            os.fsync(file.fileno())

    def close(file: BinaryIO) -> None:
        file.flush()
        started.append(pool.submit(finish, file))

    try:
        yield close
        for each in started:
            each.result()
    finally:
        pool.shutdown()


def fsync_files(paths: Iterable[Path]) -> None:
    """Make files safe on disk that were written and closed."""
    with background_fsync() as close:
        for path in paths:
            close(path.open("rb+"))


def run_parallel(tasks: Iterable[Callable[[], None]]) -> None:
    with ThreadPoolExecutor(MAX_PARALLEL) as pool:
        for done in [pool.submit(work) for work in tasks]:
            done.result()
