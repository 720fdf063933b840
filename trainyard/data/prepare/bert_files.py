"""From documents to a set of BERT's HDF5 files, by as many processes as asked for.

How many samples there will be is not known before all are made, and files are to have equally many. So workers first
put the samples of each chunk of documents, shuffled, in a file of its own; then each HDF5 file takes its share of every
chunk. All of this happens in a hidden directory beside the result. The HDF5 files get their names in one go at the end.
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
from trainyard.data.formats import bert_hdf5, documents
from trainyard.data.formats.bert_hdf5 import BertShape, Records, record_dtype
from trainyard.data.formats.bert_hdf5_cache import file_lock
from trainyard.data.formats.documents import InputSlice, UnreadableRecord
from trainyard.data.prepare.bert_samples import BertOptions, load_bert_tokenizer, make_samples, tokenize_documents
from trainyard.data.prepare.worker_pool import map_ordered
from trainyard.data.text.sentences import split_sentences

MAX_SAMPLES_PER_FILE = 1 << 18
"""Samples of a file, at most, where nobody says how many files."""
MIN_TEXTS_PER_CHUNK = 8
"""Documents in a chunk, at least, where each is a file: a random one is wanted beside each."""


class DocumentChunk(NamedTuple):
    chunk_id: int
    slices: list[InputSlice]


class ChunkResult(NamedTuple):
    """What became of a chunk."""

    documents: int
    samples: int
    unreadable: list[UnreadableRecord]
    input_bytes: int
    """Bytes of input that this was."""


class BertCounts(NamedTuple):
    documents: int
    samples: int
    files: int
    skipped: int


class BertFileSet(NamedTuple):
    """Files are DIRECTORY/NAME_training_00000.hdf5 and so on."""

    directory: Path
    name: str
    num_files: int | None = None
    """How many; default: enough that none has more than FILE samples."""
    overwrite: bool = False

    def path(self, file_index: int) -> Path:
        return self.directory / f"{self.name}_training_{file_index:05}.hdf5"

    def existing(self) -> list[Path]:
        return sorted(self.directory.glob(f"{self.name}_training_[0-9][0-9][0-9][0-9][0-9].hdf5"))


class ProgressReporter(Protocol):
    """Work under way, shown while its block lasts."""

    def __enter__(self) -> Self: ...

    def update(self, done: int, total: int, words: str = "") -> None:
        """Bytes."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None: ...


