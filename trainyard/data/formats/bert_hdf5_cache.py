"""A dataset of BERT's HDF5 files, read from an uncompressed cache.

Reading one sample of a compressed file decompresses a thousand. So the first reader of a set of files validates all of
it and writes the samples as compact records to one cache file, which every reader maps into memory. A cache file gets
its name when it is complete, and its footer records the source files with their sizes and modification times.
"""

import hashlib
import json
import logging
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from trainyard.core.atomic_files import atomic_file
from trainyard.core.disk_space import free_bytes
from trainyard.core.errors import UserError
from trainyard.core.file_lock import file_lock
from trainyard.core.quantities import counted
from trainyard.core.user_cache import user_cache
from trainyard.data.formats import bert_hdf5
from trainyard.data.formats.bert_hdf5 import MAX_VOCAB, UINT16_VOCAB, BertShape, check_shape, record_dtype
from trainyard.data.samples import Sample

logger = logging.getLogger(__name__)

CACHE_MAGIC = b"TYPAIRS1"
CACHE_DIRECTORY = ".trainyard-cache"
STALE_S = 3600.0
"""Seconds without a write after which an incomplete cache file is removed."""
LOG_INTERVAL_S = 10.0
TOKEN_DATASETS = ("input_ids", "masked_lm_ids")

FileStats = list[list[str | int]]
"""For each source file: path relative to the first file's directory, size, and modification time in nanoseconds."""


class BertHdf5Dataset:
    """The samples of HDF5 files, in the order of the files."""

    def __init__(self, paths: Sequence[Path], seq_len: int, max_predictions: int) -> None:
        cache = _open_or_build_cache(paths, seq_len, max_predictions)
        self.paths, self.seq_len, self.max_predictions = list(paths), seq_len, max_predictions
        self.vocab_size = cache.vocab_size
        """All token ids are below this."""
        self._record_dtype = cache.record_dtype
        # Gathering rows of bytes is several times faster than gathering records.
        records = np.memmap(cache.path, np.uint8, "r", shape=(cache.num_samples, cache.record_dtype.itemsize))
        self._record_bytes: NDArray[np.uint8] = np.asarray(records)

    def __len__(self) -> int:
        return len(self._record_bytes)

    def samples(self, indices: NDArray[np.int64]) -> Sample:
        records = self._record_bytes.take(indices, axis=0).view(self._record_dtype)[:, 0]
        return bert_hdf5.unpack_records(records, self.seq_len, self.max_predictions)

    def source(self, index: int) -> str:
        for path in self.paths:
            count = bert_hdf5.read_shape(path).num_samples
            if index < count:
                return f"{path}, sample {index}"
            index -= count
        raise IndexError(index)


class CacheFile(NamedTuple):
    """The footer of a cache file."""

    path: Path
    files: FileStats
    num_samples: int
    seq_len: int
    max_predictions: int
    vocab_size: int

    @property
    def record_dtype(self) -> np.dtype[np.void]:
        return record_dtype(self.seq_len, self.max_predictions, self.vocab_size)


FOOTER_KEYS = ("files", "samples", "sequence", "predictions", "vocab")
"""JSON keys of the footer: the fields of CacheFile after its path."""


def _open_or_build_cache(paths: Sequence[Path], seq_len: int, max_predictions: int) -> CacheFile:
    """An existing cache file or a new one. One of several processes writes it and the others wait. Without file locks,
    each process writes its own identical file, and the last one stays."""
    base = paths[0].absolute().parent
    files = _file_stats(paths, base)
    # Next to the data, the name depends on relative paths only: the data may be mounted elsewhere tomorrow.
    candidates = [base / CACHE_DIRECTORY / _cache_name("", files), user_cache("hdf5", _cache_name(str(base), files))]
    cache = next((found for path in candidates if (found := _read_footer(path, files))), None)
    if cache:
        check_shape(paths[0], BertShape(*cache[2:5]), seq_len, max_predictions)
        return cache
    shapes = [bert_hdf5.read_shape(path) for path in paths]
    for path, shape in zip(paths, shapes, strict=True):
        check_shape(path, shape, seq_len, max_predictions)
    num_samples = sum(shape.num_samples for shape in shapes)
    if not num_samples:
        raise UserError(f"{paths[0]}: no samples in this set of {counted(len(paths), 'file')}")
    most_predictions = max(shape.max_predictions for shape in shapes)
    cache_bytes = num_samples * record_dtype(seq_len, most_predictions, UINT16_VOCAB).itemsize
    for path in candidates:
        directory = path.parent
        if not _make_writable(directory):
            continue
        waiting = partial(logger.info, "waiting for another process that fills %s", directory)
        with file_lock(directory / "lock", waiting):
            if cache := _read_footer(path, files):
                return cache
            _remove_stale(directory)
            if free_bytes(directory) > cache_bytes:
                try:
                    return _write_cache(path, paths, shapes, UINT16_VOCAB)
                except OverflowError:
                    return _write_cache(path, paths, shapes, MAX_VOCAB)
    directories = " nor ".join(str(path.parent) for path in candidates)
    raise UserError(
        f"{paths[0]}: uncompressed, the set takes {cache_bytes / 2**30:.1f} GiB; neither {directories} has room for it"
    )


