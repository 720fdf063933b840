"""BERT's samples in an HDF5 file, as its training scripts share them.

    input_ids i4 [N, S], input_mask i1 [N, S], segment_ids i1 [N, S], next_sentence_labels i1 [N],
    masked_lm_positions i4 [N, P], masked_lm_ids i4 [N, P]: a position of 0 ends the list

Files of other tools are read too: more datasets, other integers. Ours are of HDF5 1.10, the first with checksums for
all that describes the data (compressed data has its own); older ones have none there, so what a file says is checked.
"""

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import product
from math import ceil, prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from trainyard.core.errors import UserError, one_line

DATASET_DTYPES = {
    "input_ids": "<i4",
    "input_mask": "i1",
    "segment_ids": "i1",
    "masked_lm_positions": "<i4",
    "masked_lm_ids": "<i4",
    "next_sentence_labels": "i1",
}
CHUNK_BYTES = 1 << 19
"""Bytes of tokens that are compressed together."""
SAMPLES_PER_READ = 1 << 13
"""Samples read at a time."""
CHUNK_CACHE_BYTES = 64 << 20
"""Bytes of unpacked chunks kept while reading, so that none is unpacked twice where a block ends within it."""
UINT16_VOCAB = 1 << 16
"""Tokens that fit in 16 bits."""
MAX_VOCAB = 1 << 24
"""A token from here on is a broken file, not a vocabulary."""

Arrays = dict[str, NDArray[Any]]
Records = NDArray[np.void]


class BertShape(NamedTuple):
    num_samples: int
    seq_len: int
    max_predictions: int

    def dataset_shape(self, name: str) -> tuple[int, ...]:
        """Of a dataset."""
        if name == "next_sentence_labels":
            return (self.num_samples,)
        return (self.num_samples, self.max_predictions if name.startswith("masked_lm") else self.seq_len)


def record_dtype(sequence: int, predictions: int, vocab: int) -> np.dtype[np.void]:
    """A packed sample: tokens in 16 bits where they fit, masks as bits. Labels and places are 0 after the last."""
    token, bits = "<u2" if vocab <= UINT16_VOCAB else "<i4", ceil(sequence / 8)
    fields = [
        ("tokens", token, (sequence,)),
        ("labels", token, (predictions,)),
        ("masked_positions", "<u2", (predictions,)),
        ("attention_mask", "u1", (bits,)),
        ("segment_ids", "u1", (bits,)),
        ("next_sentence_labels", "u1"),
    ]
    return np.dtype(fields, align=True)


