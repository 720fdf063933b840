"""BERT samples from documents: pairs of consecutive or unrelated text, with some tokens masked.

Each process works on chunks of a few MiB of documents, and every random number follows from the seed and the chunk
index: any number of workers makes the same samples. Unrelated text comes from another document of the same chunk, so
memory does not grow with the input. Python loops run over samples and sentences only; tokens are gathered and masked
with whole arrays.
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
from trainyard.prepare.tokenize import tokenize_texts

SPECIAL_TOKENS = {
    "pad": ("[PAD]", "<pad>"),
    "cls": ("[CLS]", "<s>"),
    "sep": ("[SEP]", "</s>"),
    "mask": ("[MASK]", "<mask>"),
}
"""Names of the special tokens, by field of BertVocab."""
MASK_FRACTION = 0.15
"""Fraction of the tokens of a sample to predict."""
SAMPLES_PER_BLOCK = 2048
"""Samples made at a time."""


class BertOptions(NamedTuple):
    tokenizer: TokenizerSpec
    seq_len: int
    """Maximum tokens per sample."""
    max_predictions: int
    """Maximum masked positions per sample."""
    short_seq_prob: float = 0.1
    """Fraction of the documents whose samples have a random shorter length."""
    whole_word_mask: bool = False
    """Mask all tokens of a word or none."""
    dupe_factor: int = 1
    """Times that each document is used, each time with its own pairs and masks."""
    seed: int = 0


class BertVocab(NamedTuple):
    size: int
    pad: int
    cls: int
    sep: int
    mask: int
    ordinary_ids: NDArray[np.int32]
    """All ids except the four special ones; random replacements come from these."""
    is_continuation: NDArray[np.bool_]
    """By id: True if the token continues a word (##ing)."""


class TokenizedText(NamedTuple):
    """Tokens of documents, one after the other."""

    tokens: NDArray[np.int32]
    sentence_bounds: list[int]
    """Sentence n has the tokens sentence_bounds[n] to sentence_bounds[n + 1]."""
    document_bounds: list[int]
    """Document n has the sentences document_bounds[n] to document_bounds[n + 1]."""


@cache
def load_bert_tokenizer(spec: TokenizerSpec) -> tuple[Tokenizer, BertVocab]:
    """Loaded once per process."""
    tokenizer = load_tokenizer(spec)
    special: dict[str, int] = {}
    for field, names in SPECIAL_TOKENS.items():
        ids = [token_id for name in names if (token_id := tokenizer.token_id(name)) is not None]
        if not ids:
            raise UserError(f"{spec.vocab_file or spec.name}: has no {names[0]}, which BERT samples need")
        special[field] = ids[0]
    is_continuation = [tokenizer.decode([token]).startswith("##") for token in range(tokenizer.vocab_size)]
    ordinary_ids = np.setdiff1d(np.arange(tokenizer.vocab_size, dtype=np.int32), list(special.values()))
    return tokenizer, BertVocab(
        tokenizer.vocab_size, ordinary_ids=ordinary_ids, is_continuation=np.array(is_continuation), **special
    )


def tokenize_documents(tokenizer: Tokenizer, documents: list[list[str]]) -> TokenizedText:
    """Tokenize documents, each a list of sentences. Sentences and documents without tokens are left out."""
    tokens, lengths, sentences_per_document = tokenize_texts(documents, tokenizer)
    bounds = ([0, *np.cumsum(counts, dtype=np.int64).tolist()] for counts in (lengths, sentences_per_document))
    return TokenizedText(tokens, *bounds)


def make_samples(text: TokenizedText, options: BertOptions, vocab: BertVocab, chunk_id: int) -> Records:
    """All samples of a chunk, shuffled."""
    blocks = []
    for repeat in range(options.dupe_factor):
        rng = np.random.Generator(np.random.PCG64([options.seed, chunk_id, repeat]))
        pairs = np.array(list(make_pairs(text, options, rng)), dtype=np.int64).reshape(-1, 5)
        for start in range(0, len(pairs), SAMPLES_PER_BLOCK):
            blocks.append(_make_records(text.tokens, pairs[start : start + SAMPLES_PER_BLOCK], options, vocab, rng))
    records = np.concatenate([np.zeros(0, record_dtype(options.seq_len, options.max_predictions, vocab.size)), *blocks])
    rng = np.random.Generator(np.random.PCG64([options.seed, chunk_id, options.dupe_factor]))
    return records[rng.random(len(records)).argsort()]


def make_pairs(
    text: TokenizedText, options: BertOptions, rng: np.random.Generator
) -> Iterator[tuple[int, int, int, int, bool]]:
    """Pairs as (A start, A end, B start, B end, unrelated), in tokens of the text.

    Take sentences until there are enough tokens. A is the first few of them; B is the rest or, half of the time and
    whenever there is no rest, sentences of another document. Unused sentences begin the next pair.
    """
    uniform = _uniform_stream(rng)
    sentences, documents = text.sentence_bounds, text.document_bounds
    max_tokens, num_others = options.seq_len - 3, len(documents) - 2
    for document in range(len(documents) - 1):
        start, last = documents[document], documents[document + 1]
        target = max_tokens
        if next(uniform) < options.short_seq_prob:
            target = 2 + int(next(uniform) * (max_tokens - 1))
        while start < last:
            end = bisect_left(sentences, sentences[start] + target, start + 1, last)
            cut = start + 1 + int(next(uniform) * (end - start - 1))
            if num_others and (cut == end or next(uniform) < 0.5):
                other = int(next(uniform) * num_others)
                other += other >= document
                b_start, b_last = documents[other : other + 2]
                b_start += int(next(uniform) * (b_last - b_start))
                b_tokens = max(target - (sentences[cut] - sentences[start]), 1)
                b_end = bisect_left(sentences, sentences[b_start] + b_tokens, b_start + 1, b_last)
                yield sentences[start], sentences[cut], sentences[b_start], sentences[b_end], True
                start = cut
            else:
                if cut < end:
                    yield sentences[start], sentences[cut], sentences[cut], sentences[end], False
                start = end


def _uniform_stream(rng: np.random.Generator) -> Iterator[float]:
    while True:
        yield from rng.random(4096).tolist()


def _make_records(
    tokens: NDArray[np.int32],
    pairs: NDArray[np.int64],
    options: BertOptions,
    vocab: BertVocab,
    rng: np.random.Generator,
) -> Records:
    """[CLS] A [SEP] B [SEP] for each pair, masked. Names end with their shape: B samples, T tokens."""
    a, a_end, b, b_end, unrelated = pairs.T
    # The longer text loses tokens, at a random end, until both fit.
    max_tokens = options.seq_len - 3
    a_len = np.minimum(a_end - a, np.maximum(max_tokens - (b_end - b), (max_tokens + 1) // 2))
    b_len = np.minimum(b_end - b, max_tokens - a_len)
    a = a + rng.binomial(a_end - a - a_len, 0.5)
    b = b + rng.binomial(b_end - b - b_len, 0.5)
    a_B1, b_B1, a_len_B1, b_len_B1 = (array[:, None] for array in (a, b, a_len, b_len))
    position_T = np.arange(options.seq_len)
    in_a_BT = (position_T >= 1) & (position_T <= a_len_B1)
    in_b_BT = (position_T >= a_len_B1 + 2) & (position_T < a_len_B1 + b_len_B1 + 2)
    used_BT = position_T < a_len_B1 + b_len_B1 + 3
    source_BT = np.where(in_a_BT, a_B1 + position_T - 1, np.where(in_b_BT, b_B1 + position_T - a_len_B1 - 2, 0))
    tokens_BT = np.where(in_a_BT | in_b_BT, tokens[source_BT], np.where(used_BT, vocab.sep, vocab.pad))
    tokens_BT[:, 0] = vocab.cls
    masked_BT = choose_masked(tokens_BT, in_a_BT | in_b_BT, used_BT.sum(1), options, vocab, rng)
    records = np.zeros(len(pairs), record_dtype(options.seq_len, options.max_predictions, vocab.size))
    rows, positions = np.nonzero(masked_BT)
    nth = masked_BT.cumsum(1)[rows, positions] - 1
    records["masked_positions"][rows, nth] = positions
    records["labels"][rows, nth] = tokens_BT[rows, positions]
    action = rng.random(len(rows))
    random = vocab.ordinary_ids[(rng.random(len(rows)) * len(vocab.ordinary_ids)).astype(np.int64)]
    tokens_BT[rows, positions] = np.where(
        action < 0.8, vocab.mask, np.where(action < 0.9, random, tokens_BT[rows, positions])
    )
    records["tokens"] = tokens_BT
    records["attention_mask"] = np.packbits(used_BT, axis=1)
    records["segment_ids"] = np.packbits(used_BT & (position_T >= a_len_B1 + 2), axis=1)
    records["next_sentence_labels"] = unrelated
    return records


def choose_masked(
    tokens_BT: NDArray[np.int32],
    text_BT: NDArray[np.bool_],
    used_B: NDArray[np.int64],
    options: BertOptions,
    vocab: BertVocab,
    rng: np.random.Generator,
) -> NDArray[np.bool_]:
    """The positions to mask: words in random order, as long as they fit into the number of predictions.

    Shapes: B samples, T tokens, U words (each a token unless options.whole_word_mask).
    """
    rows, length = tokens_BT.shape
    word_start_BT = text_BT.copy()
    if options.whole_word_mask:
        word_start_BT[:, 1:] &= ~(vocab.is_continuation[tokens_BT[:, 1:]] & text_BT[:, :-1])
    word_BT = word_start_BT.cumsum(1) - 1
    flat = (np.arange(rows)[:, None] * length + word_BT)[text_BT]
    size_BU = np.bincount(flat, minlength=rows * length).reshape(rows, length)
    order_BU = np.where(size_BU > 0, rng.random((rows, length)), 1.0).argsort(1)
    size_BU = np.take_along_axis(size_BU, order_BU, 1)
    wanted_B = np.maximum(np.rint(MASK_FRACTION * used_B).astype(np.int64), 1)
    left_B = np.minimum(wanted_B, options.max_predictions)
    taken_BU = np.zeros((rows, length), np.bool_)
    for index in range(length):
        fits_B = (size_BU[:, index] > 0) & (size_BU[:, index] <= left_B)
        taken_BU[:, index] = fits_B
        left_B -= size_BU[:, index] * fits_B
        if not left_B.any():
            break
    chosen_BU = np.zeros((rows, length), np.bool_)
    np.put_along_axis(chosen_BU, order_BU, taken_BU, 1)
    return text_BT & np.take_along_axis(chosen_BU, np.maximum(word_BT, 0), 1)
