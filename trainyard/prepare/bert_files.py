"""Text documents to a set of BERT's HDF5 files, in parallel.

The number of samples is known only when all are made, but files should have equally many. So workers first write the
samples of each chunk of documents, shuffled, to a temporary file; then each HDF5 file takes its share of every chunk.
All of this happens in a hidden directory next to the result, and the HDF5 files get their names together at the end.
"""

import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple, NoReturn, Protocol

import numpy as np
from numpy.typing import NDArray

from trainyard.core.atomic_files import fsync_directory
from trainyard.core.errors import UserError, one_line
from trainyard.core.file_lock import file_lock
from trainyard.core.quantities import counted
from trainyard.core.worker_pool import map_ordered
from trainyard.data.formats import documents
from trainyard.data.formats.bert_hdf5 import UNNAMED, BertShape, record_dtype, staging_directory, write_samples
from trainyard.data.formats.documents import InputSlice, UnreadableRecord
from trainyard.prepare.bert_samples import BertOptions, load_bert_tokenizer, make_samples, tokenize_documents
from trainyard.prepare.sentences import split_sentences

MAX_SAMPLES_PER_FILE = 1 << 18
"""Limit for a set whose number of files is not given."""
MIN_TEXTS_PER_CHUNK = 8
"""Text files per chunk, at least: pairs need other documents in the chunk, and a text file is one document."""


class ChunkResult(NamedTuple):
    documents: int
    samples: int
    unreadable: list[UnreadableRecord]
    input_bytes: int
    """Bytes of the input that this chunk stands for, for progress."""


@dataclass
class BertCounts:
    documents: int = 0
    samples: int = 0
    files: int = 0
    skipped: int = 0


class BertFileSet(NamedTuple):
    """The output: files DIRECTORY/NAME_training_00000.hdf5 and so on."""

    directory: Path
    name: str
    num_files: int | None = None
    """Default: enough for MAX_SAMPLES_PER_FILE."""
    overwrite: bool = False

    def path(self, file_index: int) -> Path:
        return self.directory / f"{self.name}_training_{file_index:05}.hdf5"

    def existing(self) -> list[Path]:
        return sorted(self.directory.glob(f"{self.name}_training_[0-9][0-9][0-9][0-9][0-9].hdf5"))


class ProgressReporter(AbstractContextManager["ProgressReporter"], Protocol):
    """Shows the progress of one phase of the work inside its `with` block."""

    def update(self, done: int, total: int, details: str = "") -> None:
        """`done` and `total` are bytes."""


