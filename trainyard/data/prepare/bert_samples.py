"""BERT's samples from documents: pairs of neighbouring or unrelated text, with some words masked.

Documents are worked on in chunks of a few MiB, each by one process, and every random number follows from the seed and
the chunk's number: any number of workers makes the same samples. Unrelated text comes from another document of the same
chunk, so that memory does not grow with the input. Loops are over samples and sentences only; words are gathered and
masked by whole arrays.
"""

from bisect import bisect_left
from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from trainyard.core.errors import UserError
from trainyard.data.formats.bert_hdf5 import Records, record_dtype
from trainyard.data.text.tokenizer import Tokenizer, TokenizerSpec, load_tokenizer

SPECIAL_TOKENS = {
    "pad": ("[PAD]", "<pad>"),
    "first": ("[CLS]", "<s>"),
    "between": ("[SEP]", "</s>"),
    "mask": ("[MASK]", "<mask>"),
}
"""Names of the tokens, by what they are for."""
MASK_FRACTION = 0.15
"""Of a sample's tokens."""
SAMPLES_PER_BLOCK = 2048
"""Samples worked on at a time."""


class BertOptions(NamedTuple):
    """How samples are made."""

    tokenizer: TokenizerSpec
    seq_len: int
    """Tokens of a sample, at most."""
    max_predictions: int
    """Masked places of a sample, at most."""
    short_seq_prob: float = 0.1
    """Part of the documents whose samples are shorter, of any length."""
    whole_word_mask: bool = False
    """Mask all pieces of a word or none."""
    dupe_factor: int = 1
    """Times that each document is used, each with its own pairs and masks."""
    seed: int = 0


class BertVocab(NamedTuple):
    size: int
    pad: int
    first: int
    between: int
    mask: int
    words: NDArray[np.int32]
    """What a random word is drawn from: all but the four."""
    inside: NDArray[np.bool_]
    """By token, whether it goes on with the word before it (##ing)."""


class TokenizedText(NamedTuple):
    """Tokens of documents, one after the other."""

    tokens: NDArray[np.int32]
    sentence_bounds: list[int]
    """Sentence n has the tokens from ends[n] to ends[n + 1]."""
    document_bounds: list[int]
    """Document n has the sentences from documents[n] to documents[n + 1]."""


@cache
def load_bert_tokenizer(spec: TokenizerSpec) -> tuple[Tokenizer, BertVocab]:
    """Opened once by each process."""
    tokenizer = load_tokenizer(spec)
    found: dict[str, int] = {}
    for use, names in SPECIAL_TOKENS.items():
        numbers = [number for name in names if (number := tokenizer.token_id(name)) is not None]
        if not numbers:
            raise UserError(f"{spec.vocab_file or spec.name}: has no {names[0]}, which BERT's samples need")
        found[use] = numbers[0]
    inside = [tokenizer.decode([number]).startswith("##") for number in range(tokenizer.vocab_size)]
    words = np.setdiff1d(np.arange(tokenizer.vocab_size, dtype=np.int32), list(found.values()))
    return tokenizer, BertVocab(tokenizer.vocab_size, words=words, inside=np.array(inside), **found)


def tokenize_documents(tokenizer: Tokenizer, documents: list[list[str]]) -> TokenizedText:
    """Sentences of documents as tokens. A sentence or document without any is left out."""
    tokens, counts = tokenizer.encode([sentence for document in documents for sentence in document])
    owner = np.repeat(np.arange(len(documents)), [len(document) for document in documents])[counts > 0]
    firsts = np.flatnonzero(np.diff(owner, prepend=-1))
    ends = np.concatenate([[0], np.cumsum(counts[counts > 0])])
    return TokenizedText(tokens, ends.tolist(), [*firsts.tolist(), len(owner)])


def make_samples(text: TokenizedText, recipe: BertOptions, vocabulary: BertVocab, chunk: int) -> Records:
    """All samples of a chunk, shuffled."""
    found = []
    for time in range(recipe.dupe_factor):
        draw = np.random.Generator(np.random.PCG64([recipe.seed, chunk, time]))
        numbers = np.array(list(make_pairs(text, recipe, draw)), dtype=np.int64).reshape(-1, 5)
        for start in range(0, len(numbers), SAMPLES_PER_BLOCK):
            found.append(
                _make_records(text.tokens, numbers[start : start + SAMPLES_PER_BLOCK], recipe, vocabulary, draw)
            )
    dtype = record_dtype(recipe.seq_len, recipe.max_predictions, vocabulary.size)
    joined = np.concatenate([np.zeros(0, dtype), *found])
    order = np.random.Generator(np.random.PCG64([recipe.seed, chunk, recipe.dupe_factor])).random(len(joined)).argsort()
    return joined[order]


