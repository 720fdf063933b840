"""Runs a list of requests to their ends."""

from collections.abc import Callable, Sequence

from trainyard.inference.requests import Request
from trainyard.inference.scheduler import RequestScheduler


def run_requests(
    scheduler: RequestScheduler,
    requests: Sequence[Request],
    is_stopped: Callable[[int, list[int]], bool],
    on_end: Callable[[], None] = lambda: None,
) -> dict[int, list[int]]:
    """The new tokens of each request, the end token included. `is_stopped` takes a request id and its new tokens, and
    ends the request early. `on_end` is called after each request."""
    tokens: dict[int, list[int]] = {request.request_id: [] for request in requests}
    for request in requests:
        scheduler.add(request)
    while scheduler.has_work:
        for event in scheduler.step():
            new_tokens = tokens[event.request_id]
            new_tokens.append(event.token)
            if not event.finish_reason and is_stopped(event.request_id, new_tokens):
                scheduler.cancel(event.request_id)
                on_end()
            elif event.finish_reason:
                on_end()
    return tokens
