"""Samples for causal models: `seq_len` inputs and as many labels, cut from a stream of tokens.

The stream is all documents one after the other (`ContiguousTokens`) or sequences in a given order
(`ReorderedTokens`). Sample n starts at token n * seq_len and its last label is the first input of sample n + 1, so an
epoch has every token as a label once (except the very first, which has no context). The last sample is filled up with
labels IGNORE_INDEX.
"""

from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from trainyard.core.constants import IGNORE_INDEX
from trainyard.core.errors import UserError
from trainyard.data.formats.megatron_bin import MegatronTokens, Tokens
from trainyard.data.formats.remote_tokens import RemoteTokens, Rows
from trainyard.data.samples import Sample, document_ids
from trainyard.remote.chunks.cached_file import Positions


class TokenStream(Protocol):
    """A long sequence of tokens, never entirely in memory."""

    name: str
    is_remote: bool

    def __len__(self) -> int: ...

    def tokens(self, start: int, count: int) -> Tokens: ...

    def fill(self, rows: Rows, starts: Positions, lengths: Positions) -> None:
        """Copy `lengths` tokens from `starts` on to the beginning of each row."""

    def fetch(self, starts: Positions, lengths: Positions) -> None:
        """Fetch these tokens in the background, if they are not on this host."""

    def document_starts(self, start: int, end: int) -> NDArray[np.int64]:
        """Positions from `start` to `end` (exclusive) at which documents start."""

    def describe(self, position: int) -> str:
        """Which token of which file is at a position."""


class ContiguousTokens:
    """Documents in the order in which they lie in memory or in a file."""

    def __init__(self, name: str, tokens: Tokens | RemoteTokens, document_starts: NDArray[np.int64]) -> None:
        """`document_starts`: position of the first token of each document, increasing."""
        self.name, self.all_tokens, self.all_document_starts = name, tokens, document_starts
        self.is_remote = isinstance(tokens, RemoteTokens)

    def __len__(self) -> int:
        return len(self.all_tokens)

    def tokens(self, start: int, count: int) -> Tokens:
        return self.all_tokens[start : start + count]

    def fill(self, rows: Rows, starts: Positions, lengths: Positions) -> None:
        tokens = _local_array(self.all_tokens)
        if isinstance(tokens, RemoteTokens):
            tokens.fill(rows, starts, lengths)
            return
        for row, start, length in zip(rows, starts.tolist(), lengths.tolist(), strict=True):
            row[:length] = tokens[start : start + length]

    def fetch(self, starts: Positions, lengths: Positions) -> None:
        if isinstance(self.all_tokens, RemoteTokens):
            self.all_tokens.fetch(starts, lengths)

    def document_starts(self, start: int, end: int) -> NDArray[np.int64]:
        return self.all_document_starts[slice(*np.searchsorted(self.all_document_starts, (start, end)))]

    def describe(self, position: int) -> str:
        document = int(np.searchsorted(self.all_document_starts, position, side="right")) - 1
        return f"{self.name}, token {position} (document {document})"


class ReorderedTokens:
    """Sequences of token files in any order, each as often as `sequence_order` names it."""

    def __init__(self, token_files: MegatronTokens, sequence_order: NDArray[np.int32]) -> None:
        self.name, self.token_files, self.sequence_order = str(token_files.prefix), token_files, sequence_order
        self.is_remote = isinstance(token_files.tokens, RemoteTokens)
        self.sequence_ends = np.cumsum(token_files.sequence_lengths[sequence_order], dtype=np.int64)
        """End of each sequence in the stream."""

    def __len__(self) -> int:
        return int(self.sequence_ends[-1]) if len(self.sequence_ends) else 0

    def tokens(self, start: int, count: int) -> Tokens:
        tokens = self.token_files.tokens
        return np.concatenate([tokens[first:last] for first, last in self._file_spans(start, count)])

    def fill(self, rows: Rows, starts: Positions, lengths: Positions) -> None:
        tokens = _local_array(self.token_files.tokens)
        if isinstance(tokens, RemoteTokens):
            tokens.fetch(*self._all_file_spans(starts, lengths), wait=True)
        for row, start, length in zip(rows, starts.tolist(), lengths.tolist(), strict=True):
            position = 0
            for first, last in self._file_spans(start, length):
                row[position : position + last - first] = tokens[first:last]
                position += last - first

    def fetch(self, starts: Positions, lengths: Positions) -> None:
        tokens = _local_array(self.token_files.tokens)
        if isinstance(tokens, RemoteTokens):
            tokens.fetch(*self._all_file_spans(starts, lengths))

    def _all_file_spans(self, starts: Positions, lengths: Positions) -> tuple[Positions, Positions]:
        """Starts and lengths in the file."""
        ranges = zip(starts.tolist(), lengths.tolist(), strict=True)
        spans = np.array([span for start, count in ranges for span in self._file_spans(start, count)], np.int64)
        first, last = spans.reshape(-1, 2).T
        return first, last - first

    def _file_spans(self, start: int, count: int) -> Iterator[tuple[int, int]]:
        """The ranges of tokens of the file that make up a range of the stream."""
        index = int(np.searchsorted(self.sequence_ends, start, side="right"))
        while count > 0 and index < len(self.sequence_order):
            file_end = int(self.token_files.sequence_bounds[int(self.sequence_order[index]) + 1])
            first = file_end - (int(self.sequence_ends[index]) - start)
            length = min(file_end - first, count)
            if length:
                yield first, first + length
            start, count, index = start + length, count - length, index + 1

    def document_starts(self, start: int, end: int) -> NDArray[np.int64]:
        first, last = np.searchsorted(self.sequence_ends, (start, end))
        ends = self.sequence_ends[first:last]
        ends = ends[np.diff(ends, prepend=-1) > 0]  # an empty document starts nothing
        return ends if start else np.concatenate((np.zeros(1, np.int64), ends))

    def describe(self, position: int) -> str:
        index = int(np.searchsorted(self.sequence_ends, position, side="right"))
        sequence = int(self.sequence_order[index])
        offset = position - (int(self.sequence_ends[index]) - int(self.token_files.sequence_lengths[sequence]))
        return f"{self.name}, token {offset} of document {sequence}"


