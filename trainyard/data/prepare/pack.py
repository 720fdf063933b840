"""Blocks of tokens: documents one after the other, the end token after each, cut every so many tokens.

It is one row from the first document to the last: a block ends where the next begins, so that only the end of the whole
row can be too short for one. Position_ids keep where documents begin: they start again at 0 there, and in each block,
since a model has no positions beyond its own length.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from trainyard.core.errors import UserError
from trainyard.data.formats import documents
from trainyard.data.formats.arrow_dataset import IntArray
from trainyard.data.formats.arrow_writer import ArrowDatasetWriter
from trainyard.data.formats.documents import UnreadableRecord
from trainyard.data.formats.megatron_bin import MegatronTokens, Tokens
from trainyard.data.loading.token_samples import IGNORE_INDEX, ContiguousTokens, ReorderedTokens
from trainyard.data.prepare.tokenize import TokenizeOptions, encode_slice
from trainyard.data.prepare.worker_pool import map_ordered

TOKENS_PER_READ = 1 << 22
"""Tokens taken from a file at a time."""
MAX_BATCH_ROWS, MAX_BATCH_BYTES = 1000, 16 << 20
"""Of a record batch, whichever is less: readers take in one at least."""


class TokenChunk(NamedTuple):
    """Some tokens of the row."""

    tokens: Tokens
    document_starts: NDArray[np.int64]
    """Which of them begin a document."""
    input_bytes: int
    """Bytes of input that they were."""
    unreadable: Sequence[UnreadableRecord] = ()


class PackOptions(NamedTuple):
    seq_len: int
    """Tokens of a block."""
    pad_last: bool = False
    """Fill up the last block, with labels that count nowhere."""
    pad_token: int = 0
    write_position_ids: bool = True
    """Write position_ids."""


class PackCounts(NamedTuple):
    documents: int = 0
    tokens: int = 0
    skipped: int = 0
    blocks: int = 0
    leftover_tokens: int = 0
    """Tokens after the last whole block."""


def chunks_from_text(paths: Sequence[Path], job: TokenizeOptions, workers: int) -> Iterator[TokenChunk]:
    """Documents through a tokenizer, by so many processes. Those without text are left out."""
    for made in map_ordered(partial(encode_slice, job), documents.input_slices(paths), workers):
        rows = made.sequences[job.text_keys[0]]
        ends = np.cumsum(rows.sequence_lengths, dtype=np.int64)
        yield TokenChunk(rows.tokens, ends - rows.sequence_lengths, made.input_bytes, made.unreadable)


def guess_end_token(data: MegatronTokens) -> int | None:
    """What the first document ends with; None where none has tokens."""
    _, ends = _document_bounds(data)
    return int(_token_stream(data).tokens(int(ends[0]) - 1, 1)[0]) if len(ends) else None


def chunks_from_tokens(
    data: MegatronTokens, end_token: int | None, vocab_size: int | None = None, end_is_guess: bool = False
) -> Iterator[TokenChunk]:
    """Documents of token files, and `end` after each that does not end with it; None: they stay as they are. With
    `complete`, `end` is a guess, and refused where a document ends otherwise or has it inside."""
    limit = vocab_size or 2**31
    begins, ends = _document_bounds(data)
    row = _token_stream(data)
    for start in range(0, len(row), TOKENS_PER_READ):
        found = row.tokens(start, TOKENS_PER_READ)
        if found.min() < 0 or found.max() >= limit:
            place = int(((found < 0) | (found >= limit)).argmax())
            raise UserError(f"{data.prefix}.bin: token {found[place]} at {start + place}; wanted: 0 to {limit - 1}")
        tokens = found.astype(np.int32)
        first = _positions_between(begins, start, start + len(tokens)) - start
        if end_token is not None:
            last = _positions_between(ends - 1, start, start + len(tokens)) - start
            after = last[tokens[last] != end_token] + 1
            if end_is_guess and (len(after) or np.count_nonzero(tokens == end_token) > len(last)):
                raise UserError(
                    f"{data.prefix}.bin: the first document ends with {end_token}, but others do not, or have it inside; "
                    "name the --tokenizer whose end token is to follow each, or --no-append-eod"
                )
            tokens = np.insert(tokens, after, end_token)
            first = first + np.searchsorted(after, first, side="right")
        yield TokenChunk(tokens, first, len(found) * data.dtype.itemsize)


def _document_bounds(data: MegatronTokens) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Where documents with tokens begin and end in the row of all sequences."""
    ends = np.concatenate((np.zeros(1, np.int64), np.cumsum(data.sequence_lengths, dtype=np.int64)))
    bounds = np.unique(ends[data.document_bounds])
    return bounds[:-1], bounds[1:]


