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
from trainyard.data.formats.arrow_dataset import Numbers
from trainyard.data.formats.arrow_writer import Writer
from trainyard.data.formats.documents import Bad
from trainyard.data.formats.megatron_bin import Indexed, Tokens
from trainyard.data.loading.token_samples import IGNORED, Chain, Flat
from trainyard.data.prepare.tokenize import Job, encode
from trainyard.data.prepare.worker_pool import ordered

CHUNK = 1 << 22
"""Tokens taken from a file at a time."""
BATCH_ROWS, BATCH_BYTES = 1000, 16 << 20
"""Of a record batch, whichever is less: readers take in one at least."""


class Part(NamedTuple):
    """Some tokens of the row."""

    tokens: Tokens
    begins: NDArray[np.int64]
    """Which of them begin a document."""
    weight: int
    """Bytes of input that they were."""
    bad: Sequence[Bad] = ()


class Shape(NamedTuple):
    sequence: int
    """Tokens of a block."""
    keep_last: bool = False
    """Fill up the last block, with labels that count nowhere."""
    pad: int = 0
    boundaries: bool = True
    """Write position_ids."""


class Counts(NamedTuple):
    documents: int = 0
    tokens: int = 0
    bad: int = 0
    blocks: int = 0
    rest: int = 0
    """Tokens after the last whole block."""


def from_text(paths: Sequence[Path], job: Job, workers: int) -> Iterator[Part]:
    """Documents through a tokenizer, by so many processes. Those without text are left out."""
    for made in ordered(partial(encode, job), documents.pieces(paths), workers):
        rows = made.rows[job.keys[0]]
        ends = np.cumsum(rows.sizes, dtype=np.int64)
        yield Part(rows.tokens, ends - rows.sizes, made.weight, made.bad)


def last_token(data: Indexed) -> int | None:
    """What the first document ends with; None where none has tokens."""
    _, ends = _bounds(data)
    return int(_row(data).tokens(int(ends[0]) - 1, 1)[0]) if len(ends) else None


def from_tokens(data: Indexed, end: int | None, vocab: int | None = None, complete: bool = False) -> Iterator[Part]:
    """Documents of token files, and `end` after each that does not end with it; None: they stay as they are. With
    `complete`, `end` is a guess, and refused where a document ends otherwise or has it inside."""
    limit = vocab or 2**31
    begins, ends = _bounds(data)
    row = _row(data)
    for start in range(0, len(row), CHUNK):
        found = row.tokens(start, CHUNK)
        if found.min() < 0 or found.max() >= limit:
            place = int(((found < 0) | (found >= limit)).argmax())
            raise UserError(f"{data.prefix}.bin: token {found[place]} at {start + place}; wanted: 0 to {limit - 1}")
        tokens = found.astype(np.int32)
        first = _within(begins, start, start + len(tokens)) - start
        if end is not None:
            last = _within(ends - 1, start, start + len(tokens)) - start
            after = last[tokens[last] != end] + 1
            if complete and (len(after) or np.count_nonzero(tokens == end) > len(last)):
                raise UserError(
                    f"{data.prefix}.bin: the first document ends with {end}, but others do not, or have it inside; "
                    "name the --tokenizer whose end token is to follow each, or --no-append-eod"
                )
            tokens = np.insert(tokens, after, end)
            first = first + np.searchsorted(after, first, side="right")
        yield Part(tokens, first, len(found) * data.dtype.itemsize)


