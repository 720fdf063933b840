"""Continuous batching: requests join and leave a running batch between two tokens."""

from trainyard.inference.requests import Request, TokenEvent


class Scheduler:
    """Continues many requests together. Not thread-safe: one thread calls all methods."""

    max_seq_len: int
    """Longest prompt plus new tokens that a request can have."""

    def add(self, request: Request) -> None:
        """Queue a request. Raises UserError if its prompt is empty, longer than the cache, or has unknown tokens."""
        raise NotImplementedError

    def cancel(self, request_id: int) -> None:
        """Drop a request and free its place in the batch. No event follows. Unknown ids are ignored."""
        raise NotImplementedError

    @property
    def has_work(self) -> bool:
        raise NotImplementedError

    def step(self) -> list[TokenEvent]:
        """Admit what fits, and compute one token of every request in the batch."""
        raise NotImplementedError
