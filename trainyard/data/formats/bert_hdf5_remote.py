"""A dataset of BERT's HDF5 files behind URLs.

Compressed samples cannot be read one by one, and a local dataset unpacks all files first. Here a block of samples is
read by byte range, checked and unpacked when one of them is needed, and the compact records are what the cache keeps.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainyard.core.errors import UserError
from trainyard.core.quantities import counted
from trainyard.data.formats import bert_hdf5
from trainyard.data.formats.bert_hdf5 import DATASETS, BertShape, check_shape, open_hdf5, record_dtype
from trainyard.data.formats.bert_hdf5_cache import TOKEN_DATASETS, BertHdf5Dataset
from trainyard.data.samples import Sample
from trainyard.remote.chunks.chunk_cache import Chunk
from trainyard.remote.chunks.chunk_reader import ChunkReader
from trainyard.remote.chunks.remote_path import DataPath, RemotePath

BLOCK_SAMPLES = 1024
"""Samples of a block, unless the chunks of the file have between 64 and 8,192."""
FILE_HEAD_BYTES = 1 << 16
MAX_MAPPED = 1 << 13


class RemoteBertHdf5Dataset:
    """The samples of remote HDF5 files, in the order of the files."""

    is_remote = True

    def __init__(self, paths: Sequence[RemotePath], seq_len: int, max_predictions: int, vocab_size: int) -> None:
        self.paths, self.seq_len, self.max_predictions = list(paths), seq_len, max_predictions
        self.vocab_size = vocab_size
        for path in paths:
            path.source().fetch(np.array([0]), np.array([min(FILE_HEAD_BYTES, path.stat().st_size)]))
        self.shapes: list[BertShape] = []
        blocks: list[tuple[int, int, int]] = []
        for number, path in enumerate(paths):
            with open_hdf5(path) as file:
                shape = bert_hdf5.check_datasets(path, file)
                check_shape(path, shape, seq_len, max_predictions)
                rows = (file["input_ids"].chunks or (0,))[0]
            rows = rows if 64 <= rows <= bert_hdf5.SAMPLES_PER_READ else BLOCK_SAMPLES
            starts = range(0, shape.num_samples, rows)
            blocks += [(number, start, min(start + rows, shape.num_samples)) for start in starts]
            self.shapes.append(shape)
        if not blocks:
            raise UserError(f"{paths[0]}: no samples in this set of {counted(len(paths), 'file')}")
        self.blocks = blocks
        """File, first sample and end of each block."""
        self.block_ends = np.cumsum([stop - start for _, start, stop in blocks], dtype=np.int64)
        self.record_dtype = record_dtype(seq_len, max(shape.max_predictions for shape in self.shapes), vocab_size)
        block_bytes = self.record_dtype.itemsize * max(stop - start for _, start, stop in blocks)
        self.reader = ChunkReader(paths[0].files.cache, block_bytes, MAX_MAPPED, self._chunk)

    def __len__(self) -> int:
        return int(self.block_ends[-1])

    def samples(self, indices: NDArray[np.int64]) -> Sample:
        numbers = np.searchsorted(self.block_ends, indices, side="right")
        blocks = self.reader.get(np.unique(numbers).tolist())
        records = np.empty(len(indices), self.record_dtype)
        for number, content in blocks.items():
            selected = numbers == number
            block = content.view(self.record_dtype)
            records[selected] = block[indices[selected] - (self.block_ends[number] - len(block))]
        return bert_hdf5.unpack_records(records, self.seq_len, self.max_predictions)

    def fetch(self, indices: NDArray[np.int64]) -> None:
        self.reader.fetch(np.unique(np.searchsorted(self.block_ends, indices, side="right")).tolist())

    def source(self, index: int) -> str:
        number = int(np.searchsorted(self.block_ends, index, side="right"))
        file, _, stop = self.blocks[number]
        return f"{self.paths[file]}, sample {index - int(self.block_ends[number]) + stop}"

    def _chunk(self, number: int) -> Chunk:
        file, start, stop = self.blocks[number]
        identity = self.paths[file].source().identity(f"bert samples {start}-{stop} {self.record_dtype.descr}")
        return Chunk(identity, (stop - start) * self.record_dtype.itemsize, partial(self._unpack, file, start, stop))

    def _unpack(self, number: int, start: int, stop: int) -> memoryview:
        path, shape = self.paths[number], self.shapes[number]
        with open_hdf5(path) as file:
            ranges = [span for name in DATASETS for span in _byte_ranges(file[name], start, stop)]
            starts, stops = np.array(ranges, np.int64).T
            path.source().fetch(starts, stops, wait=True)  # h5py has one lock, which no download should hold
            arrays = bert_hdf5.read_samples(path, file, shape, start, stop)
        largest = max(int(arrays[name].max(initial=0)) for name in TOKEN_DATASETS)
        if largest >= self.vocab_size:
            raise UserError(
                f"{path}: contains token {largest}, but model.vocab={self.vocab_size}; the samples were made with "
                "another vocabulary, or model.vocab is too small"
            )
        return bert_hdf5.to_records(arrays, self.record_dtype).view(np.uint8).data


def _byte_ranges(dataset: Any, start: int, stop: int) -> Iterator[tuple[int, int]]:
    """Where samples `start` to `stop` of a dataset are in its file."""
    if dataset.chunks is None:
        row_bytes = dataset.nbytes // len(dataset)
        offset = dataset.id.get_offset()
        yield offset + start * row_bytes, offset + stop * row_bytes
        return
    rows = range(start // dataset.chunks[0] * dataset.chunks[0], stop, dataset.chunks[0])
    columns = (range(0, size, chunk) for size, chunk in zip(dataset.shape[1:], dataset.chunks[1:], strict=True))
    for coordinates in product(rows, *columns):
        info = dataset.id.get_chunk_info_by_coord(coordinates)
        yield info.byte_offset, info.byte_offset + info.size


def open_bert_hdf5(
    paths: Sequence[DataPath], seq_len: int, max_predictions: int, vocab_size: int
) -> BertHdf5Dataset | RemoteBertHdf5Dataset:
    """The samples of files that are all on this host or all behind URLs."""
    remote = [path for path in paths if isinstance(path, RemotePath)]
    if not remote:
        return BertHdf5Dataset([path for path in paths if isinstance(path, Path)], seq_len, max_predictions)
    if len(remote) < len(paths):
        raise UserError("data.paths: HDF5 files are either all local or all behind URLs; or use data.weights")
    return RemoteBertHdf5Dataset(remote, seq_len, max_predictions, vocab_size)
