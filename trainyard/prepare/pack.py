"""Fixed-length blocks of tokens: documents one after the other, an end token after each, cut every `seq_len` tokens.

All documents form one stream: a block ends where the next begins, so only the end of the stream can be too short for
a block. The column position_ids records document boundaries: positions restart at 0 in each document, and in each
block, since a model has no positions beyond its own length.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from trainyard.core.constants import IGNORE_INDEX
from trainyard.core.errors import UserError
from trainyard.core.quantities import counted
from trainyard.core.worker_pool import map_ordered
from trainyard.data.formats import documents
from trainyard.data.formats.arrow_dataset import IntArray
from trainyard.data.formats.documents import UnreadableRecord
from trainyard.data.formats.megatron_bin import MegatronTokens, Tokens
from trainyard.data.loading.token_samples import token_stream
from trainyard.prepare.arrow_writer import ArrowDatasetWriter
from trainyard.prepare.inspect import check_range
from trainyard.prepare.tokenize import TokenizeOptions, encode_slice

TOKENS_PER_READ = 1 << 22
MAX_BATCH_ROWS, MAX_BATCH_BYTES = 1000, 16 << 20
"""Limits of a record batch, which is the least that a reader loads."""


class TokenChunk(NamedTuple):
    """Consecutive tokens of the stream."""

    tokens: Tokens
    document_starts: NDArray[np.int64]
    """Positions in `tokens` at which documents start."""
    input_bytes: int
    """Bytes of the input that this chunk stands for, for progress."""
    unreadable: Sequence[UnreadableRecord] = ()


class PackOptions(NamedTuple):
    seq_len: int
    """Tokens per block."""
    pad_last: bool = False
    """Pad the last block, with labels IGNORE_INDEX, instead of dropping it."""
    pad_token: int = 0
    write_position_ids: bool = True


@dataclass
class PackCounts:
    documents: int = 0
    tokens: int = 0
    skipped: int = 0
    blocks: int = 0
    leftover_tokens: int = 0
    """Tokens after the last full block."""


def chunks_from_text(paths: Sequence[Path], options: TokenizeOptions, workers: int) -> Iterator[TokenChunk]:
    """Tokenize documents in `workers` processes. Documents without text are left out."""
    for result in map_ordered(partial(encode_slice, options), documents.input_slices(paths), workers):
        sequences = result.sequences[options.text_keys[0]]
        ends = np.cumsum(sequences.sequence_lengths, dtype=np.int64)
        starts = ends - sequences.sequence_lengths
        yield TokenChunk(sequences.tokens, starts, result.input_bytes, result.unreadable)


def guess_end_token(token_files: MegatronTokens) -> int | None:
    """The last token of the first document; None if no document has tokens."""
    _, ends = _document_bounds(token_files)
    stream = token_stream(token_files, range(len(token_files)))
    return int(stream.tokens(int(ends[0]) - 1, 1)[0]) if len(ends) else None


def chunks_from_tokens(
    token_files: MegatronTokens, end_token: int | None, vocab_size: int | None = None, end_is_guess: bool = False
) -> Iterator[TokenChunk]:
    """Read documents of token files and append `end_token` to each that does not end with it (None: to none).

    With `end_is_guess`, raise if a document ends with another token or has `end_token` inside.
    """
    limit = vocab_size or 2**31
    starts, ends = _document_bounds(token_files)
    stream = token_stream(token_files, range(len(token_files)))
    for position in range(0, len(stream), TOKENS_PER_READ):
        stored = stream.tokens(position, TOKENS_PER_READ)
        check_range(f"{token_files.prefix}.bin", stored, position, limit)
        tokens = stored.astype(np.int32)
        first = _positions_between(starts, position, position + len(tokens)) - position
        if end_token is not None:
            last = _positions_between(ends - 1, position, position + len(tokens)) - position
            insert_at = last[tokens[last] != end_token] + 1
            if end_is_guess and (len(insert_at) or np.count_nonzero(tokens == end_token) > len(last)):
                raise UserError(
                    f"{token_files.prefix}.bin: the first document ends with token {end_token}, but other documents "
                    "do not, or contain it; use --tokenizer to append its end token to each, or --no-append-eod"
                )
            tokens = np.insert(tokens, insert_at, end_token)
            first = first + np.searchsorted(insert_at, first, side="right")
        yield TokenChunk(tokens, first, len(stored) * token_files.dtype.itemsize)


def _document_bounds(token_files: MegatronTokens) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Start and end of each non-empty document in the stream of all sequences."""
    bounds = np.unique(token_files.sequence_bounds[token_files.document_bounds])
    return bounds[:-1], bounds[1:]


