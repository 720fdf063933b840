"""The reference's algorithms in plain Python: what ours are measured against, in speed here and in bytes by the tests.

GPT-2's encoder works as the reference's does: a pattern finds words, each word's pairs are merged by rank, and words
met before come from a cache. The index of samples is built one sample at a time.
"""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import regex
from numpy.typing import NDArray

PATTERN = regex.compile(r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")


class ReferenceGpt2Encoder:
    def __init__(self, vocab: Path, merges: Path) -> None:
        self.token_ids: dict[str, int] = json.loads(vocab.read_text(encoding="utf-8"))
        lines = merges.read_text(encoding="utf-8").split("\n")
        pairs = [tuple(line.split()) for line in lines if line and not line.startswith("#version")]
        self.ranks = {pair: rank for rank, pair in enumerate(pairs)}
        kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
        letters = {byte: chr(byte) for byte in kept}
        for byte in range(256):
            letters.setdefault(byte, chr(256 + len(letters) - len(kept)))
        self.byte_chars = letters
        self.cache: dict[str, list[str]] = {}

    def merge_word(self, word: str) -> list[str]:
        if word not in self.cache:
            parts = list(word)
            while len(parts) > 1:
                pairs = list(pairwise(parts))
                best = min(pairs, key=lambda pair: self.ranks.get(pair, len(self.ranks)))
                if best not in self.ranks:
                    break
                merged: list[str] = []
                place = 0
                while place < len(parts):
                    if tuple(parts[place : place + 2]) == best:
                        merged.append("".join(best))
                        place += 2
                    else:
                        merged.append(parts[place])
                        place += 1
                parts = merged
            self.cache[word] = parts
        return self.cache[word]

    def encode(self, text: str) -> list[int]:
        out: list[int] = []
        for found in PATTERN.findall(text):
            word = "".join(self.byte_chars[byte] for byte in found.encode())
            out.extend(self.token_ids[part] for part in self.merge_word(word))
        return out


def reference_token_files(documents: list[list[list[int]]], dtype: str, code: int) -> tuple[bytes, bytes]:
    """.bin and .idx of documents, each a list of sequences, one number after the other."""
    sequences = [sequence for document in documents for sequence in document]
    data = b"".join(np.array(sequence, dtype).tobytes() for sequence in sequences)
    sizes = [len(sequence) for sequence in sequences]
    offsets, place = [], 0
    for size in sizes:
        offsets.append(place)
        place += size * np.dtype(dtype).itemsize
    ends = [0]
    for document in documents:
        ends.append(ends[-1] + len(document))
    index = b"MMIDIDX\x00\x00" + (1).to_bytes(8, "little") + bytes([code])
    index += len(sizes).to_bytes(8, "little") + len(ends).to_bytes(8, "little")
    for numbers, kind in ((sizes, "<i4"), (offsets, "<i8"), (ends, "<i8")):
        index += np.array(numbers, kind).tobytes()
    return data, index


def reference_gpt_samples(
    sizes: NDArray[np.int32], documents: NDArray[Any], samples: int, sequence: int, seed: int
) -> list[list[tuple[int, int, int]]]:
    """Each sample in the order of training, as pieces (sequence, first token, tokens) of sequence + 1 tokens in all."""
    per_epoch = int(sum(int(sizes[each]) for each in documents))
    epochs = 1
    while (epochs * per_epoch - 1) // sequence < samples:
        epochs += 1
    stream = np.random.RandomState(seed=seed)
    apart = False
    before = 0
    if epochs > 1:
        before = ((epochs - 1) * per_epoch - 1) // sequence
        apart = samples - before < int(0.80 * ((per_epoch - 1) // sequence))
    order: list[int] = []
    for repeated in (epochs - 1, 1) if apart else (epochs,):
        part = np.array(list(documents) * repeated, dtype=np.int32)
        stream.shuffle(part)
        order += part.tolist()
    starts = [(0, 0)]
    number = offset = 0
    for _ in range((epochs * per_epoch - 1) // sequence):
        remaining = sequence + 1
        while remaining:
            length = int(sizes[order[number]]) - offset
            remaining -= length
            if remaining <= 0:
                offset += remaining + length - 1
                remaining = 0
            else:
                number, offset = number + 1, 0
        starts.append((number, offset))
    total = len(starts) - 1
    first = np.arange(before if apart else total, dtype=np.uint32)
    stream.shuffle(first)
    last = np.arange(len(first), total, dtype=np.uint32)
    if len(last):
        stream.shuffle(last)
    found = []
    for which in [*first.tolist(), *last.tolist()][:samples]:
        (a, begin), (b, end) = starts[which], starts[which + 1]
        if a == b:
            found.append([(order[a], begin, end - begin + 1)])
            continue
        pieces = [(order[a], begin, int(sizes[order[a]]) - begin)]
        pieces += [(order[each], 0, int(sizes[order[each]])) for each in range(a + 1, b)]
        found.append([*pieces, (order[b], 0, end + 1)])
    return found