def make_pairs(
    text: TokenizedText, recipe: BertOptions, draw: np.random.Generator
) -> Iterator[tuple[int, int, int, int, bool]]:
    """Where A begins and ends, where B does, and whether B is of another document.

    Sentences are taken until there are enough tokens; A is the first few of them, and B the rest or, half of the time
    and whenever there is no rest, sentences of another document. Those not used then begin the next pair.
    """
    chance = _uniform_stream(draw)
    ends, documents = text.sentence_bounds, text.document_bounds
    room, others = recipe.seq_len - 3, len(documents) - 2
    for number in range(len(documents) - 1):
        at, last = documents[number], documents[number + 1]
        target = room
        if next(chance) < recipe.short_seq_prob:
            target = 2 + int(next(chance) * (room - 1))
        while at < last:
            end = bisect_left(ends, ends[at] + target, at + 1, last)
            cut = at + 1 + int(next(chance) * (end - at - 1))
            if others and (cut == end or next(chance) < 0.5):
                other = int(next(chance) * others)
                begin, finish = documents[other + (other >= number) : other + (other >= number) + 2]
                begin += int(next(chance) * (finish - begin))
                wanted = max(target - (ends[cut] - ends[at]), 1)
                finish = bisect_left(ends, ends[begin] + wanted, begin + 1, finish)
                yield ends[at], ends[cut], ends[begin], ends[finish], True
                at = cut
            else:
                if cut < end:
                    yield ends[at], ends[cut], ends[cut], ends[end], False
                at = end


def _uniform_stream(draw: np.random.Generator) -> Iterator[float]:
    while True:
        yield from draw.random(4096).tolist()


def _make_records(
    tokens: NDArray[np.int32],
    numbers: NDArray[np.int64],
    recipe: BertOptions,
    vocabulary: BertVocab,
    draw: np.random.Generator,
) -> Records:
    """[CLS] A [SEP] B [SEP] for each pair, masked."""
    a, a_end, b, b_end, apart = numbers.T
    # The longer of the two loses tokens, at either end by chance, until both fit.
    room = recipe.seq_len - 3
    keep_a = np.minimum(a_end - a, np.maximum(room - (b_end - b), (room + 1) // 2))
    keep_b = np.minimum(b_end - b, room - keep_a)
    a = a + draw.binomial(a_end - a - keep_a, 0.5)
    b = b + draw.binomial(b_end - b - keep_b, 0.5)
    a_B1, b_B1, keep_a_B1, keep_b_B1 = (each[:, None] for each in (a, b, keep_a, keep_b))
    at_T = np.arange(recipe.seq_len)
    in_a_BT = (at_T >= 1) & (at_T <= keep_a_B1)
    in_b_BT = (at_T >= keep_a_B1 + 2) & (at_T < keep_a_B1 + keep_b_B1 + 2)
    used_BT = at_T < keep_a_B1 + keep_b_B1 + 3
    source_BT = np.where(in_a_BT, a_B1 + at_T - 1, np.where(in_b_BT, b_B1 + at_T - keep_a_B1 - 2, 0))
    row_BT = np.where(in_a_BT | in_b_BT, tokens[source_BT], np.where(used_BT, vocabulary.between, vocabulary.pad))
    row_BT[:, 0] = vocabulary.first
    chosen_BT = choose_masked(row_BT, in_a_BT | in_b_BT, used_BT.sum(1), recipe, vocabulary, draw)
    out = np.zeros(len(numbers), record_dtype(recipe.seq_len, recipe.max_predictions, vocabulary.size))
    rows, places = np.nonzero(chosen_BT)
    nth = chosen_BT.cumsum(1)[rows, places] - 1
    out["masked_positions"][rows, nth] = places
    out["labels"][rows, nth] = row_BT[rows, places]
    what = draw.random(len(rows))
    random = vocabulary.words[(draw.random(len(rows)) * len(vocabulary.words)).astype(np.int64)]
    row_BT[rows, places] = np.where(what < 0.8, vocabulary.mask, np.where(what < 0.9, random, row_BT[rows, places]))
    out["tokens"] = row_BT
    out["attention_mask"] = np.packbits(used_BT, axis=1)
    out["segment_ids"] = np.packbits(used_BT & (at_T >= keep_a_B1 + 2), axis=1)
    out["next_sentence_labels"] = apart
    return out


def choose_masked(
    row_BT: NDArray[np.int32],
    word_BT: NDArray[np.bool_],
    used_B: NDArray[np.int64],
    recipe: BertOptions,
    vocabulary: BertVocab,
    draw: np.random.Generator,
) -> NDArray[np.bool_]:
    """Which places are masked: words in a random order, as long as they fit into what may be masked."""
    rows, length = row_BT.shape
    begins_BT = word_BT.copy()
    if recipe.whole_word_mask:
        begins_BT[:, 1:] &= ~(vocabulary.inside[row_BT[:, 1:]] & word_BT[:, :-1])
    unit_BT = begins_BT.cumsum(1) - 1
    flat = (np.arange(rows)[:, None] * length + unit_BT)[word_BT]
    size_BU = np.bincount(flat, minlength=rows * length).reshape(rows, length)
    order_BU = np.where(size_BU > 0, draw.random((rows, length)), 1.0).argsort(1)
    size_BU = np.take_along_axis(size_BU, order_BU, 1)
    left_B = np.minimum(np.maximum(np.rint(MASK_FRACTION * used_B).astype(np.int64), 1), recipe.max_predictions)
    taken_BU = np.zeros((rows, length), np.bool_)
    for number in range(length):
        fits_B = (size_BU[:, number] > 0) & (size_BU[:, number] <= left_B)
        taken_BU[:, number] = fits_B
        left_B -= size_BU[:, number] * fits_B
        if not left_B.any():
            break
    chosen_BU = np.zeros((rows, length), np.bool_)
    np.put_along_axis(chosen_BU, order_BU, taken_BU, 1)
    return word_BT & np.take_along_axis(chosen_BU, np.maximum(unit_BT, 0), 1)
