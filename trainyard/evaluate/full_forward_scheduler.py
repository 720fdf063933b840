"""Greedy generation by full forward passes, without a cache of keys and values."""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from trainyard.core.errors import UserError
from trainyard.evaluate.score_continuations import forward_padded, row_logits
from trainyard.inference.requests import Request
from trainyard.models import TransformerStage

NewToken = tuple[int, int, bool]
"""Request id, token, and whether the request ends with it."""


class TokenScheduler(Protocol):
    """What generates tokens for several requests."""

    def add(self, request: Request) -> None: ...

    def cancel(self, request_id: int) -> None: ...

    def step(self) -> list[NewToken]:
        """One more token for some of the requests; empty when all have ended."""


class FullForwardScheduler:
    """Computes every sequence from its start for each new token: simple, exact, and slow for long texts."""

    def __init__(self, model: TransformerStage, max_seq_len: int, batch_size: int, device: torch.device) -> None:
        self.model, self.max_seq_len, self.batch_size, self.device = model, max_seq_len, batch_size, device
        self.requests: dict[int, Request] = {}
        self.sequences: dict[int, list[int]] = {}
        """Prompt and new tokens of each request that has not ended."""

    def add(self, request: Request) -> None:
        if request.options.temperature:
            raise UserError(f"temperature={request.options.temperature:g}: generation for tasks is greedy; nearest: 0")
        self.requests[request.request_id] = request
        self.sequences[request.request_id] = list(request.prompt)

    def cancel(self, request_id: int) -> None:
        self.sequences.pop(request_id, None)

    @torch.no_grad()
    def step(self) -> list[NewToken]:
        active = list(self.sequences)[: self.batch_size]
        if not active:
            return []
        rows = [self.sequences[request_id] for request_id in active]
        output = forward_padded(self.model, rows, self.device)
        last = torch.tensor([len(row) - 1 for row in rows], device=self.device)
        logits = row_logits(output, output.hidden[torch.arange(len(rows), device=self.device), last])
        tokens: list[NewToken] = []
        for request_id, row, token in zip(active, rows, logits.argmax(-1).tolist(), strict=True):
            row.append(token)
            options = self.requests[request_id].options
            new = len(row) - len(self.requests[request_id].prompt)
            is_last = token in options.end_ids or new >= options.max_new_tokens or len(row) >= self.max_seq_len
            tokens.append((request_id, token, is_last))
            if is_last:
                self.cancel(request_id)
        return tokens


def run_requests(
    scheduler: TokenScheduler,
    requests: Sequence[Request],
    is_stopped: Callable[[int, list[int]], bool],
    on_end: Callable[[], None] = lambda: None,
) -> dict[int, list[int]]:
    """The new tokens of each request, the end token included. `is_stopped` takes a request id and its new tokens, and
    ends the request early. `on_end` is called after each request."""
    tokens: dict[int, list[int]] = {request.request_id: [] for request in requests}
    for request in requests:
        scheduler.add(request)
    while events := scheduler.step():
        for request_id, token, is_last in events:
            tokens[request_id].append(token)
            stopped = not is_last and is_stopped(request_id, tokens[request_id])
            if stopped:
                scheduler.cancel(request_id)
            if stopped or is_last:
                on_end()
    return tokens
