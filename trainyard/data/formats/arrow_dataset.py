"""Directories saved by the datasets library (save_to_disk) with fixed-length token rows, read in place.

    data-00000-of-00002.arrow, ...  Arrow streams: record batches of rows, each column a list of integers per row
    state.json                      names of the data files, in order, and a fingerprint for caches
    dataset_info.json               types of the columns

The datasets library itself is not needed. Files are memory-mapped and validated when they are opened; Arrow does not
report a stream that was truncated between two batches, so this module does. Of a remote file, opening reads what
describes it: the headers of its batches and the lengths of their rows. The rows are read by byte range.
"""

import json
import mmap
import os
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from trainyard.core.constants import IGNORE_INDEX
from trainyard.core.errors import UserError, one_line
from trainyard.core.quantities import counted
from trainyard.data.samples import Sample, document_ids
from trainyard.remote.chunks.cached_file import CachedFile
from trainyard.remote.chunks.remote_path import DataPath, RemotePath

METADATA_FILES = STATE_FILE, INFO_FILE, SPLITS_FILE = "state.json", "dataset_info.json", "dataset_dict.json"
END_OF_STREAM = b"\xff\xff\xff\xff\x00\x00\x00\x00"
"""Last bytes of every complete Arrow stream."""
READ_ERRORS = (OSError, ValueError, MemoryError, pa.ArrowException)

IntArray = NDArray[Any]


def data_files(directory: DataPath) -> list[DataPath]:
    """The Arrow files of a saved dataset, in order."""
    if not directory.is_dir():
        raise UserError(f"{directory}: no such directory")
    if (directory / SPLITS_FILE).is_file():
        splits = sorted(state.parent for state in directory.glob(f"*/{STATE_FILE}"))
        raise UserError(f"{directory}: has splits; use one of: {', '.join(map(str, splits)) or '(none found)'}")
    path = directory / STATE_FILE
    if not path.is_file():
        raise UserError(f"{directory}: has no {STATE_FILE}; expected a directory written by save_to_disk")
    content = path.read_bytes()
    try:
        names = [entry["filename"] for entry in json.loads(content)["_data_files"]]
    except (ValueError, LookupError, TypeError, RecursionError):
        raise UserError(f"{path}: has no list of data files; save the dataset again") from None
    for name in names:
        if not isinstance(name, str) or name != os.path.basename(name) or not (directory / name).is_file():
            raise UserError(f"{path}: names {name!r}, which is not in {directory}; was the copy incomplete?")
    return [directory / name for name in names]


class RemoteOutline:
    """A sparse file of the size of a remote one, which gets the parts of its content that are needed to parse it.

    Arrow then finds the rows at the addresses that they have in the remote file, without their content.
    """

    def __init__(self, file: CachedFile) -> None:
        self.file = file
        self.sparse = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the outline
        self.sparse.truncate(file.size)
        self.buffer = pa.py_buffer(mmap.mmap(self.sparse.fileno(), 0, access=mmap.ACCESS_READ))

    def load(self, start: int, stop: int) -> None:
        stop = min(stop, self.file.size)
        os.pwrite(self.sparse.fileno(), self.file.read(start, stop).data, start)

    def load_header(self, position: int) -> None:
        """The header of the message at a position: a marker (absent in old streams), its length, its content."""
        if position + 8 > self.file.size:
            return
        marker, length = np.frombuffer(self.file.read(position, position + 8).tobytes(), "<i4")
        self.load(position, position + 8 + max(int(length if marker == -1 else marker), 0))

    def load_lengths(self, column: pa.Array) -> None:
        """Everything of a column of lists except its values."""
        for buffer in column.buffers()[:-1]:
            if buffer is not None:
                start = buffer.address - self.buffer.address
                if 0 <= start < self.buffer.size:
                    self.load(start, start + buffer.size)


