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
from trainyard.data.formats.megatron_bin import Indexed, Tokens

IGNORED = -100


class Row(Protocol):
    """A long row of tokens, never all in memory."""

    name: str

    def __len__(self) -> int: ...

    def tokens(self, start: int, count: int) -> Tokens: ...

    def begins(self, start: int, end: int) -> NDArray[np.int64]:
        """Where documents begin, from the token `start` up to, but not with, `end`."""


class Flat:
    """Documents as they lie in memory or in a file."""

    def __init__(self, name: str, tokens: Tokens, begins: NDArray[np.int64]) -> None:
        """`begins`: the first token of each document, rising."""
        self.name, self.all, self.at = name, tokens, begins

    def __len__(self) -> int:
        return len(self.all)

    def tokens(self, start: int, count: int) -> Tokens:
        return self.all[start : start + count]

    def begins(self, start: int, end: int) -> NDArray[np.int64]:
        return self.at[slice(*np.searchsorted(self.at, (start, end)))]


class Chain:
    """Sequences of a set in any order, each as often as it is named."""

    def __init__(self, data: Indexed, order: NDArray[np.int32]) -> None:
        self.name, self.data, self.order = str(data.prefix), data, order
        self.ends = np.cumsum(data.sizes[order], dtype=np.int64)
        """Where each sequence of the chain ends."""

    def __len__(self) -> int:
        return int(self.ends[-1]) if len(self.ends) else 0

    def tokens(self, start: int, count: int) -> Tokens:
        return np.concatenate(list(self._parts(start, count)))

    def _parts(self, start: int, count: int) -> Iterator[Tokens]:
        number = int(np.searchsorted(self.ends, start, side="right"))
        while count > 0 and number < len(self.order):
            sequence = self.data.sequence(int(self.order[number]))
            begin = int(self.ends[number]) - len(sequence)
            part = sequence[start - begin : start - begin + count]
            yield part
            start, count, number = start + len(part), count - len(part), number + 1

    def begins(self, start: int, end: int) -> NDArray[np.int64]:
        first, last = np.searchsorted(self.ends, (start, end))
        inside = self.ends[first:last]
        inside = inside[np.diff(inside, prepend=-1) > 0]  # an empty document begins nothing
        return inside if start else np.concatenate((np.zeros(1, np.int64), inside))


class Rows:
    """A Source of such samples."""

    def __init__(self, row: Row, sequence: int, vocab: int, separate: bool = False, mask_ends: bool = False) -> None:
        """With `separate`, documents are kept apart; with `mask_ends`, what begins a document is not predicted."""
        self.row, self.sequence, self.vocab = row, sequence, vocab
        self.separate, self.mask_ends = separate, mask_ends

    def __len__(self) -> int:
        """0 where not a single sample is whole."""
        labels = len(self.row) - 1
        return -(-labels // self.sequence) if labels >= self.sequence else 0

    def samples(self, numbers: NDArray[np.int64]) -> dict[str, NDArray[np.int32]]:
        width, total = self.sequence + 1, len(self.row)
        rows = np.zeros((len(numbers), width), np.int32)
        lengths = np.minimum(total - numbers * self.sequence, width)
        for row, start, length in zip(rows, (numbers * self.sequence).tolist(), lengths.tolist(), strict=True):
            row[:length] = self.row.tokens(start, length)
        if rows.size and (rows.max() >= self.vocab or rows.min() < 0):
            self._complain(rows, numbers)
        tokens, labels = rows[:, :-1], rows[:, 1:]
        short = lengths < width
        if short.any() or self.mask_ends:
            labels = labels.copy()
            labels[np.arange(1, width) >= lengths[:, None]] = IGNORED
        if not (self.separate or self.mask_ends):
            return {"tokens": tokens, "labels": labels}
        begins = self._begins(numbers, lengths)
        if self.mask_ends:
            labels[begins[:, 1:]] = IGNORED
        return {"tokens": tokens, "labels": labels, **(apart(begins[:, :-1]) if self.separate else {})}

    def _begins(self, numbers: NDArray[np.int64], lengths: NDArray[np.int64]) -> NDArray[np.bool_]:
        begins = np.zeros((len(numbers), self.sequence + 1), np.bool_)
        for row, number, length in zip(begins, numbers.tolist(), lengths.tolist(), strict=True):
            start = number * self.sequence
            row[self.row.begins(start, start + length) - start] = True
        return begins

    def _complain(self, rows: NDArray[Any], numbers: NDArray[np.int64]) -> None:
        which, place = np.argwhere((rows >= self.vocab) | (rows < 0))[0]
        raise UserError(
            f"{self.row.name}: token {rows[which, place]} at {numbers[which] * self.sequence + place}, but model.vocab="
            f"{self.vocab}; the tokens are of another tokenizer, or model.vocab is too small"
        )


def apart(begins: NDArray[np.bool_]) -> dict[str, NDArray[np.int32]]:
    """Which document of its sample each token is in, and its position there. The first token begins one anyway."""
    begins = begins.copy()
    begins[:, 0] = False
    place = np.arange(begins.shape[1], dtype=np.int32)
    first = np.maximum.accumulate(np.where(begins, place, 0), axis=1)
    return {"documents": begins.cumsum(1, dtype=np.int32), "positions": (place - first).astype(np.int32)}
