"""Directories as the datasets library's save_to_disk leaves them, with rows of tokens, read in place.

    data-00000-of-00002.arrow, ...  Arrow streams: record batches of rows, each column a list of numbers per row
    state.json                      names of the data files, in order, and a fingerprint that caches go by
    dataset_info.json               types of the columns

The library itself is not needed. Files are mapped into memory, and what they say is checked when they are opened: a
stream that was cut off between two batches is one that Arrow does not complain about.
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from trainyard.core.errors import UserError, one_line
from trainyard.data.loading.token_samples import IGNORE_INDEX, document_ids

STATE_FILE, INFO_FILE, SPLITS_FILE = "state.json", "dataset_info.json", "dataset_dict.json"
END_OF_STREAM = b"\xff\xff\xff\xff\x00\x00\x00\x00"
"""Of every whole stream."""

IntArray = NDArray[Any]


def data_files(directory: Path) -> list[Path]:
    """The Arrow files of a saved data set, in order."""
    if not directory.is_dir():
        raise UserError(f"{directory}: no such directory")
    if (directory / SPLITS_FILE).is_file():
        splits = sorted(state.parent for state in directory.glob(f"*/{STATE_FILE}"))
        raise UserError(f"{directory}: has splits; name one of: {', '.join(map(str, splits)) or '(none is there)'}")
    path = directory / STATE_FILE
    if not path.is_file():
        raise UserError(f"{directory}: has no {STATE_FILE}; wanted: a directory that save_to_disk wrote")
    try:
        names = [each["filename"] for each in json.loads(path.read_bytes())["_data_files"]]
    except (ValueError, LookupError, TypeError, RecursionError):
        raise UserError(f"{path}: has no list of data files; save the data set again") from None
    for name in names:
        if not isinstance(name, str) or name != Path(name).name or not (directory / name).is_file():
            raise UserError(f"{path}: names {name!r}, which is not in {directory}; was it copied in part?")
    return [directory / name for name in names]


class ArrowStream(NamedTuple):
    file_bytes: NDArray[np.uint8]
    """The whole file, mapped."""
    schema: pa.Schema
    column_names: list[str]
    """Of the columns."""
    batches: Iterator[pa.RecordBatch]
    """Views of `data`."""


def open_stream(path: Path) -> ArrowStream:
    size = path.stat().st_size
    if size < len(END_OF_STREAM):
        raise UserError(f"{path}: {size} bytes are no Arrow stream; truncated?")
    data: NDArray[np.uint8] = np.memmap(path, np.uint8, "r")
    if data[-len(END_OF_STREAM) :].tobytes() != END_OF_STREAM:
        raise UserError(f"{path}: does not end as an Arrow stream does; truncated?")
    source = pa.BufferReader(data)
    try:
        reader = pa.ipc.open_stream(source)
        return ArrowStream(data, reader.schema, reader.schema.names, _validated_batches(path, source, reader))
    except (OSError, ValueError, MemoryError, pa.ArrowException) as error:
        raise UserError(f"{path}: not an Arrow stream: {one_line(error)}") from None


def _validated_batches(path: Path, source: pa.BufferReader, reader: Any) -> Iterator[pa.RecordBatch]:
    number = 0
    while True:
        try:
            batch = reader.read_next_batch()
            batch.validate()
        except StopIteration:
            break
        except (OSError, ValueError, MemoryError, pa.ArrowException) as error:
            raise UserError(f"{path}: batch {number} cannot be read: {one_line(error)}") from None
        yield batch
        number += 1
    if source.tell() != source.size():
        raise UserError(f"{path}: ends after {number} batches, {source.size() - source.tell()} bytes too early")


def _list_dtype(path: Path, schema: pa.Schema, name: str) -> np.dtype[Any]:
    """Of the numbers in a column whose rows are lists of them."""
    index = schema.get_field_index(name)
    if index < 0:
        raise UserError(f"{path}: no column {name!r}; has: {', '.join(schema.names)}")
    kind, types = schema.types[index], pa.types
    if not (types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)) or not types.is_integer(
        kind.value_type
    ):
        raise UserError(f"{path}: column {name!r} is {kind}; wanted: a list of whole numbers in each row")
    return np.dtype(kind.value_type.to_pandas_dtype())


def list_column(path: Path, batch: pa.RecordBatch, name: str) -> tuple[NDArray[np.int64], IntArray]:
    """A column whose rows are lists of whole numbers: where each row begins and ends, and all values, in place."""
    _list_dtype(path, batch.schema, name)
    column = batch.column(name)
    if column.null_count or column.values.null_count:
        raise UserError(f"{path}: column {name!r} has rows or numbers that are missing (null)")
    values = column.values.to_numpy(zero_copy_only=True)
    if pa.types.is_fixed_size_list(column.type):
        ends = np.arange(len(column) + 1, dtype=np.int64) * column.type.list_size
    else:
        ends = column.offsets.to_numpy(zero_copy_only=True).astype(np.int64) if len(column) else np.zeros(1, np.int64)
    if ends[0] < 0 or (np.diff(ends) < 0).any() or ends[-1] > len(values):
        raise UserError(f"{path}: column {name!r} says rows where there are none; the file is damaged")
    return ends, values


class ArrowDataset:
    """A Source of rows that are `sequence` tokens each, in one or more saved directories.

    Labels are the file's, one place further on, since models here do not shift them: the last of a row counts nowhere,
    nor does padding. With `separate`, documents are kept apart where position_ids start again.
    """

    def __init__(
        self, paths: Sequence[Path], seq_len: int, document_mask: bool = False, vocab_size: int | None = None
    ) -> None:
        self.seq_len, self.document_mask = seq_len, document_mask
        self.token_limit = vocab_size or 2**31
        self.files = [name for path in paths for name in data_files(path.expanduser())]
        self.columns: dict[str, list[IntArray]] = {}
        """By name, for each file: a row from every place in it, numbers of the column's dtype. Nothing is copied."""
        file, rows, places = [], [], []
        for number, name in enumerate(self.files):
            stream = open_stream(name)
            self._add_columns(name, stream)
            for batch in stream.batches:
                if batch.num_rows:
                    file.append(number)
                    rows.append(batch.num_rows)
                    places.append(
                        [self._value_offset(name, stream.file_bytes, batch, column) for column in self.columns]
                    )
        if not rows:
            raise UserError(f"{', '.join(map(str, paths))}: has no rows")
        self.batch_file = np.array(file)
        """Of each record batch."""
        self.batch_ends = np.cumsum(rows, dtype=np.int64)
        """Rows up to the end of each batch."""
        self.batch_starts = self.batch_ends - rows
        self.value_offsets = dict(zip(self.columns, np.array(places, np.int64).T, strict=True))
        """By column, of each batch."""

    def __len__(self) -> int:
        return int(self.batch_ends[-1])

    def _add_columns(self, file: Path, stream: ArrowStream) -> None:
        names = stream.column_names
        labels = "labels" if "labels" in names else "attention_mask"
        wanted = ["input_ids", *([labels] if labels in names else [])]
        if self.document_mask:
            if "position_ids" not in names:
                raise UserError(
                    f"{file}: no column 'position_ids', which tells documents apart; data.document_mask=false"
                )
            wanted.append("position_ids")
        if self.columns and wanted != list(self.columns):
            raise UserError(f"{file}: has {', '.join(wanted)}, but {self.files[0]} {', '.join(self.columns)}")
        for name in wanted:
            dtype = _list_dtype(file, stream.schema, name)
            numbers = np.frombuffer(stream.file_bytes, dtype, len(stream.file_bytes) // dtype.itemsize)
            width = min(self.seq_len, len(numbers))  # a file that is smaller than a row has none
            self.columns.setdefault(name, []).append(sliding_window_view(numbers, width))

    def _value_offset(self, file: Path, data: NDArray[np.uint8], batch: pa.RecordBatch, name: str) -> int:
        """Where a batch's values of a column begin, in numbers of its dtype from the beginning of the file."""
        ends, values = list_column(file, batch, name)
        lengths = np.diff(ends)
        if (lengths != self.seq_len).any():
            other = int(lengths[(lengths != self.seq_len).argmax()])
            if (lengths == other).all():
                raise UserError(f"{file}: rows of {other} tokens, but data.seq_len={self.seq_len}; nearest: {other}")
            raise UserError(
                f"{file}: rows of {lengths.min()} to {lengths.max()} tokens; pack them (trainyard data pack)"
            )
        place = values.ctypes.data - data.ctypes.data
        if not 0 <= place < len(data) or place % values.itemsize:
            raise UserError(f"{file}: is compressed or big-endian, so it cannot be read in place; save it again")
        return place // values.itemsize + int(ends[0])

    def samples(self, indices: NDArray[np.int64]) -> dict[str, NDArray[np.int32]]:
        if len(indices) and (indices.min() < 0 or indices.max() >= len(self)):
            raise IndexError(f"rows {indices.min()} to {indices.max()} of {len(self)}")
        batches = np.searchsorted(self.batch_ends, indices, side="right")
        found = {name: self._read_rows(name, indices, batches) for name in self.columns}
        tokens = self._check_tokens(found["input_ids"], indices, 0)
        labels = np.full_like(tokens, IGNORE_INDEX)
        if "labels" in found:
            labels[:, :-1] = self._check_tokens(found["labels"], indices, IGNORE_INDEX)[:, 1:]
        elif "attention_mask" in found:
            np.copyto(labels[:, :-1], tokens[:, 1:], where=found["attention_mask"][:, 1:] != 0)
        else:
            labels[:, :-1] = tokens[:, 1:]
        sample = {"tokens": tokens, "labels": labels}
        if self.document_mask:
            positions = found["position_ids"]
            begins = np.zeros(positions.shape, np.bool_)
            begins[:, 1:] = positions[:, 1:] != positions[:, :-1] + 1
            sample |= document_ids(begins)
        return sample

    def _read_rows(self, name: str, numbers: NDArray[np.int64], batches: NDArray[np.int64]) -> IntArray:
        """[numbers, sequence] of a column, as its files have it."""
        column, files = self.columns[name], self.batch_file[batches]
        places = self.value_offsets[name][batches] + (numbers - self.batch_starts[batches]) * self.seq_len
        rows = np.empty((len(numbers), self.seq_len), np.result_type(*column))
        for file in np.unique(files):
            here = files == file
            rows[here] = column[file][places[here]]
        return rows

    def _check_tokens(self, rows: IntArray, numbers: NDArray[np.int64], least: int) -> NDArray[np.int32]:
        """Rows of tokens or labels: in the vocabulary, or else `least`."""
        if rows.size and (rows.max() >= self.token_limit or rows.min() < 0):
            wrong = (rows >= self.token_limit) | ((rows < 0) & (rows != least))
            if wrong.any():
                row, place = np.argwhere(wrong)[0]
                number = numbers[row]
                file = self.files[self.batch_file[np.searchsorted(self.batch_ends, number, side="right")]]
                raise UserError(
                    f"{file}: token {rows[row, place]} in row {number}, but tokens are 0 to {self.token_limit - 1}"
                )
        return rows.astype(np.int32, copy=False)
