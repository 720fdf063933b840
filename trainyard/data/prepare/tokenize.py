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
from trainyard.data.formats.documents import Bad, Piece
from trainyard.data.formats.megatron_bin import Tokens, Writer, best_dtype
from trainyard.data.prepare.worker_pool import ordered
from trainyard.data.text.sentences import split
from trainyard.data.text.tokenizer import Spec, Tokenizer, open_tokenizer


class Job(NamedTuple):
    """What to do with each piece."""

    spec: Spec
    keys: tuple[str, ...] = ("text",)
    append_eod: bool = False
    sentences: bool = False
    """Each sentence is a sequence of its own."""
    keep_newlines: bool = False


class Rows(NamedTuple):
    """Sequences of some documents."""

    tokens: Tokens
    sizes: NDArray[np.int32]
    """Of each sequence."""
    documents: NDArray[np.int64]
    """Sequences of each document."""


class Made(NamedTuple):
    rows: dict[str, Rows]
    """By key."""
    bad: list[Bad]
    weight: int
    """Bytes of input that this was."""


class Counts(NamedTuple):
    documents: int
    tokens: int
    bad: int


def target(prefix: Path, key: str, job: Job) -> Path:
    return prefix.with_name(f"{prefix.name}_{key}_{'sentence' if job.sentences else 'document'}")


def tokenize(
    paths: Sequence[Path],
    prefix: Path,
    job: Job,
    workers: int,
    bad: Callable[[Bad], None],
    show: Callable[[int, Counts], None],
) -> Counts:
    """Write a pair of files for each key. What cannot be read is told to `bad`, which may raise."""
    dtype = best_dtype(_tokenizer(job.spec).vocab)  # opened here, workers have it too
    seen = tokens = wrong = done = 0
    with ExitStack() as stack:
        writers = {key: stack.enter_context(Writer(target(prefix, key, job), dtype)) for key in job.keys}
        for made in ordered(partial(encode, job), documents.pieces(paths), workers):
            for each in made.bad:
                bad(each)
            for key, rows in made.rows.items():
                writers[key].add(rows.tokens, rows.sizes, rows.documents)
                tokens += len(rows.tokens)
            seen += len(made.rows[job.keys[0]].documents)
            wrong += len(made.bad)
            done += made.weight
            show(done, Counts(seen, tokens, wrong))
        if not seen:
            raise UserError(f"{paths[0]}: no document with any text in all of the input; nothing was written")
    return Counts(seen, tokens, wrong)


@cache
def _tokenizer(spec: Spec) -> Tokenizer:
    """One for each process."""
    return open_tokenizer(spec)


def encode(job: Job, piece: Piece) -> Made:
    tokenizer = _tokenizer(job.spec)
    dtype = best_dtype(tokenizer.vocab)
    bad: list[Bad] = []
    texts = list(_good(documents.read(piece, job.keys), bad))
    rows = {}
    for number, key in enumerate(job.keys):
        pieces = [split(each[number], job.keep_newlines) if job.sentences else [each[number]] for each in texts]
        rows[key] = _rows(pieces, tokenizer, tokenizer.end if job.append_eod else None, dtype)
    return Made(rows, bad, piece.weight)


def _good(found: Iterator[tuple[str, ...] | Bad], bad: list[Bad]) -> Iterator[tuple[str, ...]]:
    for each in found:
        if isinstance(each, Bad):
            bad.append(each)
        else:
            yield each


def _rows(texts: list[list[str]], tokenizer: Tokenizer, end: int | None, dtype: str) -> Rows:
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
    return Rows(tokens.astype(dtype), sizes, per_document.astype(np.int64))
