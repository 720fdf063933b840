"""GPT-2's byte-level BPE with whole arrays: numpy finds the words, Arrow the distinct ones, a table has their tokens.

GPT-2's pattern splits a text into words, and the tokens of a word depend on the word alone. The pattern needs only the
class of each character (letter, number, space, other) and its neighbors, so a few numpy passes find the words of a
text. Only new words go through the tokenizers library.
"""

from array import array
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from tokenizers import Tokenizer as Fast
from tokenizers import pre_tokenizers

LETTER, NUMBER, SPACE, OTHER, UNKNOWN = range(5)
BATCH_CHARACTERS = 1 << 19
"""Characters encoded at a time. Larger batches repeat more words, smaller ones fit in the cache: 5.6 million tokens per
CPU second, against 4.5 for 1 << 17 and 5.2 for 1 << 20."""
CLASS_EXAMPLES = ((LETTER, "x"), (NUMBER, "1"), (OTHER, "!"))
MAX_TABLE_TOKENS = 1 << 20
"""The table of known words starts over when they have more tokens."""


class WordTable(dict[bytes, int]):
    """The index of each known word, by its bytes. Looking up a new word adds it."""

    def __init__(self, tokenizer: Fast, byte_chars: dict[int, str]) -> None:
        self.bpe: Any = tokenizer.model
        self.byte_chars = byte_chars
        self.token_ids = array("i", [0])
        """Tokens of all words, one after the other; the first one is unused."""
        self.token_starts, self.token_counts = array("q"), array("q")
        """By word index: where its tokens are in `token_ids`."""

    def __missing__(self, word: bytes) -> int:
        tokens = self.bpe.tokenize(word.decode("latin-1").translate(self.byte_chars))
        self.token_starts.append(len(self.token_ids))
        self.token_counts.append(len(tokens))
        self.token_ids.extend(token.id for token in tokens)
        index = self[word] = len(self)
        return index


