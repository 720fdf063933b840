"""Work in other processes: results in order, a bounded number under way, nobody left behind."""

import ctypes
import multiprocessing
import os
import signal
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import TypeVar

from trainyard.core.errors import RunStopped

A = TypeVar("A")
B = TypeVar("B")

MAX_ITEMS_PER_WORKER = 3
"""Items handed out for each worker: enough that none waits, few enough that memory stays small."""
PR_SET_PDEATHSIG = 1


def map_ordered(
    function: Callable[[A], B],
    items: Iterable[A],
    workers: int,
) -> Iterator[B]:
    """function(item) for each item, in order, by so many processes; by this one if `workers` is 1.

    At most AHEAD items per worker are taken from `items` before their
    results are: memory does not grow with the input. An exception of a worker is raised here, at its item.
    """
    if workers == 1:
        yield from map(function, items)
        return
    # A fork starts at once and shares what is loaded. Made before anything here has threads.
    method = "fork" if sys.platform == "linux" else "spawn"
    context = multiprocessing.get_context(method)
    with ProcessPoolExecutor(workers, context, initializer=_init_worker, initargs=(os.getpid(),)) as pool:
        coming: deque[Future[B]] = deque()
        try:
            for item in items:
                coming.append(pool.submit(function, item))
                if len(coming) >= MAX_ITEMS_PER_WORKER * workers:
                    yield coming.popleft().result()
            while coming:
                yield coming.popleft().result()
        except BrokenProcessPool:
            raise RunStopped(
                "a worker process was killed (by the kernel, if memory ran out: try fewer --workers)"
            ) from None
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _init_worker(parent: int) -> None:
    """A worker leaves signals to its parent (they often go to both), dies with it, and has no threads of its own."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
