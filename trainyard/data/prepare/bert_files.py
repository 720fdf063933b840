"""Text documents to a set of BERT's HDF5 files, in parallel.

The number of samples is known only when all are made, but files should have equally many. So workers first write the
samples of each chunk of documents, shuffled, to a temporary file; then each HDF5 file takes its share of every chunk.
All of this happens in a hidden directory next to the result, and the HDF5 files get their names together at the end.
"""

import os
import shutil
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, NoReturn, Protocol, Self, cast

import numpy as np

from trainyard.core.atomic_files import fsync_directory
from trainyard.core.errors import UserError, one_line
from trainyard.data.file_lock import file_lock
from trainyard.data.formats import documents
from trainyard.data.formats.bert_hdf5 import BertShape, Records, record_dtype, write_samples
from trainyard.data.formats.documents import InputSlice, UnreadableRecord
from trainyard.data.prepare.bert_samples import BertOptions, load_bert_tokenizer, make_samples, tokenize_documents
from trainyard.data.prepare.worker_pool import map_ordered
from trainyard.data.text.sentences import split_sentences

MAX_SAMPLES_PER_FILE = 1 << 18
"""Unless the number of files is given."""
MIN_TEXTS_PER_CHUNK = 8
"""Text files per chunk, at least: pairs need other documents in the chunk, and a text file is one document."""


class DocumentChunk(NamedTuple):
    chunk_id: int
    slices: list[InputSlice]


class ChunkResult(NamedTuple):
    documents: int
    samples: int
    unreadable: list[UnreadableRecord]
    input_bytes: int
    """Bytes of the input that this chunk stands for, for progress."""


class BertCounts(NamedTuple):
    documents: int
    samples: int
    files: int
    skipped: int


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


class ProgressReporter(Protocol):
    """Shows the progress of one phase of the work inside its `with` block."""

    def __enter__(self) -> Self: ...

    def update(self, done: int, total: int, details: str = "") -> None:
        """`done` and `total` are bytes."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


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
        num_documents = num_samples = skipped = done = 0
        chunk_samples: list[int] = []
        start, size = time.monotonic(), documents.total_bytes(paths)
        make = partial(write_chunk_samples, options, keys, directory)
        results = map_ordered(make, document_chunks(paths), workers)
        with progress("bert") as reporter, closing(cast(Generator[ChunkResult], results)):
            for result in results:
                for record in result.unreadable:
                    on_unreadable(record)
                num_documents += result.documents
                num_samples += result.samples
                skipped += len(result.unreadable)
                done += result.input_bytes
                chunk_samples.append(result.samples)
                rate = num_samples / (time.monotonic() - start)
                reporter.update(done, size, f"{num_documents:,} documents, {num_samples:,} samples, {rate:,.0f}/s")
        if not num_samples:
            raise UserError(f"{paths[0]}: {num_documents} documents in all of the input give no sample")
        num_files = target.num_files or -(-num_samples // MAX_SAMPLES_PER_FILE)
        if num_files > num_samples:
            raise UserError(f"--files {num_files}: there are {num_samples} samples; nearest: {num_samples}")
        size = num_samples * record_dtype(options.seq_len, options.max_predictions, vocab.size).itemsize
        write = partial(write_hdf5_file, options, vocab.size, directory, chunk_samples, num_files)
        written = map_ordered(write, range(num_files), min(workers, num_files))
        with progress("write") as reporter, closing(cast(Generator[None], written)):
            for count, _ in enumerate(written, 1):
                reporter.update(size * count // num_files, size, f"{count} of {num_files} files")
        for path in target.existing():
            path.unlink()
        for index in range(num_files):
            os.replace(directory / f"{index}.hdf5", target.path(index))
        fsync_directory(target.directory)
    return BertCounts(num_documents, num_samples, num_files, skipped)


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
    directory = target.directory / f".{target.name}_training.part"
    existing = target.existing()
    if existing and not target.overwrite and not directory.exists():
        raise UserError(f"{existing[0]}: already exists; --overwrite replaces it, --name NAME writes other files")
    directory.mkdir(exist_ok=True)

    def busy() -> NoReturn:
        raise UserError(f"{directory}: another run is writing there; wait for it to end, or use another --name")

    with file_lock(directory / "lock", busy):
        for path in directory.iterdir():
            if path.name != "lock":
                path.unlink()
        try:
            yield directory
        finally:
            shutil.rmtree(directory)


def document_chunks(paths: Sequence[Path]) -> Iterator[DocumentChunk]:
    """Groups of input slices with enough documents each. The last chunk may be up to twice as large."""
    ready: list[InputSlice] = []
    growing: list[InputSlice] = []
    chunk_id = 0
    for input_slice in documents.input_slices(paths):
        growing.append(input_slice)
        num_texts = sum(part.kind == "text" for part in growing)
        size = sum(len(part.data) if part.data else part.input_bytes for part in growing)
        if size >= documents.SLICE_BYTES and (not num_texts or num_texts >= MIN_TEXTS_PER_CHUNK):
            if ready:
                yield DocumentChunk(chunk_id, ready)
                chunk_id += 1
            ready, growing = growing, []
    if ready or growing:
        yield DocumentChunk(chunk_id, ready + growing)


def write_chunk_samples(
    options: BertOptions, keys: Sequence[str], directory: Path, chunk: DocumentChunk
) -> ChunkResult:
    """Write the samples of a chunk to a temporary file. Texts under several keys are one document."""
    tokenizer, vocab = load_bert_tokenizer(options.tokenizer)
    texts: list[list[str]] = []
    unreadable: list[UnreadableRecord] = []
    for input_slice in chunk.slices:
        for record in documents.read_documents(input_slice, keys[:1] if input_slice.kind == "text" else keys):
            if isinstance(record, UnreadableRecord):
                unreadable.append(record)
            else:
                texts.append([sentence for text in record for sentence in split_sentences(text)])
    text = tokenize_documents(tokenizer, texts)
    samples = make_samples(text, options, vocab, chunk.chunk_id)
    samples.tofile(directory / str(chunk.chunk_id))
    input_bytes = sum(input_slice.input_bytes for input_slice in chunk.slices)
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
    total = sum(chunk_samples)

    def blocks() -> Iterator[Records]:
        start = 0
        for chunk, count in enumerate(chunk_samples):
            offset = _count_before(start, start + count, num_files, file_index)
            length = _count_before(start, start + count, num_files, file_index + 1) - offset
            if length:
                yield np.fromfile(directory / str(chunk), dtype, length, offset=offset * dtype.itemsize)
            start += count

    num_samples = _count_before(0, total, num_files, file_index + 1) - _count_before(0, total, num_files, file_index)
    shape = BertShape(num_samples, options.seq_len, options.max_predictions)
    write_samples(directory / f"{file_index}.hdf5", blocks(), shape)


def _count_before(start: int, end: int, num_files: int, file_index: int) -> int:
    """How many of the samples `start` to `end` belong to the files before this one."""

    def count(samples: int) -> int:
        return samples // num_files * file_index + min(samples % num_files, file_index)

    return count(end) - count(start)
