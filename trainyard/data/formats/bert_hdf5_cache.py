"""Samples of BERT's HDF5 files as a source.

To take one sample out of a compressed file is to unpack a thousand. So the first reader of a set checks every number of
it and writes the samples, packed but not compressed, to one file that all later readers map into memory. Such a copy
has its name only when it is whole, and says at its end which files, of which size and time, it was made from.
"""

import fcntl
import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from trainyard.core.atomic_files import atomic_file
from trainyard.core.errors import UserError
from trainyard.data.formats.bert_hdf5 import (
    MAX_VOCAB,
    UINT16_VOCAB,
    BertShape,
    read_blocks,
    read_shape,
    record_dtype,
    to_records,
)
from trainyard.data.loading.dataset import Sample

CACHE_MAGIC = b"TYPAIRS1"
CACHE_DIRECTORY = ".trainyard-cache"
STALE_S = 3600.0
"""Seconds after which a half-written copy that nobody adds to is removed."""
LOG_INTERVAL_S = 10.0
"""Seconds between lines about progress."""

Say = Callable[[str], None]
FileStats = list[list[str | int]]
"""Path from the first file's directory, bytes, and time of change in nanoseconds, of each."""


class BertHdf5Dataset:
    """The samples of HDF5 files, in the order of the files."""

    def __init__(self, paths: Sequence[Path], seq_len: int, max_predictions: int, say: Say = lambda line: None) -> None:
        if not paths:
            raise UserError("data.paths: no HDF5 files; name some, for instance DIRECTORY/*_training_*.hdf5")
        copy = _open_or_build_cache(paths, seq_len, max_predictions, say)
        self.seq_len, self.max_predictions = seq_len, max_predictions
        self.vocab_size = copy.vocab
        """All tokens are below this."""
        self._record_dtype = copy.record_dtype
        # Rows of bytes are gathered several times faster than records are.
        rows = np.memmap(copy.path, np.uint8, "r", shape=(copy.samples, copy.record_dtype.itemsize))
        self._record_bytes: NDArray[np.uint8] = np.asarray(rows)

    def __len__(self) -> int:
        return len(self._record_bytes)

    def samples(self, indices: NDArray[np.int64]) -> Sample:
        found = self._record_bytes.take(indices, axis=0).view(self._record_dtype)[:, 0]
        shape = (len(indices), self.max_predictions)
        places, labels = np.zeros(shape, np.int32), np.full(shape, -100, np.int32)
        count = found["masked_positions"].shape[1]
        places[:, :count] = found["masked_positions"]
        np.copyto(labels[:, :count], found["labels"], where=found["masked_positions"] > 0)
        return {
            "tokens": found["tokens"].astype(np.int32),
            "segment_ids": np.unpackbits(found["segment_ids"], axis=1, count=self.seq_len).astype(np.int32),
            "attention_mask": np.unpackbits(found["attention_mask"], axis=1, count=self.seq_len).astype(np.int32),
            "masked_positions": places,
            "labels": labels,
            "next_sentence_labels": found["next_sentence_labels"].astype(np.int32),
        }


class CacheFile(NamedTuple):
    """What a copy says of itself."""

    path: Path
    files: FileStats
    samples: int
    sequence: int
    predictions: int
    vocab: int

    @property
    def record_dtype(self) -> np.dtype[np.void]:
        return record_dtype(self.sequence, self.predictions, self.vocab)


def _open_or_build_cache(paths: Sequence[Path], sequence: int, predictions: int, say: Say) -> CacheFile:
    """One that is there, or a new one. Of several processes one makes it and the others wait; where files cannot be
    locked each makes its own, all alike, and the last stays."""
    base = paths[0].absolute().parent
    files = _file_stats(paths, base)
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "trainyard" / "hdf5"
    # Beside the data, paths count from there: it may be mounted elsewhere tomorrow.
    choices = [base / CACHE_DIRECTORY / _cache_name("", files), cache / _cache_name(str(base), files)]
    copy = next((found for path in choices if (found := _read_footer(path, files))), None)
    if copy:
        _check_shape(paths[0], BertShape(copy.samples, copy.sequence, copy.predictions), sequence, predictions)
        return copy
    shapes = [read_shape(path) for path in paths]
    for path, shape in zip(paths, shapes, strict=True):
        _check_shape(path, shape, sequence, predictions)
    samples, most = sum(shape.num_samples for shape in shapes), max(shape.max_predictions for shape in shapes)
    if not samples:
        raise UserError(f"{paths[0]}: no samples in this set of {len(paths)} files")
    bytes_ = samples * record_dtype(sequence, most, UINT16_VOCAB).itemsize
    for path in choices:
        directory = path.parent
        if not _writable(directory):
            continue
        with file_lock(directory / "lock", partial(say, f"waiting for another process that fills {directory}")):
            if copy := _read_footer(path, files):
                return copy
            _remove_stale(directory)
            if shutil.disk_usage(directory).free > bytes_:
                try:
                    return _write_cache(path, paths, shapes, UINT16_VOCAB, say)
                except OverflowError:
                    return _write_cache(path, paths, shapes, MAX_VOCAB, say)
    places = " nor ".join(str(path.parent) for path in choices)
    raise UserError(f"{paths[0]}: unpacked, the set takes {bytes_ / 2**30:.1f} GiB; neither {places} has room for it")


