"""BERT samples in HDF5 files, in the format of the public training scripts.

    input_ids i4 [N, S], input_mask i1 [N, S], segment_ids i1 [N, S], next_sentence_labels i1 [N],
    masked_lm_positions i4 [N, P], masked_lm_ids i4 [N, P]: a position of 0 ends the list

Files of other tools may have more datasets and other integer types. Files written here use HDF5 1.10, the first
version with checksums for all metadata (compressed data has its own); older files have none, so everything read from
a file is validated.
"""

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import product
from math import ceil, prod
from pathlib import Path
from traceback import clear_frames
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from trainyard.core.constants import IGNORE_INDEX
from trainyard.core.errors import RunStopped, UserError, one_line
from trainyard.data.samples import Sample
from trainyard.remote.chunks.remote_path import DataPath, RemotePath

DATASETS = {
    "input_ids": ("<i4", "NS", "tokens"),
    "input_mask": ("i1", "NS", "attention_mask"),
    "segment_ids": ("i1", "NS", "segment_ids"),
    "masked_lm_positions": ("<i4", "NP", "masked_positions"),
    "masked_lm_ids": ("<i4", "NP", "labels"),
    "next_sentence_labels": ("i1", "N", "next_sentence_labels"),
}
"""Dtype, dimensions, and field of a record, by name."""
BIT_FIELDS = ("attention_mask", "segment_ids")
CHUNK_BYTES = 1 << 19
"""Bytes of tokens that are compressed together."""
SAMPLES_PER_READ = 1 << 13
CHUNK_CACHE_BYTES = 64 << 20
"""Decompressed chunks that HDF5 caches, so that no chunk is decompressed twice where a read ends inside it."""
UINT16_VOCAB = 1 << 16
"""Largest vocabulary whose tokens fit in 16 bits."""
UNNAMED = "unnamed"
"""File in the staging directory of a set while some of its files do not have their names yet."""
MAX_VOCAB = 1 << 24
"""A token id from here on means a damaged file, not a large vocabulary."""

Arrays = dict[str, NDArray[Any]]
Records = NDArray[np.void]


class BertShape(NamedTuple):
    num_samples: int
    seq_len: int
    max_predictions: int

    def dataset_shape(self, name: str) -> tuple[int, ...]:
        sizes = {"N": self.num_samples, "S": self.seq_len, "P": self.max_predictions}
        return tuple(sizes[dimension] for dimension in DATASETS[name][1])


def record_dtype(seq_len: int, max_predictions: int, vocab_size: int) -> np.dtype[np.void]:
    """A compact sample: 16-bit tokens where they fit, masks as bits. Unused labels and positions are 0."""
    token, mask_bytes = "<u2" if vocab_size <= UINT16_VOCAB else "<i4", ceil(seq_len / 8)
    fields = [
        ("tokens", token, (seq_len,)),
        ("labels", token, (max_predictions,)),
        ("masked_positions", "<u2", (max_predictions,)),
        ("attention_mask", "u1", (mask_bytes,)),
        ("segment_ids", "u1", (mask_bytes,)),
        ("next_sentence_labels", "u1"),
    ]
    return np.dtype(fields, align=True)


