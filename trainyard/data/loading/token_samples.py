"""Samples for causal models: rows of `sequence` inputs and as many labels, cut from a long row of tokens.

The row is all documents one after the other (`Flat`), or in an order of its own (`Chain`). Sample number n begins at
token n * sequence and its last label is the next one's first input, so that an epoch has every token as a label once
(but for the very first, which nothing predicts). The last sample is filled up with labels that count nowhere.
"""

from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from trainyard.core.errors import UserError
from trainyard.data.formats.megatron_bin import MegatronTokens, Tokens

IGNORE_INDEX = -100


class TokenStream(Protocol):
    """A long row of tokens, never all in memory."""

    name: str

    def __len__(self) -> int: ...

    def tokens(self, start: int, count: int) -> Tokens: ...

    def document_starts(self, start: int, end: int) -> NDArray[np.int64]:
        """Where documents begin, from the token `start` up to, but not with, `end`."""


class ContiguousTokens:
    """Documents as they lie in memory or in a file."""

    def __init__(self, name: str, tokens: Tokens, document_starts: NDArray[np.int64]) -> None:
        """`begins`: the first token of each document, rising."""
        self.name, self.all_tokens, self.all_document_starts = name, tokens, document_starts

    def __len__(self) -> int:
        return len(self.all_tokens)

    def tokens(self, start: int, count: int) -> Tokens:
        return self.all_tokens[start : start + count]

    def document_starts(self, start: int, end: int) -> NDArray[np.int64]:
        return self.all_document_starts[slice(*np.searchsorted(self.all_document_starts, (start, end)))]


class ReorderedTokens:
    """Sequences of a set in any order, each as often as it is named."""

    def __init__(self, token_files: MegatronTokens, sequence_order: NDArray[np.int32]) -> None:
        self.name, self.token_files, self.sequence_order = str(token_files.prefix), token_files, sequence_order
        self.sequence_ends = np.cumsum(token_files.sequence_lengths[sequence_order], dtype=np.int64)
        """Where each sequence of the chain ends."""

    def __len__(self) -> int:
        return int(self.sequence_ends[-1]) if len(self.sequence_ends) else 0

    def tokens(self, start: int, count: int) -> Tokens:
        return np.concatenate(list(self._sequence_spans(start, count)))

    def _sequence_spans(self, start: int, count: int) -> Iterator[Tokens]:
        number = int(np.searchsorted(self.sequence_ends, start, side="right"))
        while count > 0 and number < len(self.sequence_order):
            sequence = self.token_files.sequence(int(self.sequence_order[number]))
            begin = int(self.sequence_ends[number]) - len(sequence)
            part = sequence[start - begin : start - begin + count]
            yield part
            start, count, number = start + len(part), count - len(part), number + 1

    def document_starts(self, start: int, end: int) -> NDArray[np.int64]:
        first, last = np.searchsorted(self.sequence_ends, (start, end))
        inside = self.sequence_ends[first:last]
        inside = inside[np.diff(inside, prepend=-1) > 0]  # an empty document begins nothing
        return inside if start else np.concatenate((np.zeros(1, np.int64), inside))


class TokenSamples:
    """A Source of such samples."""

    def __init__(
        self,
        stream: TokenStream,
        seq_len: int,
        vocab_size: int,
        document_mask: bool = False,
        mask_eod_loss: bool = False,
    ) -> None:
        """With `separate`, documents are kept apart; with `mask_ends`, what begins a document is not predicted."""
        self.stream, self.seq_len, self.vocab_size = stream, seq_len, vocab_size
        self.document_mask, self.mask_eod_loss = document_mask, mask_eod_loss

    def __len__(self) -> int:
        """0 where not a single sample is whole."""
        labels = len(self.stream) - 1
        return -(-labels // self.seq_len) if labels >= self.seq_len else 0

    def samples(self, indices: NDArray[np.int64]) -> dict[str, NDArray[np.int32]]:
        width, total = self.seq_len + 1, len(self.stream)
        rows = np.zeros((len(indices), width), np.int32)
        lengths = np.minimum(total - indices * self.seq_len, width)
        for row, start, length in zip(rows, (indices * self.seq_len).tolist(), lengths.tolist(), strict=True):
            row[:length] = self.stream.tokens(start, length)
        if rows.size and (rows.max() >= self.vocab_size or rows.min() < 0):
            self._raise_token_out_of_range(rows, indices)
        tokens, labels = rows[:, :-1], rows[:, 1:]
        short = lengths < width
        if short.any() or self.mask_eod_loss:
            labels = labels.copy()
            labels[np.arange(1, width) >= lengths[:, None]] = IGNORE_INDEX
        if not (self.document_mask or self.mask_eod_loss):
            return {"tokens": tokens, "labels": labels}
        begins = self._document_starts(indices, lengths)
        if self.mask_eod_loss:
            labels[begins[:, 1:]] = IGNORE_INDEX
        return {"tokens": tokens, "labels": labels, **(document_ids(begins[:, :-1]) if self.document_mask else {})}

    def _document_starts(self, numbers: NDArray[np.int64], lengths: NDArray[np.int64]) -> NDArray[np.bool_]:
        begins = np.zeros((len(numbers), self.seq_len + 1), np.bool_)
        for row, number, length in zip(begins, numbers.tolist(), lengths.tolist(), strict=True):
            start = number * self.seq_len
            row[self.stream.document_starts(start, start + length) - start] = True
        return begins

    def _raise_token_out_of_range(self, rows: NDArray[Any], numbers: NDArray[np.int64]) -> None:
        which, place = np.argwhere((rows >= self.vocab_size) | (rows < 0))[0]
        raise UserError(
            f"{self.stream.name}: token {rows[which, place]} at {numbers[which] * self.seq_len + place}, but model.vocab="
            f"{self.vocab_size}; the tokens are of another tokenizer, or model.vocab is too small"
        )


def document_ids(begins: NDArray[np.bool_]) -> dict[str, NDArray[np.int32]]:
    """Which document of its sample each token is in, and its position there. The first token begins one anyway."""
    begins = begins.copy()
    begins[:, 0] = False
    place = np.arange(begins.shape[1], dtype=np.int32)
    first = np.maximum.accumulate(np.where(begins, place, 0), axis=1)
    return {"document_ids": begins.cumsum(1, dtype=np.int32), "position_ids": (place - first).astype(np.int32)}
