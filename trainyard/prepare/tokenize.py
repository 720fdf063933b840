"""Text documents to Megatron's token files, with the same bytes as its preprocess_data.py, in parallel.

Workers read their slices of the input and return tokens; the parent process writes them in order. Documents without
tokens are left out. With `append_eod`, the last sequence of each document ends with the end token.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from trainyard.core.errors import UserError
from trainyard.core.worker_pool import map_ordered
from trainyard.data.formats import documents
from trainyard.data.formats.documents import InputSlice, UnreadableRecord
from trainyard.data.formats.megatron_bin import MegatronTokensWriter, Tokens, token_dtype
from trainyard.data.text.tokenizer import Tokenizer, TokenizerSpec, document_end_id, load_tokenizer
from trainyard.prepare.sentences import split_sentences


class TokenizeOptions(NamedTuple):
    tokenizer: TokenizerSpec
    text_keys: tuple[str, ...] = ("text",)
    """JSON keys or columns; each gives its own pair of files."""
    append_eod: bool = False
    split_sentences: bool = False
    """Write each sentence as a sequence of its own."""
    keep_newlines: bool = False
    """Keep the white space between sentences."""


class TokenizedSequences(NamedTuple):
    """The sequences of some documents."""

    tokens: Tokens
    sequence_lengths: NDArray[np.int32]
    sequences_per_document: NDArray[np.int64]


class EncodedSlice(NamedTuple):
    sequences: dict[str, TokenizedSequences]
    """By text key."""
    unreadable: list[UnreadableRecord]
    input_bytes: int
    """Bytes of the input that this slice stands for, for progress."""


@dataclass
class TokenizeCounts:
    documents: int = 0
    tokens: int = 0
    skipped: int = 0


def output_prefix(prefix: Path, key: str, options: TokenizeOptions) -> Path:
    return prefix.with_name(f"{prefix.name}_{key}_{'sentence' if options.split_sentences else 'document'}")


def tokenize_files(
    paths: Sequence[Path],
    prefix: Path,
    options: TokenizeOptions,
    workers: int,
    on_unreadable: Callable[[UnreadableRecord], None],
    on_progress: Callable[[int, TokenizeCounts], None],
) -> TokenizeCounts:
    """Write a pair of files for each text key. `on_unreadable` may raise to stop."""
    tokenizer = _cached_tokenizer(options.tokenizer)  # loaded before the workers fork
    if options.append_eod:
        document_end_id(tokenizer)  # refused before anything is written
    dtype = token_dtype(tokenizer.vocab_size)
    counts, done = TokenizeCounts(), 0
    with ExitStack() as stack:
        writers = {
            key: stack.enter_context(MegatronTokensWriter(output_prefix(prefix, key, options), dtype))
            for key in options.text_keys
        }
        for result in map_ordered(partial(encode_slice, options), documents.input_slices(paths), workers):
            for record in result.unreadable:
                on_unreadable(record)
            for key, sequences in result.sequences.items():
                writers[key].add(*sequences)
                counts.tokens += len(sequences.tokens)
            counts.documents += len(result.sequences[options.text_keys[0]].sequences_per_document)
            counts.skipped += len(result.unreadable)
            done += result.input_bytes
            on_progress(done, counts)
        if not counts.documents:
            raise UserError(f"{paths[0]}: no document with text in all of the input; nothing was written")
    return counts


@cache
def _cached_tokenizer(spec: TokenizerSpec) -> Tokenizer:
    """Loaded once per process."""
    return load_tokenizer(spec)


def encode_slice(options: TokenizeOptions, input_slice: InputSlice) -> EncodedSlice:
    tokenizer = _cached_tokenizer(options.tokenizer)
    dtype = token_dtype(tokenizer.vocab_size)
    end_id = document_end_id(tokenizer) if options.append_eod else None
    records, unreadable = documents.read_documents(input_slice, options.text_keys)
    sequences = {}
    for index, key in enumerate(options.text_keys):
        texts = [
            split_sentences(record[index], options.keep_newlines) if options.split_sentences else [record[index]]
            for record in records
        ]
        sequences[key] = tokenize_texts(texts, tokenizer, dtype, end_id)
    return EncodedSlice(sequences, unreadable, input_slice.input_bytes)


def tokenize_texts(
    texts: list[list[str]], tokenizer: Tokenizer, dtype: str = "int32", end_id: int | None = None
) -> TokenizedSequences:
    """Tokenize documents, each a list of sequences. Empty sequences and documents are left out."""
    tokens, counts = tokenizer.encode([sequence for document in texts for sequence in document])
    owner = np.repeat(np.arange(len(texts)), [len(document) for document in texts])[counts > 0]
    lengths = counts[counts > 0].astype(np.int32)
    per_document = np.bincount(owner, minlength=len(texts))
    per_document = per_document[per_document > 0]
    if end_id is not None and len(lengths):
        last = np.cumsum(per_document) - 1
        tokens = np.insert(tokens, np.cumsum(lengths, dtype=np.int64)[last], end_id)
        lengths[last] += 1
    return TokenizedSequences(tokens.astype(dtype, copy=False), lengths, per_document.astype(np.int64))
