"""Reading and making files safe on disk beside writing: each would wait for the others otherwise."""

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, Self, TypeVar

T = TypeVar("T")
AHEAD = 2
"""Tensors made before they are asked for: what bounds memory."""
LANES = 2
"""Writers beside each other."""
AT_ONCE = 8
"""Files that are made safe on disk together; the disk then writes them in one go."""


def ahead(makers: Iterable[Callable[[], T]]) -> Iterator[T]:
    """What each of `makers` makes, in order, made in another thread while the one before is used."""
    pool = ThreadPoolExecutor(AHEAD)
    waiting: deque[Future[T]] = deque()
    try:
        for make in makers:
            waiting.append(pool.submit(make))
            if len(waiting) > AHEAD:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


class Lanes:
    """Works that are done beside each other, but for those of the same lane, which keep their order. No more than a few
    wait at a time. Leaving the block waits for all; what one of them raised is raised there, or at the next `put`."""

    def __init__(self) -> None:
        self.pools = [ThreadPoolExecutor(1) for _ in range(LANES)]
        self.waiting: deque[Future[None]] = deque()

    def put(self, lane: int, work: Callable[[], None]) -> None:
        self.waiting.append(self.pools[lane % LANES].submit(work))
        while len(self.waiting) > 2 * LANES:
            self.waiting.popleft().result()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for pool in self.pools:
            pool.shutdown(cancel_futures=kind is not None)
        if kind is None:
            for each in self.waiting:
                each.result()


@contextmanager
def syncing() -> Iterator[Callable[[BinaryIO], None]]:
    """Gives a function that closes a file once it is safe on disk; all are when the block ends."""
    pool = ThreadPoolExecutor(AT_ONCE)
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


def sync_all(paths: Iterable[Path]) -> None:
    """Make files safe on disk that were written and closed."""
    with syncing() as close:
        for path in paths:
            close(path.open("rb+"))


def all_together(works: Iterable[Callable[[], None]]) -> None:
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for done in [pool.submit(work) for work in works]:
            done.result()