def _token_stream(data: MegatronTokens) -> ContiguousTokens | ReorderedTokens:
    if data.contiguous:
        return ContiguousTokens(str(data.prefix), data.tokens, data.sequence_starts)
    return ReorderedTokens(data, np.arange(len(data), dtype=np.int32))


def _positions_between(places: NDArray[np.int64], start: int, end: int) -> NDArray[np.int64]:
    return places[slice(*np.searchsorted(places, (start, end)))]


def write_blocks(
    parts: Iterable[TokenChunk],
    directory: Path,
    options: PackOptions,
    overwrite: bool,
    on_unreadable: Callable[[UnreadableRecord], None],
    on_progress: Callable[[int, PackCounts], None],
) -> PackCounts:
    """Write blocks to a directory. What could not be read is told to `bad`, which may raise."""
    sequence = options.seq_len
    columns = {"input_ids": "int32", "attention_mask": "int8", "labels": "int32"}
    if options.write_position_ids:
        columns["position_ids"] = "int32"
    rows = max(
        min(MAX_BATCH_ROWS, MAX_BATCH_BYTES // (sequence * sum(np.dtype(each).itemsize for each in columns.values()))),
        1,
    )
    counts = PackCounts()

    def counted() -> Iterator[TokenChunk]:
        nonlocal counts
        done = 0
        for part in parts:
            for each in part.unreadable:
                on_unreadable(each)
            yield part
            done += part.input_bytes
            counts = counts._replace(
                documents=counts.documents + len(part.document_starts),
                tokens=counts.tokens + len(part.tokens),
                skipped=counts.skipped + len(part.unreadable),
            )
            on_progress(done, counts)

    with ArrowDatasetWriter(directory, columns, overwrite) as writer:
        blocks = rest = 0
        for tokens, begins in cut_stream(counted(), rows * sequence):
            whole, rest = divmod(len(tokens), sequence)
            if rest and options.pad_last:
                begins = np.append(begins, len(tokens))
                tokens = np.append(tokens, np.full(sequence - rest, options.pad_token, np.int32))
                whole += 1
            if whole:
                writer.add(
                    _block_columns(tokens[: whole * sequence], begins, sequence, rest if options.pad_last else 0)
                )
            blocks += whole
        if not blocks:
            raise UserError(
                f"the input gives {counts.tokens} tokens, too few for a block of {sequence}; use more text, or a "
                "shorter --sequence"
            )
        counts = counts._replace(blocks=blocks, leftover_tokens=rest)
        writer.description = f"{counts.documents} documents, {counts.tokens} tokens, in blocks of {sequence}"
    return counts


def cut_stream(parts: Iterable[TokenChunk], size: int) -> Iterator[tuple[NDArray[np.int32], NDArray[np.int64]]]:
    """The row in stretches of `size` tokens (the last may be shorter), and where documents begin in each."""
    held, filled = np.empty(size, np.int32), 0
    marks: list[NDArray[np.int64]] = []
    for part in parts:
        at, total = 0, len(part.tokens)
        while at < total:
            take = min(total - at, size - filled)
            held[filled : filled + take] = part.tokens[at : at + take]
            marks.append(_positions_between(part.document_starts, at, at + take) - at + filled)
            at, filled = at + take, filled + take
            if filled == size:
                yield held, np.concatenate(marks)
                held, filled, marks = np.empty(size, np.int32), 0, []
    if filled:
        yield held[:filled], np.concatenate(marks)


def _block_columns(
    tokens: NDArray[np.int32], begins: NDArray[np.int64], sequence: int, rest: int
) -> dict[str, IntArray]:
    """Whole blocks; of the last one, only `rest` tokens count unless that is 0."""
    mask, labels = np.ones(len(tokens), np.int8), tokens
    if rest:
        labels = tokens.copy()
        labels[rest - sequence :] = IGNORE_INDEX
        mask[rest - sequence :] = 0
    starts = np.union1d(begins[begins < len(tokens)], np.arange(0, len(tokens), sequence))
    first = np.repeat(starts.astype(np.int32), np.diff(starts, append=len(tokens)))
    positions = np.arange(len(tokens), dtype=np.int32) - first
    found: dict[str, IntArray] = {
        "input_ids": tokens,
        "attention_mask": mask,
        "labels": labels,
        "position_ids": positions,
    }
    return {name: column.reshape(-1, sequence) for name, column in found.items()}