def _positions_between(positions: NDArray[np.int64], start: int, end: int) -> NDArray[np.int64]:
    """The sorted positions from `start` to `end` (exclusive)."""
    return positions[slice(*np.searchsorted(positions, (start, end)))]


def write_blocks(
    chunks: Iterable[TokenChunk],
    directory: Path,
    options: PackOptions,
    overwrite: bool,
    on_unreadable: Callable[[UnreadableRecord], None],
    on_progress: Callable[[int, PackCounts], None],
) -> PackCounts:
    """Write blocks to a directory. `on_unreadable` may raise to stop."""
    seq_len = options.seq_len
    columns = {"input_ids": "int32", "attention_mask": "int8", "labels": "int32"}
    if options.write_position_ids:
        columns["position_ids"] = "int32"
    row_bytes = seq_len * sum(np.dtype(dtype).itemsize for dtype in columns.values())
    batch_rows = max(min(MAX_BATCH_ROWS, MAX_BATCH_BYTES // row_bytes), 1)
    counts = PackCounts()

    def counted_chunks() -> Iterator[TokenChunk]:
        done = 0
        for chunk in chunks:
            for record in chunk.unreadable:
                on_unreadable(record)
            yield chunk
            done += chunk.input_bytes
            counts.documents += len(chunk.document_starts)
            counts.tokens += len(chunk.tokens)
            counts.skipped += len(chunk.unreadable)
            on_progress(done, counts)

    with ArrowDatasetWriter(directory, columns, overwrite) as writer:
        for tokens, starts in cut_stream(counted_chunks(), batch_rows * seq_len):
            full, leftover = divmod(len(tokens), seq_len)
            if leftover and options.pad_last:
                starts = np.append(starts, len(tokens))
                tokens = np.append(tokens, np.full(seq_len - leftover, options.pad_token, np.int32))
                full += 1
            if full:
                padded = leftover if options.pad_last else 0
                writer.add(_block_columns(tokens[: full * seq_len], starts, seq_len, padded))
            counts.blocks += full
            counts.leftover_tokens = leftover
        if not counts.blocks:
            raise UserError(
                f"the input has {counted(counts.tokens, 'token')}, too few for a block of "
                f"{seq_len}; use more text, or a "
                "shorter --seq-len"
            )
        writer.description = (
            f"{counted(counts.documents, 'document')}, {counted(counts.tokens, 'token')}, in blocks of {seq_len}"
        )
    return counts


def cut_stream(chunks: Iterable[TokenChunk], size: int) -> Iterator[tuple[NDArray[np.int32], NDArray[np.int64]]]:
    """The stream in arrays of `size` tokens (the last may be shorter), and the document starts in each."""
    buffer, filled = np.empty(size, np.int32), 0
    starts: list[NDArray[np.int64]] = []
    for chunk in chunks:
        position, total = 0, len(chunk.tokens)
        while position < total:
            count = min(total - position, size - filled)
            buffer[filled : filled + count] = chunk.tokens[position : position + count]
            starts.append(_positions_between(chunk.document_starts, position, position + count) - position + filled)
            position, filled = position + count, filled + count
            if filled == size:
                yield buffer, np.concatenate(starts)
                buffer, filled, starts = np.empty(size, np.int32), 0, []
    if filled:
        yield buffer[:filled], np.concatenate(starts)


def _block_columns(
    tokens: NDArray[np.int32], document_starts: NDArray[np.int64], seq_len: int, last_block_tokens: int
) -> dict[str, IntArray]:
    """Columns of full blocks. In the last one, only `last_block_tokens` are not padding unless that is 0."""
    mask, labels = np.ones(len(tokens), np.int8), tokens
    if last_block_tokens:
        labels = tokens.copy()
        labels[last_block_tokens - seq_len :] = IGNORE_INDEX
        mask[last_block_tokens - seq_len :] = 0
    starts = np.union1d(document_starts[document_starts < len(tokens)], np.arange(0, len(tokens), seq_len))
    first = np.repeat(starts.astype(np.int32), np.diff(starts, append=len(tokens)))
    columns: dict[str, IntArray] = {
        "input_ids": tokens,
        "attention_mask": mask,
        "labels": labels,
        "position_ids": np.arange(len(tokens), dtype=np.int32) - first,
    }
    return {name: column.reshape(-1, seq_len) for name, column in columns.items()}
