"""Samples made of whole documents, such as conversations: one document each, or as many as fit.

Packing is best fit decreasing: the longest document first, each into the fullest sample that still has room for it.
Documents of one length are placed together, so a million of them take about a second. The result is a function of the
lengths alone; the loader shuffles packs like any other samples.
"""

import hashlib
from bisect import bisect_left, insort
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from trainyard.config.data_schema import DataSection
from trainyard.core.constants import IGNORE_INDEX
from trainyard.core.errors import UserError
from trainyard.data.loading.dataset import Dataset, Indices
from trainyard.data.samples import Sample, document_ids

ReadDocument = Callable[[int], tuple[NDArray[np.int32], NDArray[np.bool_]]]


class Documents(Protocol):
    """Numbered documents, some of whose tokens are trained."""

    lengths: NDArray[np.int32]
    """Tokens of each document."""

    def document(self, index: int) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
        """The tokens of a document, and which of them a model learns to predict."""

    def source(self, index: int) -> str:
        """Where a document comes from, for people."""


class Pairs(Documents, Protocol):
    """Documents that are two: a chosen answer with its prompt, and a rejected one."""

    def split(self, index: int) -> int:
        """Where the second begins."""

    def value(self, index: int) -> float:
        """By how much the reward of the chosen answer shall be larger."""


def document_samples(documents: Documents, data: DataSection, pad_token: int) -> Dataset:
    """The samples that a source of documents has."""
    samples = PackedSamples if data.packing else PaddedSamples
    return samples(documents, data.seq_len, pad_token)


class PaddedSamples:
    """One document per sample, followed by padding. Attention is causal, so no token of the document sees padding."""

    def __init__(self, documents: Documents, seq_len: int, pad_token: int) -> None:
        _check_lengths(documents, seq_len)
        self.documents, self.seq_len, self.pad_token = documents, seq_len, pad_token
        self.lengths = documents.lengths
        """Of samples, without padding."""

    def __len__(self) -> int:
        return len(self.documents.lengths)

    def samples(self, indices: Indices) -> Sample:
        tokens, labels, _ = self._place([[index] for index in indices.tolist()])
        return {"tokens": tokens, "labels": labels}

    def source(self, index: int) -> str:
        return self.documents.source(index)

    def _place(
        self, rows: list[list[int]], read: ReadDocument | None = None
    ) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.bool_]]:
        """Tokens, labels, and where documents start, of samples that hold these documents from left to right. `read`
        returns a document, or another one in its place."""
        read = read or self.documents.document
        shape = (len(rows), self.seq_len)
        tokens, labels = np.full(shape, self.pad_token, np.int32), np.full(shape, IGNORE_INDEX, np.int32)
        starts = np.zeros(shape, np.bool_)
        for row, documents in enumerate(rows):
            start = 0
            for index in documents:
                document, trained = read(index)
                end = start + len(document)
                tokens[row, start:end] = document
                # The last token of a document has no label: the next one is another document's.
                labels[row, start : end - 1] = np.where(trained[1:], document[1:], IGNORE_INDEX)
                starts[row, start] = True
                start = end
            starts[row, start : start + 1] = True  # padding is a document of its own
        return tokens, labels, starts


class PackedSamples(PaddedSamples):
    """Several documents per sample. `document_ids` keep their attention apart, and `position_ids` restart."""

    def __init__(self, documents: Documents, seq_len: int, pad_token: int) -> None:
        super().__init__(documents, seq_len, pad_token)
        self.order, self.bounds = pack(documents.lengths, seq_len)
        self.lengths = np.add.reduceat(documents.lengths[self.order], self.bounds[:-1])

    def __len__(self) -> int:
        return len(self.bounds) - 1

    def samples(self, indices: Indices) -> Sample:
        tokens, labels, starts = self._place([self.documents_of(index) for index in indices.tolist()])
        return {"tokens": tokens, "labels": labels, **document_ids(starts)}

    def documents_of(self, index: int) -> list[int]:
        """The documents of a sample, from left to right."""
        documents: list[int] = self.order[self.bounds[index] : self.bounds[index + 1]].tolist()
        return documents

    def source(self, index: int) -> str:
        return ", ".join(map(self.documents.source, self.documents_of(index)))


