"""Continuous batching: requests join and leave a running batch between two tokens."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from trainyard.core.errors import UserError
from trainyard.core.quantities import counted
from trainyard.inference.engine import Engine, PendingTokens
from trainyard.inference.prefix_cache import PrefixCache
from trainyard.inference.requests import MAX_LOGPROBS, FinishReason, Request, SchedulerLoad, TokenEvent
from trainyard.inference.sampling import StepNeeds
from trainyard.inference.text.json_schema import SchemaCompiler, SchemaMatcher

PREFILL_CHUNK = 1024
"""Tokens of a long prompt that are computed at a time, so that other requests do not wait for all of it."""
CPU_PREFILL_CHUNK = 128
"""The same on a CPU for prompts that share their beginnings, which are reused in these units. They take up to a sixth
longer to compute than larger ones."""
PREFILL_TOKENS = 8192
"""Tokens of several short prompts, padding included, that are computed together."""


@dataclass(eq=False)
class Sequence:
    """A request that has a slot."""

    request: Request
    slot: int
    prefilled: int = 0
    """Tokens of the prompt that are in the cache."""
    reused: int = 0
    """Of these, tokens that another prompt had computed."""
    queued: int = 0
    """New tokens that were queued on the device."""
    reported: int = 0
    """New tokens that callers have got."""
    done: bool = False
    matcher: SchemaMatcher | None = None

    @property
    def length(self) -> int:
        """Tokens of the prompt and new ones, with those in flight."""
        return len(self.request.prompt) + self.queued


@dataclass
class QueuedStep:
    """A step on the device whose results have not been read."""

    rows: list[tuple[int, Sequence]]
    """Row of the result, and whose it is."""
    read: PendingTokens


class RequestScheduler:
    """Continues many requests together. Not thread-safe: one thread calls all methods.

    A step of the device is queued before the results of the previous one are read, so that the device never waits for
    the host. A request that ends is therefore computed one token too far, which nobody sees.
    """

    def __init__(self, engine: Engine, vocab_size: int, shares_prefixes: bool = False) -> None:
        """`shares_prefixes`: many prompts begin alike, so that short units are worth reusing."""
        self.engine, self.vocab_size = engine, vocab_size
        self.schemas: SchemaCompiler | None = None
        self.max_seq_len = engine.max_seq_len
        """Longest prompt plus new tokens that a request can have."""
        has_short_units = shares_prefixes and engine.device.synchronous
        unit = CPU_PREFILL_CHUNK if has_short_units else PREFILL_CHUNK
        self.prefixes = PrefixCache(engine.num_slots, unit, engine.model.static_length, engine.has_rings)
        self.waiting: deque[Request] = deque()
        self.slots: list[Sequence | None] = [None] * engine.num_slots
        self.queued_steps: deque[QueuedStep] = deque()
        self.lookahead = 0 if engine.device.synchronous else 1
        """Steps whose results are read later."""

    def add(self, request: Request) -> None:
        """Queue a request. Raises UserError if it cannot be computed."""
        self.check(request)
        self.waiting.append(request)

    def check(self, request: Request) -> None:
        """Raise UserError if a prompt is empty, too long, or has unknown tokens."""
        if not request.prompt:
            raise UserError("the prompt is empty: it needs at least one token")
        if len(request.prompt) >= self.max_seq_len:
            limit = f"{self.max_seq_len} tokens, new ones included"
            raise UserError(f"the prompt has {counted(len(request.prompt), 'token')}; the limit is {limit}")
        if unknown := next((token for token in request.prompt if not 0 <= token < self.vocab_size), None):
            raise UserError(f"token {unknown} of the prompt is not in the vocabulary of {self.vocab_size}")
        if request.options.max_new_tokens < 1:
            raise UserError(f"max_new_tokens is {request.options.max_new_tokens}; at least 1 is needed")
        if (request.options.num_logprobs or 0) > MAX_LOGPROBS:
            raise UserError(f"num_logprobs is {request.options.num_logprobs}; the limit is {MAX_LOGPROBS}")
        self._start_matcher(request)

    def _start_matcher(self, request: Request) -> SchemaMatcher | None:
        if request.options.json_schema is None:
            return None
        if self.schemas is None:
            raise UserError("a JSON schema needs a tokenizer")
        return self.schemas.start(request.options.json_schema)

    def cancel(self, request_id: int) -> None:
        """Drop a request and free its slot. No event follows. Unknown ids are ignored."""
        self.waiting = deque(request for request in self.waiting if request.request_id != request_id)
        for sequence in self.slots:
            if sequence and sequence.request.request_id == request_id:
                self._end(sequence)

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.queued_steps or any(self.slots))

    @property
    def load(self) -> SchedulerLoad:
        running = [sequence for sequence in self.slots if sequence]
        used = sum(sequence.length for sequence in running)
        return SchedulerLoad(len(running), len(self.waiting), used / (len(self.slots) * self.max_seq_len))

    def step(self) -> list[TokenEvent]:
        """Admit what fits, compute one token of every request in the batch, and return the tokens that are known."""
        self._admit()
        self._prefill()
        events: list[TokenEvent] = []
        if any(sequence and sequence.matcher for sequence in self.slots):
            events += self._collect_all_but(0)  # the tokens that may follow depend on the last one
        queued = self._decode()
        return events + self._collect_all_but(self.lookahead if queued else 0)

    def _collect_all_but(self, steps: int) -> list[TokenEvent]:
        """The tokens of all queued steps, except for the last ones."""
        events: list[TokenEvent] = []
        while len(self.queued_steps) > steps:
            events += self._collect(self.queued_steps.popleft())
        return events

    def _admit(self) -> None:
        for slot, sequence in enumerate(self.slots):
            if sequence is None and self.waiting:
                request = self.waiting.popleft()
                self._move_prefix(slot, request)
                sequence = self.slots[slot] = Sequence(request, slot, matcher=self._start_matcher(request))
                self.engine.start(slot, request.options, request.prompt, request.adapter)
                if sequence.matcher:
                    self.engine.allow_tokens(slot, sequence.matcher.next_tokens())

    def _move_prefix(self, slot: int, request: Request) -> None:
        """Move what a slot holds to another free one, unless the prompt that gets the slot begins with it."""
        source, length = self.prefixes.longest(request.prompt, slot, request.adapter)
        if (source == slot and length) or not self.prefixes.held[slot]:
            return
        needed = (slot, source) if length else (slot,)
        free = [other for other, sequence in enumerate(self.slots) if sequence is None and other not in needed]
        place = self.prefixes.place_for(slot, free)
        if place is not None:
            self.engine.move_prefix(slot, place, len(self.prefixes.held[slot]))
            self.prefixes.move(slot, place)

    def _reuse_prefix(self, sequence: Sequence) -> None:
        slot, prompt, adapter = sequence.slot, sequence.request.prompt, sequence.request.adapter
        source, length = self.prefixes.longest(prompt, slot, adapter)
        if length > sequence.prefilled or not sequence.prefilled:
            self.prefixes.begin(slot, prompt, length, adapter)
        if length > sequence.prefilled:
            self.engine.reuse_prefix(source, slot, length, source in self.prefixes.released)
            self.prefixes.touch(source)
            self.prefixes.hold(slot, prompt, length, adapter)
            sequence.reused += length - sequence.prefilled
            sequence.prefilled = length

    def _prefill(self) -> None:
        """Queue PREFILL_CHUNK tokens of every prompt that is not in the cache. Prompts that fit a unit of the prefix
        cache are computed together."""
        pending = [s for s in self.slots if s and s.prefilled < len(s.request.prompt)]
        short = [s for s in pending if len(s.request.prompt) <= self.prefixes.unit]
        short.sort(key=lambda sequence: len(sequence.request.prompt))  # little padding
        while short:
            group = [short.pop()]
            longest = len(group[0].request.prompt)
            while short and longest * (len(group) + 1) <= PREFILL_TOKENS:
                group.append(short.pop())
            self._prefill_chunk(group)
        for sequence in pending:
            if len(sequence.request.prompt) > self.prefixes.unit:
                self._reuse_prefix(sequence)
                end = min(sequence.prefilled + PREFILL_CHUNK, len(sequence.request.prompt))
                while sequence.prefilled < end:
                    self._prefill_chunk([sequence])

    def _prefill_chunk(self, group: list[Sequence]) -> None:
        start = group[0].prefilled
        chunks = [sequence.request.prompt[start : start + self.prefixes.unit] for sequence in group]
        is_last = start + len(chunks[0]) == len(group[0].request.prompt)
        read = self.engine.prefill([s.slot for s in group], chunks, start, is_last, _needs(group))
        for sequence, chunk in zip(group, chunks, strict=True):
            sequence.prefilled += len(chunk)
            request = sequence.request
            if self.prefixes.hold(sequence.slot, request.prompt, sequence.prefilled, request.adapter):
                self.engine.keep_state(sequence.slot)
            sequence.queued = int(is_last)
        if read:
            self.queued_steps.append(QueuedStep(list(enumerate(group)), read))

    def _decode(self) -> bool:
        """Queue one token of all requests whose prompts are in the cache. Returns whether there are any."""
        # The last chunk of a prompt queues the first new token; until then there is nothing to decode.
        active = [s for s in self.slots if s and 0 < s.queued < self._max_new_tokens(s)]
        if not active:
            return False
        longest = max(sequence.length for sequence in active)
        read = self.engine.decode(max(s.slot for s in active) + 1, longest, _needs(active))
        for sequence in active:
            sequence.queued += 1
        self.queued_steps.append(QueuedStep([(sequence.slot, sequence) for sequence in active], read))
        return True

    def _max_new_tokens(self, sequence: Sequence) -> int:
        return min(sequence.request.options.max_new_tokens, self.max_seq_len - len(sequence.request.prompt))

    def _collect(self, step: QueuedStep) -> list[TokenEvent]:
        result, events = step.read(), []
        for row, sequence in step.rows:
            if sequence.done:  # it ended, or was cancelled, while this token was on its way
                continue
            options, token = sequence.request.options, result.tokens[row]
            sequence.reported += 1
            finish_reason: FinishReason | None = None
            if token in options.end_ids:
                finish_reason = "stop"
            elif sequence.matcher:
                finish_reason = self._constrain(sequence, sequence.matcher, token)
            if finish_reason is None and sequence.reported >= self._max_new_tokens(sequence):
                finish_reason = "length"
            logprob: float | None = None
            top: tuple[tuple[int, float], ...] = ()
            if options.num_logprobs is not None and result.logprobs and result.top_logprobs:
                logprob, top = result.logprobs[row], tuple(result.top_logprobs[row][: options.num_logprobs])
            elif options.reports_choices and result.logprobs:
                logprob = result.logprobs[row]
            identity = sequence.request.request_id
            events.append(TokenEvent(identity, token, finish_reason, logprob, top, sequence.reused))
            if finish_reason:
                self._end(sequence)
        return events

    def _constrain(self, sequence: Sequence, matcher: SchemaMatcher, token: int) -> FinishReason | None:
        """Allow what can follow the last token of a sequence; "stop" if it is complete."""
        if matcher.push(token):
            self.engine.allow_tokens(sequence.slot, matcher.next_tokens())
            return None
        return "length" if matcher.failed else "stop"

    def _end(self, sequence: Sequence) -> None:
        sequence.done = True
        self.slots[sequence.slot] = None
        if self.prefixes.held[sequence.slot]:
            self.engine.keep_prefix(sequence.slot)
            self.prefixes.released.add(sequence.slot)
        self.engine.release(sequence.slot)


def _needs(sequences: list[Sequence]) -> StepNeeds:
    return StepNeeds.of([sequence.request.options for sequence in sequences])


def run_requests(
    scheduler: RequestScheduler,
    requests: list[Request],
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