def write_samples(path: Path, blocks: Iterable[Records], shape: BertShape) -> None:
    """Write an HDF5 file. It is on disk when this returns; until then it is incomplete."""
    import h5py

    rows = max(min(CHUNK_BYTES // (4 * shape.seq_len), shape.num_samples), 1)
    with h5py.File(path, "w", libver="v110", locking=False) as file:
        for name, (dtype, _, _) in DATASETS.items():
            sizes = shape.dataset_shape(name)
            file.create_dataset(name, sizes, dtype, chunks=(rows, *sizes[1:]), compression="gzip")
        start = 0
        for block in _rechunk(blocks, rows):
            for name, (_, _, field) in DATASETS.items():
                values = block[field]
                if field in BIT_FIELDS:
                    values = np.unpackbits(values, axis=1, count=shape.seq_len)
                file[name][start : start + len(block)] = values
            start += len(block)
    assert start == shape.num_samples
    handle = os.open(path, os.O_RDONLY)
    os.fsync(handle)
    os.close(handle)


def _rechunk(blocks: Iterable[Records], rows: int) -> Iterator[Records]:
    """The same samples in blocks of `rows`, the chunks of the file; the last block may be shorter."""
    pending: list[Records] = []
    count = 0
    for block in blocks:
        pending.append(block)
        count += len(block)
        if count >= rows:
            joined, complete = np.concatenate(pending), count - count % rows
            for start in range(0, complete, rows):
                yield joined[start : start + rows]
            pending, count = [joined[complete:]], count - complete
    if count:
        yield np.concatenate(pending)


def read_shape(path: DataPath) -> BertShape:
    """The shape of a file, after checking that all datasets exist, fit each other and are completely stored."""
    with open_hdf5(path) as file:
        return check_datasets(path, file)


def check_datasets(path: DataPath, file: Any) -> BertShape:
    for name, (_, dimensions, _) in DATASETS.items():
        if name not in file:
            raise UserError(f"{path}: no dataset {name}; has: {', '.join(sorted(file)) or 'none'}")
        dataset = file[name]
        if not hasattr(dataset, "dtype") or dataset.dtype.kind not in "iu":
            raise UserError(f"{path}: {name}: not a dataset of integers")
        if dataset.ndim != len(dimensions):
            raise UserError(f"{path}: {name}: has shape {dataset.shape}; expected [{', '.join(dimensions)}]")
    num_samples, seq_len = file["input_ids"].shape
    shape = BertShape(num_samples, seq_len, file["masked_lm_positions"].shape[1])
    for name in DATASETS:
        expected = shape.dataset_shape(name)
        if file[name].shape != expected:
            raise UserError(f"{path}: {name}: has shape {file[name].shape}; the other datasets require {expected}")
        if not _fully_stored(file[name]):
            raise UserError(f"{path}: {name}: some of its data is missing; truncated or damaged?")
    return shape


def check_shape(path: DataPath, shape: BertShape, seq_len: int, max_predictions: int) -> None:
    if shape.seq_len != seq_len:
        raise UserError(
            f"{path}: has samples of {shape.seq_len} tokens, but data.seq_len={seq_len}; nearest: {shape.seq_len}"
        )
    if shape.max_predictions > max_predictions:
        raise UserError(
            f"{path}: has up to {shape.max_predictions} masked positions per sample, but "
            f"data.max_predictions={max_predictions}; nearest: {shape.max_predictions}"
        )


def read_blocks(path: Path, shape: BertShape) -> Iterator[Arrays]:
    """The datasets, some samples at a time, with every value checked."""
    with open_hdf5(path) as file:
        for start in range(0, shape.num_samples, SAMPLES_PER_READ):
            yield read_samples(path, file, shape, start, start + SAMPLES_PER_READ)


def read_samples(path: DataPath, file: Any, shape: BertShape, start: int, stop: int) -> Arrays:
    """The datasets for samples `start` to `stop`, with every value checked."""
    limits = {"input_ids": MAX_VOCAB, "masked_lm_ids": MAX_VOCAB, "masked_lm_positions": shape.seq_len}
    arrays = {name: file[name][start:stop] for name in DATASETS}
    for name, array in arrays.items():
        limit = limits.get(name, 2)
        invalid = (array < 0) | (array >= limit)
        if invalid.any():
            row = int(invalid.reshape(len(array), -1).any(1).argmax())
            value = array[row][invalid[row]][0] if array.ndim > 1 else array[row]
            raise UserError(f"{path}: {name}: sample {start + row} has {value}; expected 0 to {limit - 1}")
    positions = np.sort(arrays["masked_lm_positions"], axis=1)
    repeated = ((positions[:, 1:] == positions[:, :-1]) & (positions[:, 1:] > 0)).any(1)
    if repeated.any():
        row = start + int(repeated.argmax())
        raise UserError(f"{path}: masked_lm_positions: sample {row} has the same position twice")
    return arrays


def to_records(arrays: Arrays, dtype: np.dtype[np.void]) -> Records:
    """Samples as read from a file, as compact records."""
    records = np.zeros(len(arrays["input_ids"]), dtype)
    counted = np.logical_and.accumulate(arrays["masked_lm_positions"] != 0, axis=1)
    for name, (_, dimensions, field) in DATASETS.items():
        if field in BIT_FIELDS:
            records[field] = np.packbits(arrays[name].astype(np.uint8), axis=1)
        elif dimensions == "NP":
            records[field][:, : counted.shape[1]] = np.where(counted, arrays[name], 0)
        else:
            records[field] = arrays[name]
    return records


def unpack_records(records: Records, seq_len: int, max_predictions: int) -> Sample:
    """Samples for training, with unused labels ignored."""
    shape = (len(records), max_predictions)
    positions, labels = np.zeros(shape, np.int32), np.full(shape, IGNORE_INDEX, np.int32)
    count = records["masked_positions"].shape[1]
    positions[:, :count] = records["masked_positions"]
    np.copyto(labels[:, :count], records["labels"], where=records["masked_positions"] > 0)
    return {
        "tokens": records["tokens"].astype(np.int32),
        "segment_ids": np.unpackbits(records["segment_ids"], axis=1, count=seq_len).astype(np.int32),
        "attention_mask": np.unpackbits(records["attention_mask"], axis=1, count=seq_len).astype(np.int32),
        "masked_positions": positions,
        "labels": labels,
        "next_sentence_labels": records["next_sentence_labels"].astype(np.int32),
    }


def staging_directory(path: Path) -> Path:
    """Where the files of a set (NAME_training_00000.hdf5, ...) are written before they get their names."""
    return path.with_name(f".{path.name.rpartition('_')[0]}.part")


@contextmanager
def open_hdf5(path: DataPath) -> Iterator[Any]:
    import h5py

    if isinstance(path, Path) and (staging_directory(path) / UNNAMED).exists():
        raise UserError(f"{path}: its set is not complete: `trainyard data bert` was interrupted; run it again")
    try:
        with (
            _file_argument(path) as argument,
            h5py.File(argument, "r", locking=False, rdcc_nbytes=CHUNK_CACHE_BYTES) as file,
        ):
            yield file
    except (UserError, RunStopped) as error:
        clear_frames(error.__traceback__)
        raise
    except Exception as error:  # h5py raises many types, depending on the damage
        raise UserError(f"{path}: cannot be read as HDF5: {one_line(error)}") from None


@contextmanager
def _file_argument(path: DataPath) -> Iterator[Any]:
    """What h5py opens. It hides the error of a file object, which says more than the one that it raises itself."""
    if not isinstance(path, RemotePath):
        yield path
        return
    with path.open() as file:
        try:
            yield file
        except Exception as error:
            # HDF5 frees its reference to a file object when the process ends, too late for Python: drop it now.
            clear_frames(error.__traceback__)
            raise file.raw.last_error or error from None  # type: ignore[attr-defined]


def _fully_stored(dataset: Any) -> bool:
    """True if each chunk of the array is in the file; h5py reads missing chunks as zeros."""
    if dataset.chunks is None:
        return dataset.id.get_storage_size() == dataset.nbytes
    starts = product(*(range(0, size, chunk) for size, chunk in zip(dataset.shape, dataset.chunks, strict=True)))
    num_chunks = prod(ceil(size / chunk) for size, chunk in zip(dataset.shape, dataset.chunks, strict=True))
    return dataset.id.get_num_chunks() == num_chunks and all(
        dataset.id.get_chunk_info_by_coord(start).size for start in starts
    )
