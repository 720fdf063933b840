"""A Group whose ranks are threads of one process, so that context parallelism needs no process groups."""

import queue
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

TIMEOUT_S = 60
"""A test whose ranks wait for each other fails after this time."""


class ThreadMailboxes:
    """Queues and a barrier that the threads of one run share."""

    def __init__(self, size: int) -> None:
        self.queues: dict[tuple[int, int], queue.Queue[list[Tensor]]] = {}
        self.lock = threading.Lock()
        self.slots: list[Any] = [None] * size
        self.barrier = threading.Barrier(size, timeout=TIMEOUT_S)

    def queue_of(self, rank: int, message: int) -> "queue.Queue[list[Tensor]]":
        with self.lock:
            return self.queues.setdefault((rank, message), queue.Queue())


class ThreadRing:
    """One rank of the ring."""

    def __init__(self, mailboxes: ThreadMailboxes, size: int, rank: int) -> None:
        self.mailboxes, self.size, self.rank = mailboxes, size, rank
        self.sent = 0
        self.in_flight = 0

    def rotate(self, tensors: list[Tensor]) -> Callable[[], list[Tensor]]:
        assert len({x.dtype for x in tensors}) == 1
        self.sent += 1
        message = self.sent
        self.in_flight += 1
        self.mailboxes.queue_of((self.rank + 1) % self.size, message).put([x.clone() for x in tensors])

        def receive() -> list[Tensor]:
            self.in_flight -= 1
            return self.mailboxes.queue_of(self.rank, message).get(timeout=TIMEOUT_S)

        return receive

    def _exchange(self, x: Tensor) -> list[Tensor]:
        self.mailboxes.slots[self.rank] = x.clone()
        self.mailboxes.barrier.wait()
        tensors = list(self.mailboxes.slots)
        self.mailboxes.barrier.wait()
        return tensors

    def all_gather(self, x: Tensor) -> Tensor:
        return torch.cat(self._exchange(x))

    def reduce_scatter(self, x: Tensor) -> Tensor:
        return torch.stack([tensor[self.rank :][:1] for tensor in self._exchange(x)]).sum(0)


def run_on_threads(size: int, work: Callable[[ThreadRing], Any]) -> list[Any]:
    """The results of `work` on every rank."""
    mailboxes = ThreadMailboxes(size)
    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(work, ThreadRing(mailboxes, size, rank)) for rank in range(size)]
        return [future.result() for future in futures]
