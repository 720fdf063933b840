"""The text of the choices of one request, piece by piece."""

from collections import deque
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

from trainyard.inference.requests import FinishReason, SamplingOptions, TokenEvent
from trainyard.inference.serve.served_model import ServedModel
from trainyard.inference.serve.worker import Subscription
from trainyard.inference.text.text_stream import TextStream


@dataclass
class TextToken:
    """A token of the text with its logprobs."""

    event: TokenEvent
    offset: int
    """Characters of the text before it."""


@dataclass
class ChoiceDelta:
    """What a choice gained: text, the tokens that begin in it, and the reason for its end."""

    index: int
    text: str
    tokens: list[TextToken] = field(default_factory=list)
    finish_reason: FinishReason | None = None


class Choice:
    """One sequence: its tokens become text; tokens of a stop string and the end token are not part of it."""

    def __init__(self, index: int, stream: TextStream, end_ids: frozenset[int]) -> None:
        self.index = index
        self.num_tokens = self.cached_tokens = 0
        self.finish_reason: FinishReason | None = None
        self._stream = stream
        self._end_ids = end_ids
        self._waiting: deque[TextToken] = deque()

    def push(self, event: TokenEvent) -> ChoiceDelta:
        self.num_tokens += 1
        self.cached_tokens = event.cached_tokens
        text = ""
        if not (event.finish_reason == "stop" and event.token in self._end_ids):
            self._waiting.append(TextToken(event, self._stream.decoded_length))
            text = self._stream.push(event.token)
        if event.finish_reason:
            text += self._stream.finish()
        self.finish_reason = "stop" if self._stream.stopped else event.finish_reason
        return ChoiceDelta(self.index, text, self._shown_tokens(), self.finish_reason)

    def _shown_tokens(self) -> list[TextToken]:
        """Tokens whose text has begun to show. A token that may belong to a stop string waits for its text."""
        complete = self.finish_reason is not None and not self._stream.stopped
        shown = []
        while self._waiting and (complete or self._waiting[0].offset < self._stream.shown_length):
            shown.append(self._waiting.popleft())
        return shown


class Generation:
    """The choices of one request while they grow."""

    def __init__(
        self,
        model: ServedModel,
        sequences: Sequence[tuple[list[int], SamplingOptions]],
        stop: tuple[str, ...],
    ) -> None:
        self.choices = [
            Choice(index, TextStream(model.tokenizer, stop, prompt), options.end_ids)
            for index, (prompt, options) in enumerate(sequences)
        ]
        self._model, self._sequences = model, sequences
        self._subscription: Subscription | None = None

    async def start(self) -> None:
        """Submit the sequences and wait for the first token. Raises ApiError if that fails."""
        self._subscription = self._model.worker.submit(self._sequences, self._model.adapter)
        try:
            await self._subscription.wait_for_token()
        except BaseException:
            self.close()
            raise

    async def deltas(self) -> AsyncIterator[ChoiceDelta]:
        """New text of any choice, until all have finished."""
        assert self._subscription
        unfinished = len(self.choices)
        while unfinished:
            index, event = await self._subscription.next_token()
            choice = self.choices[index]
            if choice.finish_reason:  # a token computed before the scheduler saw the cancellation
                continue
            delta = choice.push(event)
            if delta.finish_reason:
                unfinished -= 1
                self._subscription.cancel(index)
            if delta.text or delta.tokens or delta.finish_reason:
                yield delta

    def close(self) -> None:
        """Cancel what has not finished, for example because the client has gone."""
        if self._subscription:
            self._subscription.close()

    @property
    def num_tokens(self) -> int:
        return sum(choice.num_tokens for choice in self.choices)