def _check_shape(path: Path, shape: BertShape, sequence: int, predictions: int) -> None:
    if shape.seq_len != sequence:
        raise UserError(
            f"{path}: has samples of {shape.seq_len} tokens, but data.seq_len={sequence}; nearest: {shape.seq_len}"
        )
    if shape.max_predictions > predictions:
        raise UserError(
            f"{path}: has up to {shape.max_predictions} masked places a sample, but data.max_predictions={predictions}; "
            f"nearest: {shape.max_predictions}"
        )


def _file_stats(paths: Sequence[Path], base: Path) -> FileStats:
    found: FileStats = []
    for path in paths:
        try:
            stat = path.stat()
        except OSError as error:
            raise UserError(f"{path}: {error.strerror}") from None
        found.append([os.path.relpath(path.absolute(), base), stat.st_size, stat.st_mtime_ns])
    return found


def _cache_name(base: str, files: FileStats) -> str:
    return hashlib.blake2b(json.dumps([base, files]).encode(), digest_size=12).hexdigest() + ".pairs"


def _read_footer(path: Path, files: FileStats | None) -> CacheFile | None:
    """What a copy says of itself, if it is of these files (or any) and as long as it says."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(size - 16, 0))
            end = file.read()
            length = int.from_bytes(end[:8], "little")
            if end[8:] != CACHE_MAGIC or length > size - 16:
                return None
            file.seek(size - 16 - length)
            copy = CacheFile(path, **json.loads(file.read(length)))
        whole = copy.samples * copy.record_dtype.itemsize == size - 16 - length
    except (OSError, ValueError, TypeError):
        return None
    return copy if whole and (files is None or files == copy.files) else None


def _write_cache(path: Path, paths: Sequence[Path], shapes: Sequence[BertShape], vocab: int, say: Say) -> CacheFile:
    """Raises OverflowError where a token is not below `vocab`."""
    base = paths[0].absolute().parent
    files = _file_stats(paths, base)
    samples, predictions = sum(shape.num_samples for shape in shapes), max(shape.max_predictions for shape in shapes)
    dtype = record_dtype(shapes[0].seq_len, predictions, vocab)
    say(f"unpacking {len(paths)} HDF5 files with {samples:,} samples, once, to {path}")
    begun = said = time.monotonic()
    done = largest = 0
    try:
        with atomic_file(path) as file:
            for source, shape in zip(paths, shapes, strict=True):
                for found in read_blocks(source, shape):
                    for name in ("input_ids", "masked_lm_ids"):
                        largest = max(largest, int(found[name].max(initial=0)))
                    if largest >= vocab:
                        raise OverflowError
                    file.write(to_records(found, dtype).tobytes())
                    done += len(found["input_ids"])
                    now = time.monotonic()
                    if now - said >= LOG_INTERVAL_S:
                        said = now
                        left = timedelta(seconds=round((now - begun) / done * (samples - done)))
                        say(f"unpacking: {done / samples:.1%}, {left} left")
            if _file_stats(paths, base) != files:
                raise UserError(f"{base}: files changed while they were read; start again")
            copy = CacheFile(path, files, samples, shapes[0].seq_len, predictions, largest + 1)
            _write_footer(file, copy)
    except OSError as error:
        raise UserError(f"{path}: cannot be written: {error.strerror}") from None
    return copy


def _write_footer(file: BinaryIO, copy: CacheFile) -> None:
    said = json.dumps({name: value for name, value in copy._asdict().items() if name != "path"}).encode()
    file.write(said + len(said).to_bytes(8, "little") + CACHE_MAGIC)


def _writable(directory: Path) -> bool:
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError:
        return False
    return os.access(directory, os.W_OK)


def _remove_stale(directory: Path) -> None:
    """Removes what killed processes left, and beside the data, copies of files that are no longer as they were."""
    with suppress(OSError):
        for path in directory.glob(".*.part"):
            if time.time() - path.stat().st_mtime > STALE_S:
                path.unlink()
    for path in directory.glob("*.pairs") if directory.name == CACHE_DIRECTORY else ():
        copy = _read_footer(path, None)
        names = [directory.parent / str(name) for name, *_ in copy.files] if copy else []
        with suppress(OSError):
            if not all(name.exists() for name in names) or (
                copy and _file_stats(names, directory.parent) != copy.files
            ):
                path.unlink()


@contextmanager
def file_lock(path: Path, on_busy: Callable[[], None]) -> Iterator[None]:
    """One process at a time; one that finds another here calls `busy` and then waits. The lock of a process ends with
    it, however it ends. Where files cannot be locked, there is none."""
    try:
        file = path.open("ab")
    except OSError:
        yield
        return
    with file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            on_busy()
            fcntl.lockf(file, fcntl.LOCK_EX)
        except OSError:
            pass
        yield
