"""A scheduler without a model: what it writes follows from the prompt and the seed."""

import threading
import time
from collections.abc import Iterator
from hashlib import blake2b
from typing import Any

from trainyard.core.errors import UserError
from trainyard.data.text.tokenizer import ByteTokenizer
from trainyard.inference.requests import FinishReason, Request, SamplingOptions, SchedulerLoad, TokenEvent

SCRIPT = b"say:"
"""A prompt with this is answered with what follows it, then the end token."""
LETTERS = b"abcdefghijklmnopqrstuvwxyz    "
END = ByteTokenizer.end_id


def fake_tokens(prompt: list[int], options: SamplingOptions) -> Iterator[int]:
    """The tokens that answer a prompt: scripted ones, or letters without end."""
    head, found, script = bytes(token % 256 for token in prompt).rpartition(SCRIPT)
    if found:
        yield from script
        yield END
    seed = options.seed if options.temperature > 0 else 0
    number = 0
    while True:
        block = blake2b(b"%s|%s|%d|%d" % (head, script, seed, number)).digest()
        yield from (LETTERS[byte % len(LETTERS)] for byte in block)
        number += 1


def fake_text(prompt: str, length: int, seed: int = 0) -> str:
    """The first `length` letters that answer a prompt. Seed 0 is also that of temperature 0."""
    tokens = fake_tokens(list(prompt.encode()), SamplingOptions(temperature=1.0, seed=seed))
    return bytes(next(tokens) for _ in range(length)).decode()


class _Sequence:
    def __init__(self, request: Request) -> None:
        self.request, self.tokens, self.count = request, fake_tokens(request.prompt, request.options), 0


class FakeScheduler:
    def __init__(self, max_batch: int = 64, max_seq_len: int = 512, step_s: float = 0.0) -> None:
        self.max_batch, self.max_seq_len, self.step_s = max_batch, max_seq_len, step_s
        self.waiting: dict[int, _Sequence] = {}
        self.running: dict[int, _Sequence] = {}
        self.most_running = 0
        self.cancelled: list[int] = []
        self.options: list[SamplingOptions] = []
        self.faults: list[BaseException] = []
        """Raised by the steps after `fail_now`."""
        self.fail_now = threading.Event()
        self.cancel_fault: BaseException | None = None
        self.lose_requests = False
        self.logprob = -1.0
        self.schemas: Any = None

    def add(self, request: Request) -> None:
        if not request.prompt or len(request.prompt) >= self.max_seq_len:
            raise UserError(f"prompt of {len(request.prompt)} tokens")
        if bad := [token for token in request.prompt if not 0 <= token <= END]:
            raise UserError(f"token {bad[0]}: the vocabulary has {END + 1}")
        self.options.append(request.options)
        self.waiting[request.request_id] = _Sequence(request)

    def cancel(self, request_id: int) -> None:
        if self.cancel_fault:
            raise self.cancel_fault
        self.cancelled.append(request_id)
        self.waiting.pop(request_id, None)
        self.running.pop(request_id, None)

    @property
    def has_work(self) -> bool:
        if self.lose_requests:
            self.waiting.clear()
            self.running.clear()
        return bool(self.waiting or self.running)

    @property
    def load(self) -> SchedulerLoad:
        return SchedulerLoad(len(self.running), len(self.waiting), len(self.running) / self.max_batch)

    def step(self) -> list[TokenEvent]:
        time.sleep(self.step_s)
        if self.faults and self.fail_now.is_set():
            raise self.faults.pop()
        while self.waiting and len(self.running) < self.max_batch:
            request_id = next(iter(self.waiting))
            self.running[request_id] = self.waiting.pop(request_id)
        self.most_running = max(self.most_running, len(self.running))
        return [self._advance(request_id, sequence) for request_id, sequence in list(self.running.items())]

    def _advance(self, request_id: int, sequence: _Sequence) -> TokenEvent:
        options = sequence.request.options
        token = next(sequence.tokens)
        sequence.count += 1
        reason: FinishReason | None = None
        if token in options.end_ids:
            reason = "stop"
        elif sequence.count >= min(options.max_new_tokens, self.max_seq_len - len(sequence.request.prompt)):
            reason = "length"
        if reason:
            del self.running[request_id]
        top = tuple((token + offset, self.logprob - offset) for offset in range(options.num_logprobs or 0))
        return TokenEvent(request_id, token, reason, self.logprob, top)
