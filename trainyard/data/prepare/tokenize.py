"""From documents to Megatron's token files, as its preprocess_data.py makes them, by as many processes as asked for.

Workers read their pieces of the input themselves and send back tokens; this process puts them in order and writes. A
document without tokens is left out; with `append_eod` the last sequence of each document ends with the end token.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from trainyard.core.errors import UserError
from trainyard.data.formats import documents
from trainyard.data.formats.documents import InputSlice, UnreadableRecord
from trainyard.data.formats.megatron_bin import MegatronTokensWriter, Tokens, token_dtype
from trainyard.data.prepare.worker_pool import map_ordered
from trainyard.data.text.sentences import split_sentences
from trainyard.data.text.tokenizer import Tokenizer, TokenizerSpec, load_tokenizer


class TokenizeOptions(NamedTuple):
    """What to do with each piece."""

    tokenizer: TokenizerSpec
    text_keys: tuple[str, ...] = ("text",)
    append_eod: bool = False
    split_sentences: bool = False
    """Each sentence is a sequence of its own."""
    keep_newlines: bool = False


class TokenizedSequences(NamedTuple):
    """Sequences of some documents."""

    tokens: Tokens
    sequence_lengths: NDArray[np.int32]
    """Of each sequence."""
    sequences_per_document: NDArray[np.int64]
    """Sequences of each document."""


class EncodedSlice(NamedTuple):
    sequences: dict[str, TokenizedSequences]
    """By key."""
    unreadable: list[UnreadableRecord]
    input_bytes: int
    """Bytes of input that this was."""


class TokenizeCounts(NamedTuple):
    documents: int
    tokens: int
    skipped: int


def output_prefix(prefix: Path, key: str, job: TokenizeOptions) -> Path:
    return prefix.with_name(f"{prefix.name}_{key}_{'sentence' if job.split_sentences else 'document'}")


def tokenize_files(
    paths: Sequence[Path],
    prefix: Path,
    options: TokenizeOptions,
    workers: int,
    on_unreadable: Callable[[UnreadableRecord], None],
    on_progress: Callable[[int, TokenizeCounts], None],
) -> TokenizeCounts:
    """Write a pair of files for each key. What cannot be read is told to `bad`, which may raise."""
    dtype = token_dtype(_cached_tokenizer(options.tokenizer).vocab_size)  # opened here, workers have it too
    seen = tokens = wrong = done = 0
    with ExitStack() as stack:
        writers = {
            key: stack.enter_context(MegatronTokensWriter(output_prefix(prefix, key, options), dtype))
            for key in options.text_keys
        }
        for made in map_ordered(partial(encode_slice, options), documents.input_slices(paths), workers):
            for each in made.unreadable:
                on_unreadable(each)
            for key, rows in made.sequences.items():
                writers[key].add(rows.tokens, rows.sequence_lengths, rows.sequences_per_document)
                tokens += len(rows.tokens)
            seen += len(made.sequences[options.text_keys[0]].sequences_per_document)
            wrong += len(made.unreadable)
            done += made.input_bytes
            on_progress(done, TokenizeCounts(seen, tokens, wrong))
        if not seen:
            raise UserError(f"{paths[0]}: no document with any text in all of the input; nothing was written")
    return TokenizeCounts(seen, tokens, wrong)


@cache
def _cached_tokenizer(spec: TokenizerSpec) -> Tokenizer:
    """One for each process."""
    return load_tokenizer(spec)


def encode_slice(job: TokenizeOptions, piece: InputSlice) -> EncodedSlice:
    tokenizer = _cached_tokenizer(job.tokenizer)
    dtype = token_dtype(tokenizer.vocab_size)
    bad: list[UnreadableRecord] = []
    texts = list(_readable(documents.read_documents(piece, job.text_keys), bad))
    rows = {}
    for number, key in enumerate(job.text_keys):
        pieces = [
            split_sentences(each[number], job.keep_newlines) if job.split_sentences else [each[number]]
            for each in texts
        ]
        rows[key] = _tokenize_texts(pieces, tokenizer, tokenizer.end_id if job.append_eod else None, dtype)
    return EncodedSlice(rows, bad, piece.input_bytes)


def _readable(
    found: Iterator[tuple[str, ...] | UnreadableRecord], bad: list[UnreadableRecord]
) -> Iterator[tuple[str, ...]]:
    for each in found:
        if isinstance(each, UnreadableRecord):
            bad.append(each)
        else:
            yield each


def _tokenize_texts(texts: list[list[str]], tokenizer: Tokenizer, end: int | None, dtype: str) -> TokenizedSequences:
    """Texts of some documents (each one, or its sentences) as sequences; empty ones are left out."""
    tokens, counts = tokenizer.encode([text for document in texts for text in document])
    document = np.repeat(np.arange(len(texts)), [len(each) for each in texts])[counts > 0]
    sizes = counts[counts > 0].astype(np.int32)
    per_document = np.bincount(document, minlength=len(texts))
    per_document = per_document[per_document > 0]
    if end is not None and len(sizes):
        last = np.cumsum(per_document) - 1
        tokens = np.insert(tokens, np.cumsum(sizes, dtype=np.int64)[last], end)
        sizes[last] += 1
    return TokenizedSequences(tokens.astype(dtype), sizes, per_document.astype(np.int64))
