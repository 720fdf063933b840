"""GPT-2's byte-level encoding at the speed of memory: words are found and looked up by whole arrays.

A text falls into words by GPT-2's pattern, and a word's tokens depend on the word alone. The pattern needs no more than
the kind of each character (letter, number, space, other) and its neighbours, so that the words of megabytes are found
by a few passes of numpy; each is then one lookup in a hash table of words met before. What is new goes through the
tokenizers library, once. Keys are the words' own bytes: two words never share one.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer as Fast
from tokenizers import pre_tokenizers

LETTER, NUMBER, SPACE, OTHER, UNKNOWN = range(5)
MAX_TABLE_WORD_BYTES = 15
"""Bytes of words that have a place in the table; with their length they fill two 64-bit numbers."""
BATCH_CHARACTERS = 1 << 17
"""Encoded at a time: what is at work then stays near the core (7.5 million tokens/s; 5.1 in one go of 4.8 million)."""
MAX_LONG_WORDS = 1 << 16
"""Longer words that are kept, in slots after the table's, found by a dictionary."""
TABLE_BITS = 19
"""Of a slot's number. The table takes half as many words and then stays as it is."""
LOW_MASKS = np.array([(1 << 8 * n) - 1 for n in range(8)] + [2**64 - 1] * 8, dtype=np.uint64)
HIGH_MASKS = np.array([0] * 8 + [(1 << 8 * (n - 8)) - 1 for n in range(8, 16)], dtype=np.uint64)
"""Masks by length of a word: of its first eight bytes, and of the rest."""


