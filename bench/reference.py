"""Megatron's data algorithms in plain Python: the reference for benchmarks (speed) and tests (bytes).

The GPT-2 encoder finds words with a pattern, merges the pairs of each word by rank and caches known words. The index
of samples is built one sample at a time.
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
        printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
        self.byte_chars = {byte: chr(byte) for byte in printable}
        for byte in range(256):
            self.byte_chars.setdefault(byte, chr(256 + len(self.byte_chars) - len(printable)))
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
                index = 0
                while index < len(parts):
                    if tuple(parts[index : index + 2]) == best:
                        merged.append("".join(best))
                        index += 2
                    else:
                        merged.append(parts[index])
                        index += 1
                parts = merged
            self.cache[word] = parts
        return self.cache[word]

    def encode(self, text: str) -> list[int]:
        tokens: list[int] = []
        for match in PATTERN.findall(text):
            word = "".join(self.byte_chars[byte] for byte in match.encode())
            tokens.extend(self.token_ids[part] for part in self.merge_word(word))
        return tokens


def reference_token_files(documents: list[list[list[int]]], dtype: str, code: int) -> tuple[bytes, bytes]:
    """Bytes of .bin and .idx for documents, each a list of sequences."""
    sequences = [sequence for document in documents for sequence in document]
    data = b"".join(np.array(sequence, dtype).tobytes() for sequence in sequences)
    lengths = [len(sequence) for sequence in sequences]
    offsets, offset = [], 0
    for length in lengths:
        offsets.append(offset)
        offset += length * np.dtype(dtype).itemsize
    document_bounds = [0]
    for document in documents:
        document_bounds.append(document_bounds[-1] + len(document))
    index = b"MMIDIDX\x00\x00" + (1).to_bytes(8, "little") + bytes([code])
    index += len(lengths).to_bytes(8, "little") + len(document_bounds).to_bytes(8, "little")
    for values, kind in ((lengths, "<i4"), (offsets, "<i8"), (document_bounds, "<i8")):
        index += np.array(values, kind).tobytes()
    return data, index


def reference_gpt_samples(
    lengths: NDArray[np.int32], documents: NDArray[Any], num_samples: int, seq_len: int, seed: int
) -> list[list[tuple[int, int, int]]]:
    """The samples in training order, each as spans (document, start, count) with seq_len + 1 tokens in total."""
    per_epoch = int(sum(int(lengths[document]) for document in documents))
    epochs = 1
    while (epochs * per_epoch - 1) // seq_len < num_samples:
        epochs += 1
    rng = np.random.RandomState(seed=seed)
    separate_last = False
    before_last = 0
    if epochs > 1:
        before_last = ((epochs - 1) * per_epoch - 1) // seq_len
        separate_last = num_samples - before_last < int(0.80 * ((per_epoch - 1) // seq_len))
    order: list[int] = []
    for repeats in (epochs - 1, 1) if separate_last else (epochs,):
        repeated = np.array(list(documents) * repeats, dtype=np.int32)
        rng.shuffle(repeated)
        order += repeated.tolist()
    starts = [(0, 0)]
    position = offset = 0
    for _ in range((epochs * per_epoch - 1) // seq_len):
        remaining = seq_len + 1
        while remaining:
            length = int(lengths[order[position]]) - offset
            remaining -= length
            if remaining <= 0:
                offset += remaining + length - 1
                remaining = 0
            else:
                position, offset = position + 1, 0
        starts.append((position, offset))
    total = len(starts) - 1
    first = np.arange(before_last if separate_last else total, dtype=np.uint32)
    rng.shuffle(first)
    last = np.arange(len(first), total, dtype=np.uint32)
    if len(last):
        rng.shuffle(last)
    samples = []
    for index in [*first.tolist(), *last.tolist()][:num_samples]:
        (a, start), (b, end) = starts[index], starts[index + 1]
        if a == b:
            samples.append([(order[a], start, end - start + 1)])
            continue
        spans = [(order[a], start, int(lengths[order[a]]) - start)]
        spans += [(order[middle], 0, int(lengths[order[middle]])) for middle in range(a + 1, b)]
        samples.append([*spans, (order[b], 0, end + 1)])
    return samples
