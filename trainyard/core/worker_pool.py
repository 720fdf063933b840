"""A parallel map over processes: results in order, bounded memory, no orphaned workers."""

import ctypes
import multiprocessing
import os
import signal
import sys
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import TypeVar

from trainyard.core.errors import RunStopped

Item = TypeVar("Item")
Result = TypeVar("Result")

MAX_ITEMS_PER_WORKER = 3
"""Items in flight per worker: enough that none waits, few enough that memory stays small."""
PR_SET_PDEATHSIG = 1


def map_ordered(function: Callable[[Item], Result], items: Iterable[Item], workers: int) -> Generator[Result]:
    """function(item) for each item, in order, in `workers` processes; in this process if `workers` is 1.

    At most MAX_ITEMS_PER_WORKER items per worker are in flight, so memory does not grow with the input. An exception
    in a worker is raised here when its item is due.
    """
    if workers == 1:
        yield from map(function, items)
        return
    # A fork starts fast and shares what is loaded. Callers start it before they start threads.
    method = "fork" if sys.platform == "linux" else "spawn"
    context = multiprocessing.get_context(method)
    with ProcessPoolExecutor(workers, context, initializer=_init_worker, initargs=(os.getpid(),)) as pool:
        pending: deque[Future[Result]] = deque()
        try:
            for item in items:
                pending.append(pool.submit(function, item))
                if len(pending) >= MAX_ITEMS_PER_WORKER * workers:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        except BrokenProcessPool:
            raise RunStopped(
                "a worker process was killed (by the kernel if memory ran out: try fewer --workers)"
            ) from None
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _init_worker(parent: int) -> None:
    """Leave signals to the parent (a terminal sends them to both), die with the parent, and use no threads."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