def _bounds(data: Indexed) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Where documents with tokens begin and end in the row of all sequences."""
    ends = np.concatenate((np.zeros(1, np.int64), np.cumsum(data.sizes, dtype=np.int64)))
    bounds = np.unique(ends[data.documents])
    return bounds[:-1], bounds[1:]


def _row(data: Indexed) -> Flat | Chain:
    if data.contiguous:
        return Flat(str(data.prefix), data.tokens, data.starts)
    return Chain(data, np.arange(len(data), dtype=np.int32))


def _within(places: NDArray[np.int64], start: int, end: int) -> NDArray[np.int64]:
    return places[slice(*np.searchsorted(places, (start, end)))]


def pack(
    parts: Iterable[Part],
    directory: Path,
    shape: Shape,
    overwrite: bool,
    bad: Callable[[Bad], None],
    show: Callable[[int, Counts], None],
) -> Counts:
    """Write blocks to a directory. What could not be read is told to `bad`, which may raise."""
    sequence = shape.sequence
    columns = {"input_ids": "int32", "attention_mask": "int8", "labels": "int32"}
    if shape.boundaries:
        columns["position_ids"] = "int32"
    rows = max(
        min(BATCH_ROWS, BATCH_BYTES // (sequence * sum(np.dtype(each).itemsize for each in columns.values()))), 1
    )
    counts = Counts()

    def counted() -> Iterator[Part]:
        nonlocal counts
        done = 0
        for part in parts:
            for each in part.bad:
                bad(each)
            yield part
            done += part.weight
            counts = counts._replace(
                documents=counts.documents + len(part.begins),
                tokens=counts.tokens + len(part.tokens),
                bad=counts.bad + len(part.bad),
            )
            show(done, counts)

    with Writer(directory, columns, overwrite) as writer:
        blocks = rest = 0
        for tokens, begins in cut(counted(), rows * sequence):
            whole, rest = divmod(len(tokens), sequence)
            if rest and shape.keep_last:
                begins = np.append(begins, len(tokens))
                tokens = np.append(tokens, np.full(sequence - rest, shape.pad, np.int32))
                whole += 1
            if whole:
                writer.add(_columns(tokens[: whole * sequence], begins, sequence, rest if shape.keep_last else 0))
            blocks += whole
        if not blocks:
            raise UserError(
                f"the input gives {counts.tokens} tokens, too few for a block of {sequence}; use more text, or a "
                "shorter --sequence"
            )
        counts = counts._replace(blocks=blocks, rest=rest)
        writer.description = f"{counts.documents} documents, {counts.tokens} tokens, in blocks of {sequence}"
    return counts


def cut(parts: Iterable[Part], size: int) -> Iterator[tuple[NDArray[np.int32], NDArray[np.int64]]]:
    """The row in stretches of `size` tokens (the last may be shorter), and where documents begin in each."""
    held, filled = np.empty(size, np.int32), 0
    marks: list[NDArray[np.int64]] = []
    for part in parts:
        at, total = 0, len(part.tokens)
        while at < total:
            take = min(total - at, size - filled)
            held[filled : filled + take] = part.tokens[at : at + take]
            marks.append(_within(part.begins, at, at + take) - at + filled)
            at, filled = at + take, filled + take
            if filled == size:
                yield held, np.concatenate(marks)
                held, filled, marks = np.empty(size, np.int32), 0, []
    if filled:
        yield held[:filled], np.concatenate(marks)


def _columns(tokens: NDArray[np.int32], begins: NDArray[np.int64], sequence: int, rest: int) -> dict[str, Numbers]:
    """Whole blocks; of the last one, only `rest` tokens count unless that is 0."""
    mask, labels = np.ones(len(tokens), np.int8), tokens
    if rest:
        labels = tokens.copy()
        labels[rest - sequence :] = IGNORED
        mask[rest - sequence :] = 0
    starts = np.union1d(begins[begins < len(tokens)], np.arange(0, len(tokens), sequence))
    first = np.repeat(starts.astype(np.int32), np.diff(starts, append=len(tokens)))
    positions = np.arange(len(tokens), dtype=np.int32) - first
    found: dict[str, Numbers] = {
        "input_ids": tokens,
        "attention_mask": mask,
        "labels": labels,
        "position_ids": positions,
    }
    return {name: column.reshape(-1, sequence) for name, column in found.items()}