def write_samples(path: Path, blocks: Iterable[Records], shape: BertShape) -> None:
    """A file of these samples, safe on disk when this returns and not whole before."""
    import h5py

    rows = max(min(CHUNK_BYTES // (4 * shape.seq_len), shape.num_samples), 1)
    with h5py.File(path, "w", libver="v110", locking=False) as file:
        for name, dtype in DATASET_DTYPES.items():
            sizes = shape.dataset_shape(name)
            file.create_dataset(name, sizes, dtype, chunks=(rows, *sizes[1:]), compression="gzip")
        start = 0
        for block in _rechunk(blocks, rows):
            end = start + len(block)
            file["input_ids"][start:end] = block["tokens"]
            file["input_mask"][start:end] = np.unpackbits(block["attention_mask"], axis=1, count=shape.seq_len)
            file["segment_ids"][start:end] = np.unpackbits(block["segment_ids"], axis=1, count=shape.seq_len)
            file["masked_lm_positions"][start:end] = block["masked_positions"]
            file["masked_lm_ids"][start:end] = block["labels"]
            file["next_sentence_labels"][start:end] = block["next_sentence_labels"]
            start = end
    assert start == shape.num_samples
    handle = os.open(path, os.O_RDONLY)
    os.fsync(handle)
    os.close(handle)


def _rechunk(blocks: Iterable[Records], rows: int) -> Iterator[Records]:
    """The same samples, so many at a time: whole chunks of the file."""
    held: list[Records] = []
    count = 0
    for block in blocks:
        held.append(block)
        count += len(block)
        if count >= rows:
            joined, whole = np.concatenate(held), count - count % rows
            for start in range(0, whole, rows):
                yield joined[start : start + rows]
            held, count = [joined[whole:]], count - whole
    if count:
        yield np.concatenate(held)


def read_shape(path: Path) -> BertShape:
    """Of a file that has all datasets, of fitting sizes, with all of their bytes."""
    with _open_hdf5(path) as file:
        for name in DATASET_DTYPES:
            if name not in file:
                raise UserError(f"{path}: no dataset {name}; has: {', '.join(sorted(file)) or 'none'}")
            found = file[name]
            if not hasattr(found, "dtype") or found.dtype.kind not in "iu":
                raise UserError(f"{path}: {name}: not a dataset of integers")
            if found.ndim != (1 if name == "next_sentence_labels" else 2):
                raise UserError(f"{path}: {name}: has the shape {found.shape}; wanted: {_expected_shape(name)}")
        samples, sequence = file["input_ids"].shape
        shape = BertShape(samples, sequence, file["masked_lm_positions"].shape[1])
        for name in DATASET_DTYPES:
            if file[name].shape != shape.dataset_shape(name):
                raise UserError(
                    f"{path}: {name}: has the shape {file[name].shape}, but {shape.dataset_shape(name)} would fit the others"
                )
            if not _fully_stored(file[name]):
                raise UserError(f"{path}: {name}: parts of it are missing; truncated or damaged?")
        return shape


def read_blocks(path: Path, shape: BertShape) -> Iterator[Arrays]:
    """The datasets, some samples at a time, every number checked."""
    with _open_hdf5(path) as file:
        for start in range(0, shape.num_samples, SAMPLES_PER_READ):
            found = {name: file[name][start : start + SAMPLES_PER_READ] for name in DATASET_DTYPES}
            limits = {"input_ids": MAX_VOCAB, "masked_lm_ids": MAX_VOCAB, "masked_lm_positions": shape.seq_len}
            for name, array in found.items():
                limit = limits.get(name, 2)
                wrong = (array < 0) | (array >= limit)
                if wrong.any():
                    row = int(wrong.reshape(len(array), -1).any(1).argmax())
                    value = array[row][wrong[row]][0] if array.ndim > 1 else array[row]
                    raise UserError(f"{path}: {name}: sample {start + row} has {value}; wanted: from 0 to {limit - 1}")
            used = np.sort(found["masked_lm_positions"], axis=1)
            twice = ((used[:, 1:] == used[:, :-1]) & (used[:, 1:] > 0)).any(1)
            if twice.any():
                raise UserError(
                    f"{path}: masked_lm_positions: sample {start + int(twice.argmax())} has the same place twice"
                )
            yield found


def to_records(found: Arrays, dtype: np.dtype[np.void]) -> Records:
    """Samples as read from a file, as records."""
    out = np.zeros(len(found["input_ids"]), dtype)
    places, labels = found["masked_lm_positions"], found["masked_lm_ids"]
    counted = np.logical_and.accumulate(places != 0, axis=1)
    out["tokens"] = found["input_ids"]
    out["masked_positions"][:, : places.shape[1]] = np.where(counted, places, 0)
    out["labels"][:, : places.shape[1]] = np.where(counted, labels, 0)
    out["attention_mask"] = np.packbits(found["input_mask"].astype(np.uint8), axis=1)
    out["segment_ids"] = np.packbits(found["segment_ids"].astype(np.uint8), axis=1)
    out["next_sentence_labels"] = found["next_sentence_labels"]
    return out


@contextmanager
def _open_hdf5(path: Path) -> Iterator[Any]:
    import h5py

    try:
        with h5py.File(path, "r", locking=False, rdcc_nbytes=CHUNK_CACHE_BYTES) as file:
            yield file
    except UserError:
        raise
    except Exception as error:  # of many kinds, by what is wrong with the file
        raise UserError(f"{path}: cannot be read as HDF5: {one_line(error)}") from None


def _fully_stored(dataset: Any) -> bool:
    """Whether each part of the array has a place in the file; what has none would be read as zeros."""
    if dataset.chunks is None:
        return dataset.id.get_storage_size() == dataset.nbytes
    starts = product(*(range(0, size, chunk) for size, chunk in zip(dataset.shape, dataset.chunks, strict=True)))
    wanted = prod(ceil(size / chunk) for size, chunk in zip(dataset.shape, dataset.chunks, strict=True))
    return dataset.id.get_num_chunks() == wanted and all(
        dataset.id.get_chunk_info_by_coord(start).size for start in starts
    )


def _expected_shape(name: str) -> str:
    return "[N]" if name == "next_sentence_labels" else "[N, P]" if name.startswith("masked_lm") else "[N, S]"
