"""What of a sample is trained, as text that people can check."""

from collections.abc import Sequence
from itertools import groupby, pairwise
from typing import NamedTuple

from trainyard.core.constants import IGNORE_INDEX
from trainyard.data.text.tokenizer import Tokenizer


class TextWithLosses(NamedTuple):
    parts: list[tuple[str, bool]]
    """The text of consecutive tokens, and whether they have a loss."""
    num_tokens: int
    """Without padding."""
    num_trained: int


class PairTexts(NamedTuple):
    """Two answers, and apart from them what both begin with."""

    prompt: TextWithLosses
    """None of its tokens has a loss."""
    chosen: TextWithLosses
    rejected: TextWithLosses


def marked_text(
    tokens: Sequence[int], labels: Sequence[int], tokenizer: Tokenizer | None, max_tokens: int | None = None
) -> TextWithLosses:
    """The text of a causal sample, at most that of its first `max_tokens`; token ids without a tokenizer."""
    trained = [False, *(label != IGNORE_INDEX for label in labels)]
    tokens = [*tokens, labels[-1] if trained[-1] else 0]
    while tokens and not (tokens[-1] or trained[len(tokens) - 1]):
        tokens.pop()  # padding
    return _marked(list(zip(tokens, trained, strict=False)), tokenizer, max_tokens)


def marked_pairs(
    tokens: Sequence[int],
    labels: Sequence[int],
    document_ids: Sequence[int],
    tokenizer: Tokenizer | None,
    max_tokens: int | None = None,
) -> list[PairTexts]:
    """The pairs of a sample: its even documents are chosen answers with their prompts, and the rejected ones follow.
    Of each of the three texts of a pair, at most the first `max_tokens` are shown."""
    trained = [False, *(label != IGNORE_INDEX for label in labels[:-1])]
    marks = list(zip(tokens, trained, strict=True))
    starts = [0, *(at for at, (before, here) in enumerate(pairwise(document_ids), 1) if before != here)]
    documents = [marks[start:end] for start, end in pairwise([*starts, len(marks)])]
    pairs = []
    for chosen, rejected in zip(documents[::2], documents[1::2], strict=False):  # padding is a document without another
        both = enumerate(zip(chosen, rejected, strict=False))
        split = next((at for at, (one, other) in both if one != other or one[1]), min(len(chosen), len(rejected)))
        texts = (chosen[:split], chosen[split:], rejected[split:])
        pairs.append(PairTexts(*(_marked(text, tokenizer, max_tokens) for text in texts)))
    return pairs


def _marked(marks: list[tuple[int, bool]], tokenizer: Tokenizer | None, max_tokens: int | None) -> TextWithLosses:
    parts = [
        (_text([token for token, _ in run], tokenizer), is_trained)
        for is_trained, run in groupby(marks[:max_tokens], key=lambda mark: mark[1])
    ]
    return TextWithLosses(parts, len(marks), sum(is_trained for _, is_trained in marks))


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
