"""GPT-2's byte-level BPE at the speed of memory: words are found and looked up with whole numpy arrays.

GPT-2's pattern splits a text into words, and the tokens of a word depend on the word alone. The pattern needs only the
class of each character (letter, number, space, other) and its neighbors, so a few numpy passes find the words of
megabytes of text; each word is then one lookup in a hash table of known words. New words go through the tokenizers
library once. Keys are the bytes of the words, so two words never share a slot.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer as Fast
from tokenizers import pre_tokenizers

LETTER, NUMBER, SPACE, OTHER, UNKNOWN = range(5)
MAX_TABLE_WORD_BYTES = 15
"""Longest word in the table: 15 bytes and the length fill two 64-bit integers."""
BATCH_CHARACTERS = 1 << 17
"""Characters encoded at a time. They fit in the cache: 7.5 million tokens/s, against 5.1 for 4.8 million at once."""
MAX_LONG_WORDS = 1 << 16
"""Longer words that are remembered, in slots after those of the table, found by a dictionary."""
TABLE_BITS = 19
"""Base-2 logarithm of the number of slots. The table takes half as many words and then stays as it is."""
LOW_MASKS = np.array([(1 << 8 * n) - 1 for n in range(8)] + [2**64 - 1] * 8, dtype=np.uint64)
HIGH_MASKS = np.array([0] * 8 + [(1 << 8 * (n - 8)) - 1 for n in range(8, 16)], dtype=np.uint64)
"""Masks by word length: for the first eight bytes of a word, and for the rest."""


class FastGpt2Encoder:
    """Same tokens as a byte-level BPE of the `tokenizers` library with GPT-2's pattern and nothing else."""

    def __init__(self, tokenizer: Fast) -> None:
        self.bpe: Any = tokenizer.model
        self.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        self.byte_chars = byte_to_char()
        self.char_classes = np.full(0x110000, UNKNOWN, dtype=np.uint8)
        """Class of each code point, filled in on demand."""
        self._classify(np.arange(128))
        slots = 1 << TABLE_BITS
        self.key_low, self.key_high = np.zeros(slots, np.uint64), np.zeros(slots, np.uint64)
        """Word in each slot: its first eight bytes; the other bytes and its length. `key_high` is 0 in a free slot."""
        self.token_starts = np.zeros(slots + MAX_LONG_WORDS, np.int64)
        self.token_counts = np.zeros(slots + MAX_LONG_WORDS, np.int64)
        """By slot: where the tokens of its word are in `token_ids`."""
        self.token_ids = np.zeros(1, np.int32)
        self.table_entries = 0
        self.long_words: dict[bytes, int] = {}
        """Slots of words longer than MAX_TABLE_WORD_BYTES."""

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
        if len(data) == len(points):
            word_bytes, total = word_chars, len(data)
        else:
            width = 1 + (points > 0x7F).view(np.uint8) + (points > 0x7FF).view(np.uint8) + (points > 0xFFFF)
            byte_ends = np.cumsum(width, dtype=np.int64)
            word_bytes, total = byte_ends[word_chars] - width[word_chars], int(byte_ends[-1])
        slots, slotless = self._find_slots(data, word_bytes, total)
        return self._gather_tokens(slots, slotless, np.searchsorted(word_chars, document_ends))

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
        quotes = quotes[quotes + 1 < len(points)]
        quotes = quotes[~edge[quotes + 1]]
        first = points[quotes + 1]
        is_short = np.isin(first, np.frombuffer(b"stmd", np.uint8))
        starts[quotes[is_short] + 1] = False
        after = quotes[is_short] + 2
        starts[after[after < len(points)]] = True
        quotes, first = quotes[~is_short], first[~is_short]
        inside = quotes + 2 < len(points)
        quotes, first = quotes[inside], first[inside]
        second = np.where(edge[quotes + 2], 0, points[quotes + 2])
        is_long = (((first == 0x72) | (first == 0x76)) & (second == 0x65)) | ((first == 0x6C) & (second == 0x6C))
        starts[quotes[is_long] + 1] = False
        after = quotes[is_long] + 3
        starts[after[after < len(points)]] = True

    def _classify(self, points: NDArray[Any]) -> None:
        """Ask the library: a letter joins an x before it, a number a 1, other characters a !, a space nothing."""
        for point in points.tolist():
            character = chr(point)
            if 0xD800 <= point < 0xE000:
                kind = OTHER
            elif self._joins("x", character):
                kind = LETTER
            elif self._joins("1", character):
                kind = NUMBER
            else:
                kind = OTHER if self._joins("!", character) else SPACE
            self.char_classes[point] = kind

    def _joins(self, before: str, character: str) -> bool:
        return len(self.pre_tokenizer.pre_tokenize_str(before + character)) == 1

    def _find_slots(
        self, data: bytes, starts: NDArray[np.int64], total: int
    ) -> tuple[NDArray[np.int64], dict[int, list[int]]]:
        """The slot of each word, and the tokens of words without a slot (their slot is negative)."""
        lengths = np.diff(starts, append=total)
        padded = np.frombuffer(data + bytes(16), np.uint8)
        eight_bytes = np.ndarray((len(data) + 9,), "<u8", padded, strides=(1,))
        table_lengths = np.minimum(lengths, MAX_TABLE_WORD_BYTES)
        low = eight_bytes[starts] & LOW_MASKS[table_lengths]
        high = (eight_bytes[starts + 8] & HIGH_MASKS[table_lengths]) | (lengths.astype(np.uint64) << np.uint64(56))
        slots = self._lookup(low, high)
        slots[lengths > MAX_TABLE_WORD_BYTES] = -2
        new = np.flatnonzero(slots == -1)
        if len(new):
            self._insert(data, low[new], high[new], starts[new], starts[new] + lengths[new])
            slots[new] = self._lookup(low[new], high[new])
        missing = np.flatnonzero(slots < 0)
        spans = zip(starts[missing].tolist(), (starts + lengths)[missing].tolist(), strict=True)
        words = [data[start:end] for start, end in spans]
        long_slots = self._lookup_long(words)
        if -1 in long_slots:
            new_words = dict.fromkeys(word for word, slot in zip(words, long_slots, strict=True) if slot < 0)
            self._insert_long(list(new_words))
            long_slots = self._lookup_long(words)
        slots[missing] = long_slots
        slotless = [index for index, slot in enumerate(long_slots) if slot < 0]
        return slots, {int(missing[index]): self._apply_bpe(words[index]) for index in slotless}

    def _lookup(self, low: NDArray[np.uint64], high: NDArray[np.uint64]) -> NDArray[np.int64]:
        """Slots by key, -1 for unknown words. A slot that holds another word leads to the next one."""
        slots = self._hash_slot(low, high)
        searching = np.flatnonzero((self.key_low[slots] != low) | (self.key_high[slots] != high))
        while len(searching):
            free = self.key_high[slots[searching]] == 0
            slots[searching[free]] = -1
            searching = searching[~free]
            following = (slots[searching] + 1) & ((1 << TABLE_BITS) - 1)
            slots[searching] = following
            differs = (self.key_low[following] != low[searching]) | (self.key_high[following] != high[searching])
            searching = searching[differs]
        return slots

    @staticmethod
    def _hash_slot(low: Any, high: Any) -> Any:
        mixed = (low ^ (high * np.uint64(0x9E3779B97F4A7C15))) * np.uint64(0xD6E8FEB86659FD93)
        return (mixed >> np.uint64(64 - TABLE_BITS)).astype(np.int64)

    def _insert(
        self,
        data: bytes,
        low: NDArray[np.uint64],
        high: NDArray[np.uint64],
        starts: NDArray[np.int64],
        ends: NDArray[np.int64],
    ) -> None:
        """Give each distinct word a slot, as long as the table is less than half full."""
        order = np.lexsort((low, high))
        low, high = low[order], high[order]
        distinct = np.ones(len(order), np.bool_)
        distinct[1:] = (low[1:] != low[:-1]) | (high[1:] != high[:-1])
        distinct[np.cumsum(distinct) > (1 << TABLE_BITS) // 2 - self.table_entries] = False
        low, high, words = low[distinct], high[distinct], order[distinct]
        spans = zip(starts[words].tolist(), ends[words].tolist(), strict=True)
        token_starts, token_counts = self._append_tokens([self._apply_bpe(data[start:end]) for start, end in spans])
        self.table_entries += len(words)
        slots = self._hash_slot(low, high)
        remaining = np.arange(len(words))
        while len(remaining):
            # One of the words that hash to the same free slot gets it; the others try the next slot.
            placed = remaining[self.key_high[slots[remaining]] == 0]
            placed = placed[np.unique(slots[placed], return_index=True)[1]]
            targets = slots[placed]
            self.key_low[targets], self.key_high[targets] = low[placed], high[placed]
            self.token_starts[targets], self.token_counts[targets] = token_starts[placed], token_counts[placed]
            remaining = np.setdiff1d(remaining, placed, assume_unique=True)
            slots[remaining] = (slots[remaining] + 1) & ((1 << TABLE_BITS) - 1)

    def _lookup_long(self, words: list[bytes]) -> list[int]:
        return [self.long_words.get(word, -1) for word in words]

    def _insert_long(self, words: list[bytes]) -> None:
        words = words[: MAX_LONG_WORDS - len(self.long_words)]
        start = (1 << TABLE_BITS) + len(self.long_words)
        slots = slice(start, start + len(words))
        self.token_starts[slots], self.token_counts[slots] = self._append_tokens(list(map(self._apply_bpe, words)))
        self.long_words.update(zip(words, range(slots.start, slots.stop), strict=True))

    def _append_tokens(self, tokens: list[list[int]]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Append the tokens of words to `token_ids`; returns the start and the count of each word."""
        counts = np.fromiter(map(len, tokens), np.int64, len(tokens))
        starts = len(self.token_ids) + np.cumsum(counts) - counts
        self.token_ids = np.concatenate((self.token_ids, np.array([id for word in tokens for id in word], np.int32)))
        return starts, counts

    def _apply_bpe(self, word: bytes) -> list[int]:
        return [token.id for token in self.bpe.tokenize(word.decode("latin-1").translate(self.byte_chars))]

    def _gather_tokens(
        self, slots: NDArray[np.int64], slotless: dict[int, list[int]], document_ends: NDArray[np.int64]
    ) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        """The tokens of all words, and the number of tokens of each document (`document_ends` counts words)."""
        counts = self.token_counts[slots]
        for word, tokens in slotless.items():
            counts[word] = len(tokens)
        ends = np.cumsum(counts)
        total = int(ends[-1])
        starts = ends - counts
        # Indices of words without a slot are arbitrary here, even out of bounds; their tokens are filled in below.
        out = self.token_ids.take(np.repeat(self.token_starts[slots] - starts, counts) + np.arange(total), mode="clip")
        for word, tokens in slotless.items():
            out[starts[word] : ends[word]] = tokens
        bounds = np.concatenate(([0], ends))[document_ends]
        return out, np.diff(bounds, prepend=0)


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


def byte_to_char() -> dict[int, str]:
    """The printable character that stands for each byte in GPT-2's vocabulary."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + number) for number, byte in enumerate(rest)}