def _local_array(tokens: Tokens | RemoteTokens) -> Tokens | RemoteTokens:
    """The tokens as an array, if they are on this host."""
    array = tokens.array() if isinstance(tokens, RemoteTokens) else tokens
    return tokens if array is None else array


def token_stream(token_files: MegatronTokens, sequences: range) -> TokenStream:
    """A range of sequences in the order of their index, read from the file without copies."""
    bounds = token_files.sequence_bounds[sequences.start : sequences.stop + 1]
    tokens = token_files.span(int(bounds[0]), int(bounds[-1]))
    return ContiguousTokens(str(token_files.prefix), tokens, bounds[:-1] - bounds[0])


class TokenSamples:
    """A dataset of samples cut from a token stream."""

    def __init__(
        self,
        stream: TokenStream,
        seq_len: int,
        vocab_size: int,
        document_mask: bool = False,
        mask_eod_loss: bool = False,
    ) -> None:
        """`document_mask` adds `document_ids`; `mask_eod_loss` ignores the loss on the first token of a document."""
        self.stream, self.seq_len, self.vocab_size = stream, seq_len, vocab_size
        self.stride = seq_len
        """Tokens from the start of a sample to the start of the next one."""
        self.document_mask, self.mask_eod_loss = document_mask, mask_eod_loss
        self.is_remote = stream.is_remote

    def __len__(self) -> int:
        """The last sample may be partial, but a stream without a full sample has none."""
        num_labels = len(self.stream) - 1
        return -(-num_labels // self.seq_len) if num_labels >= self.seq_len else 0

    def samples(self, indices: NDArray[np.int64]) -> Sample:
        width = self.seq_len + 1
        windows = np.zeros((len(indices), width), np.int32)
        lengths = np.minimum(len(self.stream) - indices * self.stride, width)
        self.stream.fill(windows, indices * self.stride, lengths)
        if windows.size and (windows.max() >= self.vocab_size or windows.min() < 0):
            self._raise_token_out_of_range(windows, indices)
        tokens, labels = windows[:, :-1], windows[:, 1:]
        if (lengths < width).any() or self.mask_eod_loss:
            labels = labels.copy()
            labels[np.arange(1, width) >= lengths[:, None]] = IGNORE_INDEX
        if not (self.document_mask or self.mask_eod_loss):
            return {"tokens": tokens, "labels": labels}
        starts = self._document_starts(indices, lengths)
        if self.mask_eod_loss:
            labels[starts[:, 1:]] = IGNORE_INDEX
        return {"tokens": tokens, "labels": labels, **(document_ids(starts[:, :-1]) if self.document_mask else {})}

    def fetch(self, indices: NDArray[np.int64]) -> None:
        starts = indices * self.stride
        self.stream.fetch(starts, np.minimum(len(self.stream) - starts, self.seq_len + 1))

    def source(self, index: int) -> str:
        return self.stream.describe(index * self.stride)

    def _document_starts(self, indices: NDArray[np.int64], lengths: NDArray[np.int64]) -> NDArray[np.bool_]:
        """[len(indices), seq_len + 1] True at the first token of each document."""
        starts = np.zeros((len(indices), self.seq_len + 1), np.bool_)
        for row, index, length in zip(starts, indices.tolist(), lengths.tolist(), strict=True):
            first = index * self.stride
            row[self.stream.document_starts(first, first + length) - first] = True
        return starts

    def _raise_token_out_of_range(self, windows: NDArray[Any], indices: NDArray[np.int64]) -> None:
        row, column = np.argwhere((windows >= self.vocab_size) | (windows < 0))[0]
        raise UserError(
            f"{self.stream.name}: token {windows[row, column]} at {indices[row] * self.stride + column}, but "
            f"model.vocab={self.vocab_size}; the tokens come from another tokenizer, or model.vocab is too small"
        )