class FastGpt2Encoder:
    """Encodes as a `tokenizers` byte-level BPE does whose pre-tokenizer is GPT-2's pattern, and nothing else."""

    def __init__(self, tokenizer: Fast) -> None:
        self.bpe: Any = tokenizer.model
        self.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        self.byte_chars = byte_to_char()
        self.char_classes = np.full(0x110000, UNKNOWN, dtype=np.uint8)
        self._classify(np.arange(128))
        size = 1 << TABLE_BITS
        self.key_low, self.key_high = np.zeros(size, np.uint64), np.zeros(size, np.uint64)
        self.token_starts, self.token_counts = (
            np.zeros(size + MAX_LONG_WORDS, np.int64),
            np.zeros(size + MAX_LONG_WORDS, np.int64),
        )
        self.token_ids = np.zeros(1, np.int32)
        self.table_entries = 0
        self.long_words: dict[bytes, int] = {}

    def encode(self, documents: list[str]) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        """Tokens of all documents, one after the other, and how many each has."""
        parts = [self._encode_batch(part) for part in _document_batches(documents)]
        if not parts:
            return np.zeros(0, np.int32), np.zeros(0, np.int64)
        return np.concatenate([tokens for tokens, _ in parts]), np.concatenate([counts for _, counts in parts])

    def _encode_batch(self, documents: list[str]) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        text = "".join(documents)
        if not text:
            return np.zeros(0, np.int32), np.zeros(len(documents), np.int64)
        data = text.encode("utf-8", "surrogatepass")
        points: NDArray[Any] = np.frombuffer(data, np.uint8)
        if len(data) != len(text):
            points = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)
        lengths = np.fromiter(map(len, documents), np.int64, len(documents))
        ends = np.cumsum(lengths)
        begins = self._word_starts(points, ends - lengths)
        at_char = np.flatnonzero(begins)
        if len(data) == len(points):
            at_byte, total = at_char, len(data)
        else:
            wide = 1 + (points > 0x7F).view(np.uint8) + (points > 0x7FF).view(np.uint8) + (points > 0xFFFF)
            offsets = np.cumsum(wide, dtype=np.int64)
            at_byte, total = offsets[at_char] - wide[at_char], int(offsets[-1])
        slots, extra = self._find_slots(data, at_byte, total)
        return self._gather_tokens(slots, extra, np.searchsorted(at_char, ends))

    def _word_starts(self, points: NDArray[Any], starts: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Where words begin, by GPT-2's pattern; a document begins one too."""
        kinds = self.char_classes[points]
        if (kinds == UNKNOWN).any():
            self._classify(np.unique(points[kinds == UNKNOWN]))
            kinds = self.char_classes[points]
        begins = np.empty(len(points), np.bool_)
        begins[0] = True
        np.not_equal(kinds[1:], kinds[:-1], out=begins[1:])
        edge = np.zeros(len(points) + 1, np.bool_)  # a document begins here
        edge[starts] = True
        edge[-1] = True
        space = kinds == SPACE
        # The last of some spaces goes its own way: a blank joins the word after it, anything else stands alone.
        last = np.flatnonzero(space[:-1] & ~space[1:] & ~edge[1:-1])
        begins[last] = True
        begins[last[points[last] == 0x20] + 1] = False
        begins |= edge[:-1]
        self._mark_contractions(points, begins, edge)
        return begins

    def _mark_contractions(self, points: NDArray[Any], begins: NDArray[np.bool_], edge: NDArray[np.bool_]) -> None:
        """'s 't 'm 'd 're 've 'll, where a word begins with them, are words of their own."""
        at = np.flatnonzero((points == 0x27) & begins)
        at = at[at + 1 < len(points)]
        at = at[~edge[at + 1]]
        first = points[at + 1]
        short = np.isin(first, np.frombuffer(b"stmd", np.uint8))
        begins[at[short] + 1] = False
        after = at[short] + 2
        begins[after[after < len(points)]] = True
        at, first = at[~short], first[~short]
        inside = at + 2 < len(points)
        at, first = at[inside], first[inside]
        second = np.where(edge[at + 2], 0, points[at + 2])
        long = (((first == 0x72) | (first == 0x76)) & (second == 0x65)) | ((first == 0x6C) & (second == 0x6C))
        begins[at[long] + 1] = False
        after = at[long] + 3
        begins[after[after < len(points)]] = True

    def _classify(self, points: NDArray[Any]) -> None:
        """As the library sees them: a letter joins an x before it, a number a 1, a space is put aside."""
        for point in points.tolist():
            character = chr(point)
            if 0xD800 <= point < 0xE000:
                kind = OTHER
            elif len(self.pre_tokenizer.pre_tokenize_str(f"x{character}")) == 1:
                kind = LETTER
            elif len(self.pre_tokenizer.pre_tokenize_str(f"1{character}")) == 1:
                kind = NUMBER
            else:
                kind = OTHER if len(self.pre_tokenizer.pre_tokenize_str(f"!{character}")) == 1 else SPACE
            self.char_classes[point] = kind

    def _find_slots(
        self, data: bytes, at: NDArray[np.int64], total: int
    ) -> tuple[NDArray[np.int64], dict[int, list[int]]]:
        """The slot of each word; and, for words that have none (a negative slot), their tokens."""
        lengths = np.diff(at, append=total)
        padded = np.frombuffer(data + bytes(16), np.uint8)
        eights = np.ndarray((len(data) + 9,), "<u8", padded, strides=(1,))
        short = np.minimum(lengths, MAX_TABLE_WORD_BYTES)
        first = eights[at] & LOW_MASKS[short]
        last = (eights[at + 8] & HIGH_MASKS[short]) | (lengths.astype(np.uint64) << np.uint64(56))
        slots = self._lookup(first, last)
        slots[lengths > MAX_TABLE_WORD_BYTES] = -2
        new = np.flatnonzero(slots == -1)
        if len(new):
            self._insert(data, first[new], last[new], at[new], at[new] + lengths[new])
            slots[new] = self._lookup(first[new], last[new])
        without = np.flatnonzero(slots < 0)
        spans = zip(at[without].tolist(), (at + lengths)[without].tolist(), strict=True)
        words = [data[start:end] for start, end in spans]
        found = self._lookup_long(words)
        if -1 in found:
            self._insert_long(list(dict.fromkeys(word for word, slot in zip(words, found, strict=True) if slot < 0)))
            found = self._lookup_long(words)
        slots[without] = found
        rest = [which for which, slot in enumerate(found) if slot < 0]
        return slots, {int(without[which]): self._apply_bpe(words[which]) for which in rest}

    def _lookup(self, first: NDArray[np.uint64], last: NDArray[np.uint64]) -> NDArray[np.int64]:
        """Slots by key; -1 where there is none. A slot that is taken by another sends on to the next."""
        slots = self._hash_slot(first, last)
        wrong = np.flatnonzero((self.key_low[slots] != first) | (self.key_high[slots] != last))
        while len(wrong):
            here = slots[wrong]
            empty = self.key_high[here] == 0
            slots[wrong[empty]] = -1
            wrong = wrong[~empty]
            here = (slots[wrong] + 1) & ((1 << TABLE_BITS) - 1)
            slots[wrong] = here
            wrong = wrong[(self.key_low[here] != first[wrong]) | (self.key_high[here] != last[wrong])]
        return slots

    @staticmethod
    def _hash_slot(first: Any, last: Any) -> Any:
        mixed = (first ^ (last * np.uint64(0x9E3779B97F4A7C15))) * np.uint64(0xD6E8FEB86659FD93)
        return (mixed >> np.uint64(64 - TABLE_BITS)).astype(np.int64)

    def _insert(
        self,
        data: bytes,
        first: NDArray[np.uint64],
        last: NDArray[np.uint64],
        starts: NDArray[np.int64],
        ends: NDArray[np.int64],
    ) -> None:
        """Give words a slot each, as far as there is room."""
        order = np.lexsort((first, last))
        first, last = first[order], last[order]
        once = np.ones(len(order), np.bool_)
        once[1:] = (first[1:] != first[:-1]) | (last[1:] != last[:-1])
        once[np.cumsum(once) > (1 << TABLE_BITS) // 2 - self.table_entries] = False
        first, last, which = first[once], last[once], order[once]
        spans = zip(starts[which].tolist(), ends[which].tolist(), strict=True)
        place, count = self._append_tokens([self._apply_bpe(data[start:end]) for start, end in spans])
        self.table_entries += len(which)
        slots = self._hash_slot(first, last)
        left = np.arange(len(which))
        while len(left):
            # Of those that want the same free slot, one gets it; the others go on to the next.
            free = left[self.key_high[slots[left]] == 0]
            free = free[np.unique(slots[free], return_index=True)[1]]
            here = slots[free]
            self.key_low[here], self.key_high[here] = first[free], last[free]
            self.token_starts[here], self.token_counts[here] = place[free], count[free]
            left = np.setdiff1d(left, free, assume_unique=True)
            slots[left] = (slots[left] + 1) & ((1 << TABLE_BITS) - 1)

    def _lookup_long(self, words: list[bytes]) -> list[int]:
        return [self.long_words.get(word, -1) for word in words]

    def _insert_long(self, words: list[bytes]) -> None:
        words = words[: MAX_LONG_WORDS - len(self.long_words)]
        begin = (1 << TABLE_BITS) + len(self.long_words)
        slots = range(begin, begin + len(words))
        self.token_starts[begin : slots.stop], self.token_counts[begin : slots.stop] = self._append_tokens(
            list(map(self._apply_bpe, words))
        )
        self.long_words.update(zip(words, slots, strict=True))

    def _append_tokens(self, tokens: list[list[int]]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Where in `ids` each word's tokens are from now on, and how many."""
        count = np.fromiter(map(len, tokens), np.int64, len(tokens))
        place = len(self.token_ids) + np.cumsum(count) - count
        self.token_ids = np.concatenate((self.token_ids, np.array([id for row in tokens for id in row], np.int32)))
        return place, count

    def _apply_bpe(self, word: bytes) -> list[int]:
        return [token.id for token in self.bpe.tokenize(word.decode("latin-1").translate(self.byte_chars))]

    def _gather_tokens(
        self, slots: NDArray[np.int64], extra: dict[int, list[int]], ends: NDArray[np.int64]
    ) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        count = self.token_counts[slots]
        for which, tokens in extra.items():
            count[which] = len(tokens)
        after = np.cumsum(count)
        total = int(after[-1])
        before = after - count
        # Words without a slot point anywhere here, even beyond the end; their tokens come next.
        out = self.token_ids.take(np.repeat(self.token_starts[slots] - before, count) + np.arange(total), mode="clip")
        for which, tokens in extra.items():
            out[before[which] : after[which]] = tokens
        bounds = np.concatenate(([0], after))[ends]
        return out, np.diff(bounds, prepend=0)


def _document_batches(documents: list[str]) -> Iterator[list[str]]:
    """So many that they have about CHARACTERS together, or a single longer one."""
    part: list[str] = []
    length = 0
    for document in documents:
        if part and length + len(document) > BATCH_CHARACTERS:
            yield part
            part, length = [], 0
        part.append(document)
        length += len(document)
    if part:
        yield part


def byte_to_char() -> dict[int, str]:
    """The printable letter that stands for each byte in GPT-2's vocabulary."""
    own = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in own]
    return {byte: chr(byte) for byte in own} | {byte: chr(256 + number) for number, byte in enumerate(rest)}