class PairSamples(PackedSamples):
    """Pairs of answers, which see only their prompts: one pair per sample, or as many as fit."""

    def __init__(self, pairs: Pairs, seq_len: int, pad_token: int, packing: bool, ends: bool = False) -> None:
        """`ends`: labels are at the last token of each answer, for a score, and samples have margins."""
        super().__init__(pairs, seq_len, pad_token)
        self.pairs, self.ends = pairs, ends
        if not packing:
            self.order, self.bounds = np.arange(len(pairs.lengths)), np.arange(len(pairs.lengths) + 1)
            self.lengths = pairs.lengths
        self.most = int(np.diff(self.bounds).max())
        """Pairs that no sample exceeds."""

    def samples(self, indices: Indices) -> Sample:
        rows = [self.documents_of(index) for index in indices.tolist()]
        tokens, labels, starts = self._place(rows)
        keys = np.zeros((len(rows), 2 * self.most), np.int32)
        margins = np.zeros((len(rows), self.most), np.float32)
        is_end = np.zeros(tokens.shape, np.bool_)
        for row, pairs in enumerate(rows):
            start = 0
            for place, index in enumerate(pairs):
                second, end = start + self.pairs.split(index), start + int(self.pairs.lengths[index])
                starts[row, second] = is_end[row, second - 1] = is_end[row, end - 1] = True
                keys[row, 2 * place : 2 * place + 2] = self._key(index)
                margins[row, place] = self.pairs.value(index)
                start = end
        sample = {"tokens": tokens, "labels": labels, **document_ids(starts), "pair_keys": keys}
        return sample | at_ends(is_end, margins) if self.ends else sample

    def _key(self, index: int) -> NDArray[np.int32]:
        """Two words that depend on all that decides about the scores of a pair, except for the model: its tokens, and
        which of them are answers."""
        tokens, trained = self.pairs.document(index)
        return content_key(self.pairs.split(index), tokens, trained)


def content_key(split: int, *content: NDArray[Any]) -> NDArray[np.int32]:
    """Two words that depend on these arrays, and on where the first one has its second part."""
    joined = b"".join(each.tobytes() for each in content)
    return np.frombuffer(hashlib.blake2b(joined, key=str(split).encode(), digest_size=8).digest(), np.int32)


def at_ends(is_end: NDArray[np.bool_], margins: NDArray[np.float32]) -> Sample:
    """The fields of pairs whose scores are those of the last tokens of answers."""
    return {"labels": np.where(is_end, 0, IGNORE_INDEX).astype(np.int32), "margins": margins}


def pack(lengths: NDArray[np.int32], seq_len: int) -> tuple[Indices, Indices]:
    """Best fit decreasing. Returns all documents in the order of their packs, and the bounds of each pack in it.

    Packs have the order of their longest documents, so those at the end, which may be held out, are like the others.
    """
    by_length = np.argsort(-lengths.astype(np.int64), kind="stable")
    pack_of = np.empty(len(lengths), np.int64)
    rooms: dict[int, list[NDArray[np.int64]]] = {}
    """Packs by the number of tokens that they have room for."""
    sizes: list[int] = []
    """The keys of `rooms`, sorted."""
    packs, first = 0, 0

    def leave(room: int, left: NDArray[np.int64]) -> None:
        if room and len(left):
            if room not in rooms:
                insort(sizes, room)
            rooms.setdefault(room, []).append(left)

    lengths_found, counts = np.unique(lengths, return_counts=True)
    for length, count in zip(lengths_found[::-1].tolist(), counts[::-1].tolist(), strict=True):
        end = first + count
        while first < end:
            # The fullest packs with room for this length get as many as they can hold: then none is a better fit.
            at = bisect_left(sizes, length)
            room = sizes[at] if at < len(sizes) else seq_len
            each = room // length
            needed = -(-(end - first) // each)
            if at < len(sizes):
                found = np.concatenate(rooms.pop(sizes.pop(at)))
                leave(room, found[needed:])
                found = found[:needed]
            else:
                found = np.arange(packs, packs + needed)
                packs += needed
            placed = min(len(found) * each, end - first)
            pack_of[first : first + placed] = np.repeat(found, each)[:placed]
            first += placed
            last = placed - (len(found) - 1) * each  # the last pack may get fewer
            leave(room - each * length, found[:-1])
            leave(room - last * length, found[-1:])
    by_pack = np.argsort(pack_of, kind="stable")
    bounds = np.searchsorted(pack_of[by_pack], np.arange(packs + 1))
    order = by_length[by_pack]
    # Number the packs by their first, longest document.
    ranks = np.argsort(order[bounds[:-1]], kind="stable")
    counts_of_packs = np.diff(bounds)[ranks]
    new_bounds = np.concatenate((np.zeros(1, np.int64), np.cumsum(counts_of_packs)))
    shift = np.repeat(bounds[:-1][ranks] - new_bounds[:-1], counts_of_packs)
    return order[np.arange(len(order)) + shift], new_bounds


def _check_lengths(documents: Documents, seq_len: int) -> None:
    lengths = documents.lengths
    if len(lengths) and (wrong := (lengths > seq_len) | (lengths < 1)).any():
        index = int(wrong.argmax())
        raise UserError(
            f"data.seq_len={seq_len}: document {index} has {lengths[index]} tokens; nearest: {int(lengths.max())}"
        )