class ArrowStream(NamedTuple):
    mapped: pa.Buffer
    """The file, memory-mapped, or the outline of a remote one."""
    schema: pa.Schema
    batches: Iterator[pa.RecordBatch]
    """Record batches of valid structure: views of `mapped`, unless the stream is compressed or big-endian."""
    outline: RemoteOutline | None


def open_stream(path: DataPath, outline_only: bool = False) -> ArrowStream:
    """Open a file. `outline_only`: of a remote file, only what its structure needs is read."""
    size = path.stat().st_size
    if size < len(END_OF_STREAM):
        raise UserError(f"{path}: {size} bytes are too few for an Arrow stream; truncated?")
    outline = None
    if not isinstance(path, RemotePath):
        mapped = pa.memory_map(str(path)).read_buffer()
    elif outline_only:
        outline = RemoteOutline(path.source())
        outline.load(size - len(END_OF_STREAM), size)
        mapped = outline.buffer
    else:
        mapped = pa.py_buffer(path.source().local_copy())
    if mapped.slice(size - len(END_OF_STREAM)).to_pybytes() != END_OF_STREAM:
        raise UserError(f"{path}: no end-of-stream marker; truncated?")
    source = pa.BufferReader(mapped)
    try:
        if outline:
            outline.load_header(0)
        reader = pa.ipc.open_stream(source)
        return ArrowStream(mapped, reader.schema, _validated_batches(path, source, reader, outline), outline)
    except READ_ERRORS as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{path}: not an Arrow stream: {one_line(error)}") from None


def _validated_batches(
    path: DataPath, source: pa.BufferReader, reader: Any, outline: RemoteOutline | None
) -> Iterator[pa.RecordBatch]:
    count = 0
    while True:
        if outline:
            outline.load_header(source.tell())
        try:
            batch = reader.read_next_batch()
            batch.validate()
        except StopIteration:
            break
        except READ_ERRORS as error:
            raise UserError(f"{path}: batch {count} cannot be read: {one_line(error)}") from None
        yield batch
        count += 1
    if source.tell() != source.size():
        raise UserError(
            f"{path}: the stream ends after {counted(count, 'batch')}, {source.size() - source.tell()} bytes early"
        )


def require_int_lists(path: DataPath, schema: pa.Schema, name: str) -> None:
    """Raise unless each row of the column is a list of integers."""
    index = schema.get_field_index(name)  # -1 also for a repeated name
    if index < 0:
        raise UserError(f"{path}: no column {name!r}; has: {', '.join(schema.names)}")
    kind, types = schema.types[index], pa.types
    is_list = types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
    if not is_list or not types.is_integer(kind.value_type):
        raise UserError(f"{path}: column {name!r} is {kind}; expected a list of integers in each row")


def list_column(path: DataPath, batch: pa.RecordBatch, name: str) -> tuple[NDArray[np.int64], IntArray]:
    """A column of integer lists: the length of each row, and the values of all rows without a copy."""
    require_int_lists(path, batch.schema, name)
    column = batch.column(name)
    try:
        column.validate(full=True)
    except READ_ERRORS as error:
        raise UserError(f"{path}: column {name!r} is damaged: {one_line(error)}") from None
    values = column.flatten()
    if column.null_count or values.null_count:
        raise UserError(f"{path}: column {name!r} has missing rows or values (null)")
    return pc.list_value_length(column).to_numpy().astype(np.int64), values.to_numpy(zero_copy_only=True)


def row_length(directory: DataPath) -> int:
    """Tokens in the first row of a saved dataset."""
    for file in data_files(directory.expanduser()):
        for batch in open_stream(file).batches:
            lengths, _ = list_column(file, batch, "input_ids")
            if len(lengths):
                return int(lengths[0])
    raise UserError(f"{directory}: has no rows")


