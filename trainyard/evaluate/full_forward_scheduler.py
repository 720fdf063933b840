"""Greedy generation by full forward passes, with the interface of the inference scheduler."""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from trainyard.core.errors import UserError
from trainyard.evaluate.score_continuations import forward_padded, row_logits
from trainyard.inference.requests import FinishReason, Request, TokenEvent
from trainyard.models import TransformerStage


class RequestScheduler(Protocol):
    """Generates tokens for several requests, as inference/scheduler.py does."""

    @property
    def has_work(self) -> bool: ...

    def add(self, request: Request) -> None: ...

    def cancel(self, request_id: int) -> None: ...

    def step(self) -> list[TokenEvent]: ...


class FullForwardScheduler:
    """Computes every sequence from its start for each new token: simple, exact, and slow for long texts."""

    def __init__(self, model: TransformerStage, max_seq_len: int, batch_size: int, device: torch.device) -> None:
        self.model, self.max_seq_len, self.batch_size, self.device = model, max_seq_len, batch_size, device
        self.requests: dict[int, Request] = {}
        """Requests that have not ended."""
        self.sequences: dict[int, list[int]] = {}
        """Prompt and new tokens of each."""

    @property
    def has_work(self) -> bool:
        return bool(self.requests)

    def add(self, request: Request) -> None:
        if request.options.temperature:
            raise UserError(f"temperature={request.options.temperature:g}: generation for tasks is greedy; nearest: 0")
        self.requests[request.request_id] = request
        self.sequences[request.request_id] = list(request.prompt)

    def cancel(self, request_id: int) -> None:
        self.requests.pop(request_id, None)
        self.sequences.pop(request_id, None)

    @torch.no_grad()
    def step(self) -> list[TokenEvent]:
        """One more token for the first requests."""
        active = list(self.requests.values())[: self.batch_size]
        rows = [self.sequences[request.request_id] for request in active]
        output = forward_padded(self.model, rows, self.device)
        last = torch.tensor([len(row) - 1 for row in rows], device=self.device)
        hidden_BD = output.hidden[torch.arange(len(rows), device=self.device), last]
        logprobs, tokens = row_logits(output, hidden_BD).log_softmax(-1).max(-1)
        events: list[TokenEvent] = []
        for request, row, token, logprob in zip(active, rows, tokens.tolist(), logprobs.tolist(), strict=True):
            row.append(token)
            reason = self._finish_reason(request, row)
            events.append(
                TokenEvent(
                    request_id=request.request_id, token=token, logprob=logprob, top_logprobs=(), finish_reason=reason
                )
            )
            if reason:
                self.cancel(request.request_id)
        return events

    def _finish_reason(self, request: Request, sequence: list[int]) -> FinishReason | None:
        if sequence[-1] in request.options.end_ids:
            return "stop"
        limit = min(len(request.prompt) + request.options.max_new_tokens, self.max_seq_len)
        return "length" if len(sequence) >= limit else None


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
