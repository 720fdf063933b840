"""Background threads that fetch chunks before a step needs them.

A process that ends does not wait for downloads that nobody will read, only for those that have begun, and not for long.
"""

import atexit
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from functools import cache
from typing import Any

NUM_THREADS = 16
MAX_EXIT_S = 5.0
process_ends = threading.Event()


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
