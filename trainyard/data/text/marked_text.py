"""What of a sample is trained, as text that people can check."""

from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

from trainyard.core.constants import IGNORE_INDEX
from trainyard.data.text.tokenizer import Tokenizer


class TextWithLosses(NamedTuple):
    parts: list[tuple[str, bool]]
    """The text of consecutive tokens, and whether they have a loss."""
    num_tokens: int
    """Without padding."""
    num_trained: int


def marked_text(
    tokens: Sequence[int], labels: Sequence[int], tokenizer: Tokenizer | None, max_tokens: int | None = None
) -> TextWithLosses:
    """The text of a causal sample, at most that of its first `max_tokens`; token ids without a tokenizer."""
    trained = [False, *(label != IGNORE_INDEX for label in labels)]
    tokens = [*tokens, labels[-1] if trained[-1] else 0]
    while tokens and not (tokens[-1] or trained[len(tokens) - 1]):
        tokens.pop()  # padding
    pairs = list(zip(tokens, trained, strict=False))
    parts = [
        (_text([token for token, _ in run], tokenizer), is_trained)
        for is_trained, run in groupby(pairs[:max_tokens], key=lambda pair: pair[1])
    ]
    return TextWithLosses(parts, len(tokens), sum(is_trained for _, is_trained in pairs))


def _text(tokens: list[int], tokenizer: Tokenizer | None) -> str:
    if tokenizer is None:
        return " ".join(map(str, tokens)) + " "
    known = [token for token in tokens if token < tokenizer.vocab_size]
    texts: list[str] = []
    for is_special, run in groupby(known, key=lambda token: token in tokenizer.special_ids):
        ids = list(run)
        # The byte tokenizer has no text for its end of a document.
        texts += [tokenizer.decode([token]) or f"<{token}>" for token in ids] if is_special else [tokenizer.decode(ids)]
    return "".join(texts)