def _file_stats(paths: Sequence[Path], base: Path) -> FileStats:
    stats: FileStats = []
    for path in paths:
        try:
            stat = path.stat()
        except OSError as error:
            raise UserError(f"{path}: {error.strerror}") from None
        stats.append([os.path.relpath(path.absolute(), base), stat.st_size, stat.st_mtime_ns])
    return stats


def _cache_name(base: str, files: FileStats) -> str:
    return hashlib.blake2b(json.dumps([base, files]).encode(), digest_size=12).hexdigest() + ".pairs"


def _read_footer(path: Path, files: FileStats | None) -> CacheFile | None:
    """The footer, if the cache file is complete and was made from these files (None: any files)."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(size - 16, 0))
            end = file.read()
            footer_bytes = int.from_bytes(end[:8], "little")
            if end[8:] != CACHE_MAGIC or footer_bytes > size - 16:
                return None
            file.seek(size - 16 - footer_bytes)
            footer = json.loads(file.read(footer_bytes))
        cache = CacheFile(path, *(footer[key] for key in FOOTER_KEYS))
        complete = cache.num_samples * cache.record_dtype.itemsize == size - 16 - footer_bytes
    except (OSError, ValueError, TypeError, LookupError, AttributeError):
        return None
    return cache if complete and (files is None or files == cache.files) else None


def _write_cache(path: Path, paths: Sequence[Path], shapes: Sequence[BertShape], vocab_size: int) -> CacheFile:
    """Raises OverflowError if a token id is not below `vocab_size`."""
    base = paths[0].absolute().parent
    files = _file_stats(paths, base)
    num_samples = sum(shape.num_samples for shape in shapes)
    max_predictions = max(shape.max_predictions for shape in shapes)
    dtype = record_dtype(shapes[0].seq_len, max_predictions, vocab_size)
    logger.info(
        "unpacking %s with %s, once, to %s", counted(len(paths), "HDF5 file"), counted(num_samples, "sample", ","), path
    )
    started_at = logged_at = time.monotonic()
    done = largest = 0
    try:
        with atomic_file(path) as file:
            for source, shape in zip(paths, shapes, strict=True):
                for arrays in bert_hdf5.read_blocks(source, shape):
                    largest = max(largest, *(int(arrays[name].max(initial=0)) for name in TOKEN_DATASETS))
                    if largest >= vocab_size:
                        raise OverflowError
                    file.write(bert_hdf5.to_records(arrays, dtype).tobytes())
                    done += len(arrays["input_ids"])
                    now = time.monotonic()
                    if now - logged_at >= LOG_INTERVAL_S:
                        logged_at = now
                        left = timedelta(seconds=round((now - started_at) / done * (num_samples - done)))
                        logger.info("unpacking: %.1f%%, %s left", 100 * done / num_samples, left)
            if _file_stats(paths, base) != files:
                raise UserError(f"{base}: files changed while they were read; start again")
            cache = CacheFile(path, files, num_samples, shapes[0].seq_len, max_predictions, largest + 1)
            footer = json.dumps(dict(zip(FOOTER_KEYS, cache[1:], strict=True))).encode()
            file.write(footer + len(footer).to_bytes(8, "little") + CACHE_MAGIC)
    except OSError as error:
        raise UserError(f"{path}: cannot be written: {error.strerror}") from None
    return cache


def _make_writable(directory: Path) -> bool:
    """Create the directory if needed; False if it cannot be written to."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError:
        return False
    return os.access(directory, os.W_OK)


def _remove_stale(directory: Path) -> None:
    """Remove files left by killed processes and, next to the data, caches of files that changed or are gone."""
    with suppress(OSError):
        for path in directory.glob(".*.part"):
            if time.time() - path.stat().st_mtime > STALE_S:
                path.unlink()
    for path in directory.glob("*.pairs") if directory.name == CACHE_DIRECTORY else ():
        cache = _read_footer(path, None)
        sources = [directory.parent / str(name) for name, *_ in cache.files] if cache else []
        with suppress(OSError):
            missing = not all(source.exists() for source in sources)
            if missing or (cache and _file_stats(sources, directory.parent) != cache.files):
                path.unlink()