def build_bert_files(
    paths: Sequence[Path],
    keys: Sequence[str],
    options: BertOptions,
    target: BertFileSet,
    workers: int,
    on_unreadable: Callable[[UnreadableRecord], None],
    progress: Callable[[str], ProgressReporter],
) -> BertCounts:
    """Write the file set. `on_unreadable` may raise to stop.

    `progress` makes one reporter per phase: the workers of a phase must start before its reporter starts threads.
    """
    _, vocab = load_bert_tokenizer(options.tokenizer)
    if options.whole_word_mask and not vocab.is_continuation.any():
        raise UserError(f"--whole-word: {options.tokenizer.name} has no tokens that begin with ##, as WordPiece has")
    with _report_os_errors(target), work_directory(target) as directory:
        counts, done = BertCounts(), 0
        chunk_samples: list[int] = []
        start, size = time.monotonic(), documents.total_bytes(paths)
        make = partial(write_chunk_samples, options, keys, directory)
        results = map_ordered(make, enumerate(document_chunks(paths)), workers)
        with progress("bert") as reporter, closing(results):
            for result in results:
                for record in result.unreadable:
                    on_unreadable(record)
                counts.documents += result.documents
                counts.samples += result.samples
                counts.skipped += len(result.unreadable)
                done += result.input_bytes
                chunk_samples.append(result.samples)
                rate = f"{counts.samples / (time.monotonic() - start):,.0f}/s"
                reporter.update(
                    done,
                    size,
                    f"{counted(counts.documents, 'document', ',')}, {counted(counts.samples, 'sample', ',')}, {rate}",
                )
        if not counts.samples:
            raise UserError(
                f"{paths[0]}: {counted(counts.documents, 'document')} in all of the input, too few for a sample"
            )
        counts.files = num_files = target.num_files or -(-counts.samples // MAX_SAMPLES_PER_FILE)
        if num_files > counts.samples:
            raise UserError(
                f"--files {num_files}: the input gives {counted(counts.samples, 'sample')}; nearest: {counts.samples}"
            )
        size = counts.samples * record_dtype(options.seq_len, options.max_predictions, vocab.size).itemsize
        write = partial(write_hdf5_file, options, vocab.size, directory, chunk_samples, num_files)
        written = map_ordered(write, range(num_files), min(workers, num_files))
        with progress("write") as reporter, closing(written):
            for count, _ in enumerate(written, 1):
                reporter.update(size * count // num_files, size, f"{count} of {counted(num_files, 'file')}")
        (directory / UNNAMED).touch()  # until all files have their names, none of them is read
        for path in target.existing():
            path.unlink()
        for index in range(num_files):
            os.replace(directory / f"{index}.hdf5", target.path(index))
        fsync_directory(target.directory)
        (directory / UNNAMED).unlink()
    return counts


@contextmanager
def _report_os_errors(target: BertFileSet) -> Iterator[None]:
    """Report a full disk or a file without permission in one line."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{error.filename or target.directory}: {error.strerror or one_line(error)}") from None


@contextmanager
def work_directory(target: BertFileSet) -> Iterator[Path]:
    """An empty directory for incomplete files, for one process at a time. One left by a killed run is emptied."""
    directory = staging_directory(target.path(0))
    existing = target.existing()
    if existing and not target.overwrite and not directory.exists():
        raise UserError(f"{existing[0]}: already exists; --overwrite replaces it, --name NAME writes other files")
    directory.mkdir(exist_ok=True)

    def busy() -> NoReturn:
        raise UserError(f"{directory}: another run is writing there; wait for it to end, or use another --name")

    with file_lock(directory / "lock", busy):
        _empty(directory)
        try:
            yield directory
        finally:
            _empty(directory)
            if not (directory / UNNAMED).exists():
                shutil.rmtree(directory)


def _empty(directory: Path) -> None:
    for path in directory.iterdir():
        if path.name not in ("lock", UNNAMED):
            path.unlink()


def document_chunks(paths: Sequence[Path]) -> Iterator[list[InputSlice]]:
    """Groups of input slices with enough documents each. The last chunk may be up to twice as large."""
    ready: list[InputSlice] = []
    growing: list[InputSlice] = []
    for input_slice in documents.input_slices(paths):
        growing.append(input_slice)
        num_texts = sum(part.kind == "text" for part in growing)
        size = sum(len(part.data) if part.data else part.input_bytes for part in growing)
        if size >= documents.SLICE_BYTES and (not num_texts or num_texts >= MIN_TEXTS_PER_CHUNK):
            if ready:
                yield ready
            ready, growing = growing, []
    if ready or growing:
        yield ready + growing


def write_chunk_samples(
    options: BertOptions, keys: Sequence[str], directory: Path, chunk: tuple[int, list[InputSlice]]
) -> ChunkResult:
    """Write the samples of a numbered chunk to a temporary file. Texts under several keys are one document."""
    chunk_id, slices = chunk
    tokenizer, vocab = load_bert_tokenizer(options.tokenizer)
    sentences: list[list[str]] = []
    unreadable: list[UnreadableRecord] = []
    for part in slices:
        texts, skipped = documents.read_documents(part, keys[:1] if part.kind == "text" else keys)
        sentences += [[sentence for text in record for sentence in split_sentences(text)] for record in texts]
        unreadable += skipped
    text = tokenize_documents(tokenizer, sentences)
    samples = make_samples(text, options, vocab, chunk_id)
    samples.tofile(directory / str(chunk_id))
    input_bytes = sum(part.input_bytes for part in slices)
    return ChunkResult(len(text.document_bounds) - 1, len(samples), unreadable, input_bytes)


def write_hdf5_file(
    options: BertOptions,
    vocab_size: int,
    directory: Path,
    chunk_samples: Sequence[int],
    num_files: int,
    file_index: int,
) -> None:
    """Write one of `num_files` files. It gets as many samples as if sample n belonged to file n % num_files; since
    chunks are shuffled, it takes them from consecutive positions of each chunk."""
    dtype = record_dtype(options.seq_len, options.max_predictions, vocab_size)
    bounds = np.concatenate(([0], np.cumsum(chunk_samples)))

    def samples_before(index: int) -> NDArray[np.int64]:
        """The number of samples of each chunk that belong to the files before this one."""
        return np.diff(bounds // num_files * index + np.minimum(bounds % num_files, index))

    offsets = samples_before(file_index)
    counts = samples_before(file_index + 1) - offsets
    blocks = (
        np.fromfile(directory / str(chunk), dtype, counts[chunk], offset=offsets[chunk] * dtype.itemsize)
        for chunk in np.flatnonzero(counts).tolist()
    )
    shape = BertShape(int(counts.sum()), options.seq_len, options.max_predictions)
    write_samples(directory / f"{file_index}.hdf5", blocks, shape)
