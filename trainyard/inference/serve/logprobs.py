"""Tokens as text, and logprobs in the formats of completions and of chats."""

from collections.abc import Iterable

from trainyard.data.text.tokenizer import Tokenizer
from trainyard.inference.serve.generation import TextToken
from trainyard.inference.serve.response_types import ChatLogprobs, ChatTokenLogprob, CompletionLogprobs, TopLogprob
from trainyard.inference.text.text_stream import REPLACEMENT

MIN_LOGPROB = -9999.0
"""Stands for minus infinity and for NaN, which JSON does not have."""


class TokenTexts:
    """The text of single tokens, as it is inside a text: SentencePiece drops the space of a first token."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._before = tokenizer.encode(["a"])[0].tolist()
        self._before_text = tokenizer.decode(self._before)
        self._texts: dict[int, str] = {}

    def text(self, token: int) -> str:
        """Text of a token; `token_id:N` for one that is only a part of a character, or nothing."""
        if token not in self._texts:
            text = self._tokenizer.decode([*self._before, token])
            known = text.startswith(self._before_text)
            text = text[len(self._before_text) :] if known else self._tokenizer.decode([token])
            self._texts[token] = f"token_id:{token}" if not text or REPLACEMENT in text else text
        return self._texts[token]

    def utf8(self, token: int) -> list[int] | None:
        text = self.text(token)
        return None if text == f"token_id:{token}" else list(text.encode())


def completion_logprobs(tokens: Iterable[TextToken], texts: TokenTexts, first_offset: int) -> CompletionLogprobs:
    """`first_offset`: characters before the generated text, which an echoed prompt has."""
    found = CompletionLogprobs(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=[])
    for token in tokens:
        event = token.event
        found.tokens.append(texts.text(event.token))
        found.token_logprobs.append(_finite(event.logprob))
        most_likely = {texts.text(other): _finite(logprob) for other, logprob in event.top_logprobs}
        found.top_logprobs.append(most_likely | {texts.text(event.token): _finite(event.logprob)})
        found.text_offset.append(first_offset + token.offset)
    return found


def chat_logprobs(tokens: Iterable[TextToken], texts: TokenTexts) -> ChatLogprobs:
    def entry(token: int, logprob: float | None) -> TopLogprob:
        return TopLogprob(token=texts.text(token), logprob=_finite(logprob), bytes=texts.utf8(token))

    content = []
    for token in tokens:
        chosen = entry(token.event.token, token.event.logprob)
        most_likely = [entry(other, logprob) for other, logprob in token.event.top_logprobs]
        content.append(ChatTokenLogprob(**chosen.model_dump(), top_logprobs=most_likely))
    return ChatLogprobs(content=content)


def _finite(logprob: float | None) -> float:
    return logprob if logprob is not None and logprob > MIN_LOGPROB else MIN_LOGPROB  # a comparison with NaN is false