class RemoteRows:
    """A column of a record batch in a remote file, whose rows are read where they are indexed."""

    def __init__(self, file: CachedFile, offset: int, dtype: np.dtype[Any], shape: tuple[int, int]) -> None:
        self.file, self.offset, self.dtype, self.shape = file, offset, dtype, shape
        self.row_bytes = shape[1] * dtype.itemsize

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, row: int) -> IntArray:
        return self.file.read(*self.byte_range(row)).view(self.dtype)

    def byte_range(self, row: int) -> tuple[int, int]:
        start = self.offset + row * self.row_bytes
        return start, start + self.row_bytes

    def max(self) -> int:
        return max(int(self[row].max()) for row in range(len(self)))


class ArrowDataset:
    """A dataset of rows of `seq_len` tokens in one or more saved directories.

    Labels are the file's, shifted by one, since models here do not shift them. The last label of a row and those of
    padding are IGNORE_INDEX. With `document_mask`, a document starts where position_ids do not count on.
    """

    def __init__(
        self, paths: Sequence[DataPath], seq_len: int, document_mask: bool = False, vocab_size: int | None = None
    ) -> None:
        self.seq_len, self.document_mask = seq_len, document_mask
        self.token_limit = vocab_size or 2**31
        self.columns: list[str] = []
        self.dtypes: dict[str, np.dtype[Any]] = {}
        self.batch_files: list[DataPath] = []
        self.batch_arrays: list[dict[str, IntArray | RemoteRows]] = []
        """Columns of each record batch, [rows, seq_len]: views of the mapped files, or places in remote ones."""
        for file in (file for path in paths for file in data_files(path.expanduser())):
            self._open_file(file)
        if not self.batch_arrays:
            raise UserError(f"{', '.join(map(str, paths))}: has no rows")
        num_rows = [len(arrays["input_ids"]) for arrays in self.batch_arrays]
        self.batch_ends = np.cumsum(num_rows, dtype=np.int64)
        self.batch_starts = self.batch_ends - num_rows
        self.remote_files = {path.source() for path in self.batch_files if isinstance(path, RemotePath)}
        self.is_remote = bool(self.remote_files)

    def __len__(self) -> int:
        return int(self.batch_ends[-1])

    def _open_file(self, file: DataPath) -> None:
        stream = open_stream(file, outline_only=True)
        names = stream.schema.names
        labels = "labels" if "labels" in names else "attention_mask"
        columns = ["input_ids", *([labels] if labels in names else []), *["position_ids"] * self.document_mask]
        if self.document_mask and "position_ids" not in names:
            raise UserError(f"{file}: no column 'position_ids' to separate documents; use data.document_mask=false")
        if self.columns and columns != self.columns:
            raise UserError(f"{file}: has {', '.join(columns)}, but the files before it {', '.join(self.columns)}")
        self.columns = columns
        for name in columns:
            require_int_lists(file, stream.schema, name)
        for batch in stream.batches:
            if batch.num_rows:
                self.batch_files.append(file)
                self.batch_arrays.append({name: self._rows(file, stream, batch, name) for name in columns})
                for name, array in self.batch_arrays[-1].items():
                    self.dtypes[name] = np.result_type(array.dtype, self.dtypes.get(name, array.dtype))

    def _rows(self, file: DataPath, stream: ArrowStream, batch: pa.RecordBatch, name: str) -> "IntArray | RemoteRows":
        if stream.outline:
            stream.outline.load_lengths(batch.column(name))
        lengths, values = list_column(file, batch, name)
        if (lengths != self.seq_len).any():
            length = int(lengths[(lengths != self.seq_len).argmax()])
            if (lengths == length).all():
                raise UserError(f"{file}: rows of {length} tokens, but data.seq_len={self.seq_len}; nearest: {length}")
            raise UserError(
                f"{file}: rows of {lengths.min()} to {lengths.max()} tokens; pack them (trainyard data pack)"
            )
        offset = values.ctypes.data - stream.mapped.address
        if not 0 <= offset < stream.mapped.size:
            raise UserError(f"{file}: is compressed or big-endian and cannot be read in place; save it again")
        if stream.outline:
            return RemoteRows(stream.outline.file, offset, values.dtype, (len(lengths), self.seq_len))
        return values.reshape(-1, self.seq_len)

    def samples(self, indices: NDArray[np.int64]) -> Sample:
        if len(indices) and (indices.min() < 0 or indices.max() >= len(self)):
            raise IndexError(f"rows {indices.min()} to {indices.max()} of {len(self)}")
        if self.is_remote:
            self.fetch(indices, wait=True)
        locations = self._locate(indices)
        columns = {name: self._read_rows(name, locations) for name in self.columns}
        tokens = self._check_tokens(columns["input_ids"], indices, 0)
        labels = np.full_like(tokens, IGNORE_INDEX)
        if "labels" in columns:
            labels[:, :-1] = self._check_tokens(columns["labels"], indices, IGNORE_INDEX)[:, 1:]
        elif "attention_mask" in columns:
            np.copyto(labels[:, :-1], tokens[:, 1:], where=columns["attention_mask"][:, 1:] != 0)
        else:
            labels[:, :-1] = tokens[:, 1:]
        sample = {"tokens": tokens, "labels": labels}
        if self.document_mask:
            positions = columns["position_ids"]
            starts = np.zeros(positions.shape, np.bool_)
            starts[:, 1:] = positions[:, 1:] != positions[:, :-1] + 1
            sample |= document_ids(starts)
        return sample

    def fetch(self, indices: NDArray[np.int64], wait: bool = False) -> None:
        """Begin to fetch the rows of remote files, or do so now."""
        if all(file.content() is not None for file in self.remote_files):
            return
        ranges: dict[CachedFile, list[tuple[int, int]]] = {}
        for batch, row in self._locate(indices):
            for array in self.batch_arrays[batch].values():
                if isinstance(array, RemoteRows):
                    ranges.setdefault(array.file, []).append(array.byte_range(row))
        for file, spans in ranges.items():
            starts, stops = np.array(spans, np.int64).T
            file.fetch(starts, stops)
        for file, spans in ranges.items() if wait else ():
            starts, stops = np.array(spans, np.int64).T
            file.fetch(starts, stops, wait=True)

    def _locate(self, indices: NDArray[np.int64]) -> list[tuple[int, int]]:
        """(record batch, row) of each sample."""
        batches = np.searchsorted(self.batch_ends, indices, side="right")
        return list(zip(batches.tolist(), (indices - self.batch_starts[batches]).tolist(), strict=True))

    def source(self, index: int) -> str:
        batch = int(np.searchsorted(self.batch_ends, index, side="right"))
        file = self.batch_files[batch]
        first = self.batch_starts[self.batch_files.index(file)]
        return f"{file}, row {index - int(first)}"

    def _read_rows(self, name: str, locations: list[tuple[int, int]]) -> IntArray:
        """[len(locations), seq_len] of a column, by (record batch, row)."""
        rows = np.empty((len(locations), self.seq_len), self.dtypes[name])
        for out, (batch, row) in zip(rows, locations, strict=True):
            out[:] = self.batch_arrays[batch][name][row]
        return rows

    def _check_tokens(self, rows: IntArray, indices: NDArray[np.int64], allowed: int) -> NDArray[np.int32]:
        """Rows as int32; raises if a value is neither in the vocabulary nor `allowed`."""
        if rows.size and (rows.max() >= self.token_limit or rows.min() < 0):
            invalid = (rows >= self.token_limit) | ((rows < 0) & (rows != allowed))
            if invalid.any():
                row, column = np.argwhere(invalid)[0]
                file = self.batch_files[np.searchsorted(self.batch_ends, indices[row], side="right")]
                raise UserError(
                    f"{file}: token {rows[row, column]} in row {indices[row]}, but tokens are 0 to "
                    f"{self.token_limit - 1}"
                )
        return rows.astype(np.int32, copy=False)
