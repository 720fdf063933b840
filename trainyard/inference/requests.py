"""What callers ask the scheduler for, and what it answers, token by token."""

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

FinishReason = Literal["stop", "length"]
"""stop: an end token; length: max_new_tokens, or the longest sequence that the cache holds."""
MAX_LOGPROBS = 20
"""Most likely tokens that can be reported with each token."""


@dataclass(frozen=True)
class SamplingOptions:
    """How the next token is chosen. The defaults take the most likely one."""

    temperature: float = 0.0
    """0: the most likely token (greedy)."""
    top_p: float = 1.0
    """Sample among the most likely tokens whose probabilities sum to this."""
    top_k: int = 0
    """Sample among this many of the most likely tokens; 0: all."""
    seed: int = 0
    """Requests with the same seed, prompt and options get the same tokens, whatever else is in the batch."""
    presence_penalty: float = 0.0
    """Subtracted from the logits of all new tokens so far."""
    frequency_penalty: float = 0.0
    """Subtracted from the logits of new tokens, for each time that they occurred."""
    repetition_penalty: float = 1.0
    """Divides positive logits of tokens of the prompt and of new ones, and multiplies negative ones."""
    max_new_tokens: int = 128
    end_ids: frozenset[int] = frozenset()
    """Tokens that end the sequence. They are reported, as the last token."""
    num_logprobs: int | None = None
    """The most likely tokens to report with each token, besides the token itself; None: no log-probabilities."""

    reports_choices: bool = False
    """Report the log-probability of each token in the distribution at `temperature` that it was drawn from, before
    top_p and top_k, instead of num_logprobs."""
    json_schema: str | None = None
    """The text is JSON of this schema."""

    @property
    def is_penalized(self) -> bool:
        return (self.presence_penalty, self.frequency_penalty, self.repetition_penalty) != (0.0, 0.0, 1.0)


@dataclass(frozen=True)
class Request:
    """One sequence to continue."""

    request_id: int
    prompt: list[int]
    options: SamplingOptions = field(default_factory=SamplingOptions)
    adapter: int = 0
    """The number of the adapter that continues it; 0: the model alone."""


class SchedulerLoad(NamedTuple):
    """What a scheduler has to do. Any thread can ask for it."""

    running: int = 0
    """Requests in the batch."""
    waiting: int = 0
    cache_usage: float = 0.0
    """Part of the cache's positions that the requests in the batch use."""


class TokenEvent(NamedTuple):
    """One new token of a request."""

    request_id: int
    token: int
    finish_reason: FinishReason | None
    """None: more tokens follow."""
    logprob: float | None = None
    """Of the model's distribution before temperature, top_p and top_k, if the request asked for log-probabilities; of
    that at its temperature if it asked for `reports_choices`."""
    top_logprobs: tuple[tuple[int, float], ...] = ()
    """(token, logprob) of the most likely tokens, as many as the request asked for."""
    cached_tokens: int = 0
    """Tokens of the prompt whose keys and values were in the cache already."""