class FastGpt2Encoder:
    """Same tokens as a byte-level BPE of the `tokenizers` library with GPT-2's pattern and nothing else."""

    def __init__(self, tokenizer: Fast, byte_chars: dict[int, str]) -> None:
        """`byte_chars` has the character that stands for each byte in the vocabulary."""
        self.tokenizer, self.words = tokenizer, WordTable(tokenizer, byte_chars)
        self.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        self.char_classes = np.full(0x110000, UNKNOWN, dtype=np.uint8)
        """Class of each code point, filled in on demand."""
        self._classify(np.arange(128))

    def encode(self, documents: list[str]) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        """Tokens of all documents, one after the other, and the number of tokens of each."""
        batches = [self._encode_batch(batch) for batch in _document_batches(documents)]
        if not batches:
            return np.zeros(0, np.int32), np.zeros(0, np.int64)
        return np.concatenate([tokens for tokens, _ in batches]), np.concatenate([counts for _, counts in batches])

    def _encode_batch(self, documents: list[str]) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        text = "".join(documents)
        if not text:
            return np.zeros(0, np.int32), np.zeros(len(documents), np.int64)
        data = text.encode("utf-8", "surrogatepass")
        points: NDArray[Any] = np.frombuffer(data, np.uint8)
        if len(data) != len(text):
            points = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)
        lengths = np.fromiter(map(len, documents), np.int64, len(documents))
        document_ends = np.cumsum(lengths)
        word_chars = np.flatnonzero(self._word_starts(points, document_ends - lengths))
        word_bytes = word_chars
        if len(data) != len(text):
            width = 1 + (points > 0x7F).view(np.uint8) + (points > 0x7FF).view(np.uint8) + (points > 0xFFFF)
            word_bytes = np.cumsum(width, dtype=np.int64)[word_chars] - width[word_chars]
        tokens, word_ends = self._look_up(data, np.append(word_bytes, len(data)))
        return tokens, np.diff(word_ends[np.searchsorted(word_chars, document_ends)], prepend=0)

    def _look_up(self, data: bytes, bounds: NDArray[np.int64]) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        """The tokens of the words between these bounds, and their number before each word and after the last."""
        if len(self.words.token_ids) > MAX_TABLE_TOKENS:
            self.words = WordTable(self.tokenizer, self.words.byte_chars)
        table = self.words
        buffers = [None, pa.py_buffer(bounds), pa.py_buffer(data)]
        words = pa.Array.from_buffers(pa.large_binary(), len(bounds) - 1, buffers).dictionary_encode()
        distinct = words.dictionary.to_pylist()  # Python sees each distinct word once
        rows = np.fromiter(map(table.__getitem__, distinct), np.int64, len(distinct))[words.indices.to_numpy()]
        starts, counts = (np.frombuffer(column, np.int64)[rows] for column in (table.token_starts, table.token_counts))
        ends = np.cumsum(counts)
        source = np.repeat(starts - ends + counts, counts) + np.arange(ends[-1])
        return np.frombuffer(table.token_ids, np.int32)[source], np.append(0, ends)

    def _word_starts(self, points: NDArray[Any], document_starts: NDArray[np.int64]) -> NDArray[np.bool_]:
        """True at the first character of each word by GPT-2's pattern, and of each document."""
        classes = self.char_classes[points]
        if (classes == UNKNOWN).any():
            self._classify(np.unique(points[classes == UNKNOWN]))
            classes = self.char_classes[points]
        starts = np.empty(len(points), np.bool_)
        starts[0] = True
        np.not_equal(classes[1:], classes[:-1], out=starts[1:])
        edge = np.zeros(len(points) + 1, np.bool_)  # a document starts here
        edge[document_starts] = True
        edge[-1] = True
        space = classes == SPACE
        # The last of a run of spaces is special: a blank joins the next word, anything else is a word of its own.
        last = np.flatnonzero(space[:-1] & ~space[1:] & ~edge[1:-1])
        starts[last] = True
        starts[last[points[last] == 0x20] + 1] = False
        starts |= edge[:-1]
        self._mark_contractions(points, starts, edge)
        return starts

    def _mark_contractions(self, points: NDArray[Any], starts: NDArray[np.bool_], edge: NDArray[np.bool_]) -> None:
        """'s 't 'm 'd 're 've 'll at the start of a word are words of their own."""
        quotes = np.flatnonzero((points == 0x27) & starts)
        first = np.where(edge[quotes + 1], 0, points.take(quotes + 1, mode="clip"))
        second = np.where(edge.take(quotes + 2, mode="clip"), 0, points.take(quotes + 2, mode="clip"))
        r, v, e, l = b"rvel"  # noqa: E741
        is_short = np.isin(first, list(b"stmd"))
        is_long = (((first == r) | (first == v)) & (second == e)) | ((first == l) & (second == l))
        for contractions, length in ((quotes[is_short], 2), (quotes[is_long], 3)):
            starts[contractions + 1] = False
            after = contractions + length
            starts[after[after < len(points)]] = True

    def _classify(self, points: NDArray[Any]) -> None:
        """Ask the library: a letter joins an x before it, a number a 1, other characters a !, a space nothing."""

        def joins(before: str, point: int) -> bool:
            return len(self.pre_tokenizer.pre_tokenize_str(before + chr(point))) == 1

        for point in points.tolist():
            is_surrogate = 0xD800 <= point < 0xE000
            matches = (kind for kind, example in CLASS_EXAMPLES if joins(example, point))
            self.char_classes[point] = OTHER if is_surrogate else next(matches, SPACE)


def _document_batches(documents: list[str]) -> Iterator[list[str]]:
    """Documents with about BATCH_CHARACTERS together, or a single longer one."""
    batch: list[str] = []
    length = 0
    for document in documents:
        if batch and length + len(document) > BATCH_CHARACTERS:
            yield batch
            batch, length = [], 0
        batch.append(document)
        length += len(document)
    if batch:
        yield batch
