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

from trainyard.core.atomic_files import sync_directory
from trainyard.core.errors import UserError, one_line
from trainyard.data.formats import bert_hdf5, documents
from trainyard.data.formats.bert_hdf5 import Records, Shape, record
from trainyard.data.formats.bert_hdf5_cache import locked
from trainyard.data.formats.documents import Bad, Piece
from trainyard.data.prepare.bert_samples import Recipe, encode, samples, tools
from trainyard.data.prepare.worker_pool import ordered
from trainyard.data.text.sentences import split

FILE = 1 << 18
"""Samples of a file, at most, where nobody says how many files."""
TEXTS = 8
"""Documents in a chunk, at least, where each is a file: a random one is wanted beside each."""


class Chunk(NamedTuple):
    number: int
    pieces: list[Piece]


class Made(NamedTuple):
    """What became of a chunk."""

    documents: int
    samples: int
    bad: list[Bad]
    weight: int
    """Bytes of input that this was."""


class Counts(NamedTuple):
    documents: int
    samples: int
    files: int
    bad: int


class Target(NamedTuple):
    """Files are DIRECTORY/NAME_training_00000.hdf5 and so on."""

    directory: Path
    name: str
    files: int | None = None
    """How many; default: enough that none has more than FILE samples."""
    overwrite: bool = False

    def path(self, number: int) -> Path:
        return self.directory / f"{self.name}_training_{number:05}.hdf5"

    def present(self) -> list[Path]:
        return sorted(self.directory.glob(f"{self.name}_training_[0-9][0-9][0-9][0-9][0-9].hdf5"))


class Progress(Protocol):
    """Work under way, shown while its block lasts."""

    def __enter__(self) -> Self: ...

    def show(self, done: int, total: int, words: str = "") -> None:
        """Bytes."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None: ...


def build(
    paths: Sequence[Path],
    keys: Sequence[str],
    recipe: Recipe,
    target: Target,
    workers: int,
    bad: Callable[[Bad], None],
    progress: Callable[[str], Progress],
) -> Counts:
    """Make the set. `bad` is told what cannot be read. `progress` makes what shows one part of the work: the next part
    starts its processes before it shows anything."""
    _, vocabulary = tools(recipe.tokenizer)
    if recipe.whole_word and not vocabulary.inside.any():
        raise UserError(f"--whole-word: {recipe.tokenizer.name} has no pieces that begin with ##, as WordPiece has")
    with _told(target), workplace(target) as part:
        seen = total = wrong = done = 0
        counts: list[int] = []
        start, size = time.monotonic(), documents.size(paths)
        work = ordered(partial(make, recipe, keys, part), chunks(paths), workers)
        with progress("bert") as screen, closing(cast(Generator[Made], work)):
            for each in work:
                for what in each.bad:
                    bad(what)
                seen, wrong, done = seen + each.documents, wrong + len(each.bad), done + each.weight
                total += each.samples
                counts.append(each.samples)
                rate = total / (time.monotonic() - start)
                screen.show(done, size, f"{seen:,} documents, {total:,} samples, {rate:,.0f}/s")
        if not total:
            raise UserError(f"{paths[0]}: {seen} documents in all of the input give no sample; nothing was written")
        files = target.files or -(-total // FILE)
        if files > total:
            raise UserError(f"--files {files}: there are {total} samples; nearest: {total}")
        size = total * record(recipe.sequence, recipe.predictions, vocabulary.size).itemsize
        filled = ordered(
            partial(write, recipe, vocabulary.size, part, counts, files), range(files), min(workers, files)
        )
        with progress("write") as screen, closing(cast(Generator[None], filled)):
            for number, _ in enumerate(filled, 1):
                screen.show(size * number // files, size, f"{number} of {files} files")
        for path in target.present():
            path.unlink()
        for number in range(files):
            os.replace(part / f"{number}.hdf5", target.path(number))
        sync_directory(target.directory)
    return Counts(seen, total, files, wrong)


@contextmanager
def _told(target: Target) -> Iterator[None]:
    """A full disk, or a file that may not be read or written, in one line."""
    try:
        yield
    except OSError as error:
        why = error.strerror or one_line(error)
        raise UserError(f"{error.filename or target.directory}: {why}") from None


@contextmanager
def workplace(target: Target) -> Iterator[Path]:
    """An empty directory for what is not complete, for one process at a time. One that is there already was left by a
    run that was killed: what it made is not complete either."""
    part = target.directory / f".{target.name}_training.part"
    present = target.present()
    if present and not target.overwrite and not part.exists():
        raise UserError(f"{present[0]}: is there already; --overwrite replaces it, --name NAME puts others beside it")
    part.mkdir(exist_ok=True)

    def busy() -> NoReturn:
        raise UserError(f"{part}: another run works there; wait for its end, or use another --name")

    with locked(part / "lock", busy):
        for path in part.iterdir():
            if path.name != "lock":
                path.unlink()
        try:
            yield part
        finally:
            shutil.rmtree(part)


def chunks(paths: Sequence[Path]) -> Iterator[Chunk]:
    """Pieces of the input, some together: enough for many documents. The last chunk may be up to twice as large."""
    ready: list[Piece] = []
    coming: list[Piece] = []
    number = 0
    for piece in documents.pieces(paths):
        coming.append(piece)
        texts = sum(each.kind == "text" for each in coming)
        size = sum(len(each.data) if each.data else each.weight for each in coming)
        if size >= documents.PIECE and (not texts or texts >= TEXTS):
            if ready:
                yield Chunk(number, ready)
                number += 1
            ready, coming = coming, []
    if ready or coming:
        yield Chunk(number, ready + coming)


def make(recipe: Recipe, keys: Sequence[str], part: Path, chunk: Chunk) -> Made:
    """The samples of a chunk, in a file of its own. Texts under several keys are one document."""
    tokenizer, vocabulary = tools(recipe.tokenizer)
    texts: list[list[str]] = []
    bad: list[Bad] = []
    for piece in chunk.pieces:
        for found in documents.read(piece, keys[:1] if piece.kind == "text" else keys):
            if isinstance(found, Bad):
                bad.append(found)
            else:
                texts.append([sentence for text in found for sentence in split(text)])
    text = encode(tokenizer, texts)
    found_samples = samples(text, recipe, vocabulary, chunk.number)
    found_samples.tofile(part / str(chunk.number))
    return Made(len(text.documents) - 1, len(found_samples), bad, sum(piece.weight for piece in chunk.pieces))


def write(recipe: Recipe, vocab: int, part: Path, counts: Sequence[int], files: int, number: int) -> None:
    """One file of so many: sample n of all belongs to file n % files, as far as counts go; which samples of a chunk
    they are does not matter, as it is shuffled."""
    dtype = record(recipe.sequence, recipe.predictions, vocab)
    total = sum(counts)

    def blocks() -> Iterator[Records]:
        first = 0
        for chunk, count in enumerate(counts):
            begin = _before(first, first + count, files, number)
            length = _before(first, first + count, files, number + 1) - begin
            if length:
                yield np.fromfile(part / str(chunk), dtype, length, offset=begin * dtype.itemsize)
            first += count

    own = _before(0, total, files, number + 1) - _before(0, total, files, number)
    bert_hdf5.write(part / f"{number}.hdf5", blocks(), Shape(own, recipe.sequence, recipe.predictions))


def _before(start: int, end: int, files: int, number: int) -> int:
    """How many of the samples from `start` to `end` belong to the files before this one."""
    return sum(sign * (at // files * number + min(at % files, number)) for sign, at in ((1, end), (-1, start)))