def build_bert_files(
    paths: Sequence[Path],
    keys: Sequence[str],
    recipe: BertOptions,
    target: BertFileSet,
    workers: int,
    on_unreadable: Callable[[UnreadableRecord], None],
    progress: Callable[[str], ProgressReporter],
) -> BertCounts:
    """Make the set. `bad` is told what cannot be read. `progress` makes what shows one part of the work: the next part
    starts its processes before it shows anything."""
    _, vocabulary = load_bert_tokenizer(recipe.tokenizer)
    if recipe.whole_word_mask and not vocabulary.inside.any():
        raise UserError(f"--whole-word: {recipe.tokenizer.name} has no pieces that begin with ##, as WordPiece has")
    with _report_os_errors(target), work_directory(target) as part:
        seen = total = wrong = done = 0
        counts: list[int] = []
        start, size = time.monotonic(), documents.total_bytes(paths)
        work = map_ordered(partial(write_chunk_samples, recipe, keys, part), document_chunks(paths), workers)
        with progress("bert") as screen, closing(cast(Generator[ChunkResult], work)):
            for each in work:
                for what in each.unreadable:
                    on_unreadable(what)
                seen, wrong, done = seen + each.documents, wrong + len(each.unreadable), done + each.input_bytes
                total += each.samples
                counts.append(each.samples)
                rate = total / (time.monotonic() - start)
                screen.update(done, size, f"{seen:,} documents, {total:,} samples, {rate:,.0f}/s")
        if not total:
            raise UserError(f"{paths[0]}: {seen} documents in all of the input give no sample; nothing was written")
        files = target.num_files or -(-total // MAX_SAMPLES_PER_FILE)
        if files > total:
            raise UserError(f"--files {files}: there are {total} samples; nearest: {total}")
        size = total * record_dtype(recipe.seq_len, recipe.max_predictions, vocabulary.size).itemsize
        filled = map_ordered(
            partial(write_hdf5_file, recipe, vocabulary.size, part, counts, files), range(files), min(workers, files)
        )
        with progress("write") as screen, closing(cast(Generator[None], filled)):
            for number, _ in enumerate(filled, 1):
                screen.update(size * number // files, size, f"{number} of {files} files")
        for path in target.existing():
            path.unlink()
        for number in range(files):
            os.replace(part / f"{number}.hdf5", target.path(number))
        fsync_directory(target.directory)
    return BertCounts(seen, total, files, wrong)


@contextmanager
def _report_os_errors(target: BertFileSet) -> Iterator[None]:
    """A full disk, or a file that may not be read or written, in one line."""
    try:
        yield
    except OSError as error:
        why = error.strerror or one_line(error)
        raise UserError(f"{error.filename or target.directory}: {why}") from None


@contextmanager
def work_directory(target: BertFileSet) -> Iterator[Path]:
    """An empty directory for what is not complete, for one process at a time. One that is there already was left by a
    run that was killed: what it made is not complete either."""
    part = target.directory / f".{target.name}_training.part"
    present = target.existing()
    if present and not target.overwrite and not part.exists():
        raise UserError(f"{present[0]}: is there already; --overwrite replaces it, --name NAME puts others beside it")
    part.mkdir(exist_ok=True)

    def busy() -> NoReturn:
        raise UserError(f"{part}: another run works there; wait for its end, or use another --name")

    with file_lock(part / "lock", busy):
        for path in part.iterdir():
            if path.name != "lock":
                path.unlink()
        try:
            yield part
        finally:
            shutil.rmtree(part)


def document_chunks(paths: Sequence[Path]) -> Iterator[DocumentChunk]:
    """Pieces of the input, some together: enough for many documents. The last chunk may be up to twice as large."""
    ready: list[InputSlice] = []
    coming: list[InputSlice] = []
    number = 0
    for piece in documents.input_slices(paths):
        coming.append(piece)
        texts = sum(each.kind == "text" for each in coming)
        size = sum(len(each.data) if each.data else each.input_bytes for each in coming)
        if size >= documents.SLICE_BYTES and (not texts or texts >= MIN_TEXTS_PER_CHUNK):
            if ready:
                yield DocumentChunk(number, ready)
                number += 1
            ready, coming = coming, []
    if ready or coming:
        yield DocumentChunk(number, ready + coming)


def write_chunk_samples(recipe: BertOptions, keys: Sequence[str], part: Path, chunk: DocumentChunk) -> ChunkResult:
    """The samples of a chunk, in a file of its own. Texts under several keys are one document."""
    tokenizer, vocabulary = load_bert_tokenizer(recipe.tokenizer)
    texts: list[list[str]] = []
    bad: list[UnreadableRecord] = []
    for piece in chunk.slices:
        for found in documents.read_documents(piece, keys[:1] if piece.kind == "text" else keys):
            if isinstance(found, UnreadableRecord):
                bad.append(found)
            else:
                texts.append([sentence for text in found for sentence in split_sentences(text)])
    text = tokenize_documents(tokenizer, texts)
    found_samples = make_samples(text, recipe, vocabulary, chunk.chunk_id)
    found_samples.tofile(part / str(chunk.chunk_id))
    return ChunkResult(
        len(text.document_bounds) - 1, len(found_samples), bad, sum(piece.input_bytes for piece in chunk.slices)
    )


def write_hdf5_file(
    recipe: BertOptions, vocab: int, part: Path, counts: Sequence[int], files: int, number: int
) -> None:
    """One file of so many: sample n of all belongs to file n % files, as far as counts go; which samples of a chunk
    they are does not matter, as it is shuffled."""
    dtype = record_dtype(recipe.seq_len, recipe.max_predictions, vocab)
    total = sum(counts)

    def blocks() -> Iterator[Records]:
        first = 0
        for chunk, count in enumerate(counts):
            begin = _count_before(first, first + count, files, number)
            length = _count_before(first, first + count, files, number + 1) - begin
            if length:
                yield np.fromfile(part / str(chunk), dtype, length, offset=begin * dtype.itemsize)
            first += count

    own = _count_before(0, total, files, number + 1) - _count_before(0, total, files, number)
    bert_hdf5.write_samples(part / f"{number}.hdf5", blocks(), BertShape(own, recipe.seq_len, recipe.max_predictions))


def _count_before(start: int, end: int, files: int, number: int) -> int:
    """How many of the samples from `start` to `end` belong to the files before this one."""
    return sum(sign * (at // files * number + min(at % files, number)) for sign, at in ((1, end), (-1, start)))
