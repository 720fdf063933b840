"""Text documents from files of many kinds, in slices that any process can read on its own.

Kinds: JSON lines (.json, .jsonl, also .gz, .bz2 and .zst), text (.txt, one document per file), Parquet, and directories
saved by the datasets library. A slice is a few MiB: a byte range, a row group or a record batch. Compressed files can
only be read from the start, so the parent process decompresses them and hands out the lines.
"""

import glob
import json
import re
from codecs import BOM_UTF8
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from trainyard.core.errors import UserError, one_line
from trainyard.remote.chunks.remote_path import DataPath

if TYPE_CHECKING:
    import pyarrow as pa

SLICE_BYTES = 4 << 20
KIND_BY_SUFFIX = {".json": "lines", ".jsonl": "lines", ".txt": "text", ".text": "text", ".parquet": "parquet"}
COMPRESSION_BY_SUFFIX = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd"}
JSON_DECODER = json.JSONDecoder()
SURROGATE = re.compile("[\ud800-\udfff]")
"""Lone surrogates are valid in JSON escapes but cannot be encoded as UTF-8."""
SUPPORTED_INPUTS = (
    "JSON lines (.json, .jsonl, also .gz, .bz2 and .zst), .txt, .parquet, a directory of such files, or one saved by "
    "the datasets library"
)

Texts = tuple[str, ...]
"""The texts of a document, one for each key."""


class InputSlice(NamedTuple):
    path: DataPath
    kind: str
    """lines, text, parquet or arrow."""
    start: int
    """First byte, number of the row group or record batch; for `data`, the number of lines before it."""
    input_bytes: int
    """Bytes of the input file that this slice stands for."""
    data: bytes | None = None
    """Lines that the parent process decompressed."""


class UnreadableRecord(NamedTuple):
    path: DataPath
    location: str
    """Position within the file, such as `line 12`."""
    reason: str

    def __str__(self) -> str:
        return f"{self.path}: {self.location}: {self.reason}"


def match_paths(pattern: str) -> list[Path]:
    """The path itself if it exists, or all paths that match a glob, sorted; `~` is the home directory."""
    path = Path(pattern).expanduser()
    return [path] if path.exists() else [Path(match) for match in sorted(glob.glob(str(path)))]


def expand_patterns(patterns: Sequence[str]) -> list[Path]:
    """Paths by name or glob, sorted within each pattern. Each pattern must match."""
    paths: list[Path] = []
    for pattern in patterns:
        matches = match_paths(pattern)
        if not matches:
            raise UserError(f"{pattern}: no such file")
        paths += matches
    return paths


def resolve_inputs(patterns: Sequence[str]) -> list[Path]:
    """Files of documents, and directories saved by the datasets library, by name or glob. Any other directory stands
    for the supported files in it, sorted by name."""
    paths: list[Path] = []
    for path in expand_patterns(patterns):
        is_plain_directory = path.is_dir() and not arrow_files(path)
        found = [path]
        if is_plain_directory:
            found = sorted(file for file in path.iterdir() if _kind_by_name(file) and not file.name.startswith("."))
        if not found:
            raise UserError(f"{path}: a directory without files of a supported kind; supported: {SUPPORTED_INPUTS}")
        paths += found
    for path in paths:
        _file_kind(path)
    return paths


def total_bytes(paths: Sequence[DataPath]) -> int:
    """Size of all inputs on disk."""
    return sum(file.stat().st_size for path in paths for file in (arrow_files(path) if path.is_dir() else [path]))


def input_slices(paths: Sequence[DataPath]) -> Iterator[InputSlice]:
    for path in paths:
        kind = _file_kind(path)
        if kind == "text":
            yield InputSlice(path, kind, 0, path.stat().st_size)
        elif kind == "parquet":
            yield from _row_groups(path)
        elif kind == "arrow":
            for file in arrow_files(path):
                yield from _record_batches(file)
        elif path.suffix in COMPRESSION_BY_SUFFIX:
            yield from _decompressed_lines(path)
        else:
            yield from _line_ranges(path)


def read_documents(input_slice: InputSlice, keys: Sequence[str]) -> tuple[list[Texts], list[UnreadableRecord]]:
    """The readable documents of a slice, and the others."""
    read = {"lines": _read_lines, "text": _read_text}.get(input_slice.kind, _read_rows)
    texts: list[Texts] = []
    unreadable: list[UnreadableRecord] = []
    for record in read(input_slice, keys):
        if isinstance(record, UnreadableRecord):
            unreadable.append(record)
        else:
            texts.append(record)
    return texts, unreadable


def record_slices(paths: Sequence[DataPath]) -> Iterator[InputSlice]:
    """Slices for `read_records`. A file that is one JSON array is a slice."""
    for path in paths:
        if _file_kind(path) == "lines" and path.suffix not in COMPRESSION_BY_SUFFIX and _begins_array(path):
            yield InputSlice(path, "array", 0, path.stat().st_size)
        elif _file_kind(path) == "text":
            raise UserError(f"{path}: text has no records; expected JSON lines or Parquet")
        else:
            yield from input_slices([path])


def read_records(input_slice: InputSlice) -> Iterator[tuple[int, dict[str, Any] | str]]:
    """The records of a slice, each with its place (`describe_place`), or the reason why it cannot be read."""
    if input_slice.kind == "lines":
        for offset, line in _slice_lines(input_slice):
            yield offset, _parse_object(line)
    elif input_slice.kind == "array":
        try:
            records = json.loads(input_slice.path.read_bytes().removeprefix(BOM_UTF8))
        except (ValueError, RecursionError) as error:
            raise UserError(f"{input_slice.path}: not JSON: {one_line(error)}") from None
        for number, record in enumerate(records):
            yield number, record if isinstance(record, dict) else "not a JSON object"
    else:
        for number, row in enumerate(_read_table(input_slice, None).to_pylist()):
            yield number, _without_nulls(row)


def describe_place(input_slice: InputSlice, place: int) -> str:
    """File and line, row or record of what `read_records` returns, for people."""
    if input_slice.kind == "lines":
        return f"{input_slice.path}: line {line_number(input_slice, place)}"
    part = f" of part {input_slice.start}" if input_slice.start else ""
    return f"{input_slice.path}: {'record' if input_slice.kind == 'array' else 'row'} {place}{part}"


def _without_nulls(value: Any) -> Any:
    """Columns have the keys of all their records; those that a record does not have are null."""
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def line_number(input_slice: InputSlice, offset: int) -> int:
    """1-based number of the line that starts `offset` bytes into the (decompressed) slice."""
    if input_slice.data is not None:
        return input_slice.start + input_slice.data.count(b"\n", 0, offset) + 1
    with input_slice.path.open("rb") as file:
        count, remaining = 1, input_slice.start + offset
        while remaining > 0 and (block := file.read(min(remaining, SLICE_BYTES))):
            count += block.count(b"\n")
            remaining -= len(block)
    return count


def _kind_by_name(path: DataPath) -> str | None:
    """The kind of a file of documents; None for a file of another kind."""
    compressed = path.suffix in COMPRESSION_BY_SUFFIX
    kind = KIND_BY_SUFFIX.get(Path(path.stem).suffix if compressed else path.suffix)
    return None if compressed and kind != "lines" else kind


def _file_kind(path: DataPath) -> str:
    if path.is_dir():
        return "arrow"
    if not (kind := _kind_by_name(path)):
        raise UserError(f"{path}: unsupported kind of file; supported: {SUPPORTED_INPUTS}")
    return kind


def _line_ranges(path: DataPath) -> Iterator[InputSlice]:
    """Byte ranges that end at line ends. Only the ends are read here."""
    total, start = path.stat().st_size, 0
    with path.open("rb") as file:
        if _begins_array(path):
            raise UserError(f"{path}: one JSON array; expected JSON lines, one document per line")
        while start < total:
            file.seek(min(start + SLICE_BYTES, total))
            file.readline()
            end = min(file.tell(), total)
            yield InputSlice(path, "lines", start, end - start)
            start = end


def _begins_array(path: DataPath) -> bool:
    with path.open("rb") as file:
        return file.read(4).removeprefix(BOM_UTF8).startswith(b"[")


def _decompressed_lines(path: DataPath) -> Iterator[InputSlice]:
    import pyarrow as pa

    line = 0
    partial_line = b""
    with path.open("rb") as raw, pa.input_stream(raw, compression=COMPRESSION_BY_SUFFIX[path.suffix]) as stream:
        file_position = 0
        while True:
            try:
                block = stream.read(SLICE_BYTES)
            except (OSError, pa.ArrowException) as error:
                raise UserError(f"{path}: cannot be decompressed after line {line}: {one_line(error)}") from None
            data, partial_line = partial_line + block, b""
            if block:
                cut = data.rfind(b"\n") + 1
                data, partial_line = data[:cut], data[cut:]
            if data:
                yield InputSlice(path, "lines", line, raw.tell() - file_position, data)
                file_position, line = raw.tell(), line + data.count(b"\n")
            if not block:
                return


def _row_groups(path: DataPath) -> Iterator[InputSlice]:
    import pyarrow as pa
    from pyarrow import parquet

    try:
        num_groups = parquet.ParquetFile(_parquet_source(path)).metadata.num_row_groups
    except (OSError, pa.ArrowException) as error:
        raise UserError(f"{path}: not a Parquet file: {one_line(error)}") from None
    for group in range(num_groups):
        yield InputSlice(path, "parquet", group, path.stat().st_size // num_groups)


def _parquet_source(path: DataPath) -> Any:
    return path if isinstance(path, Path) else path.open()


def arrow_files(path: DataPath) -> list[DataPath]:
    """Data files of a saved dataset, or of all its splits."""
    return sorted(path.glob("data-*.arrow")) or sorted(path.glob("*/data-*.arrow"))


def _record_batches(path: DataPath) -> Iterator[InputSlice]:
    from trainyard.data.formats.arrow_dataset import open_stream

    for index, num_bytes in enumerate([batch.nbytes for batch in open_stream(path).batches]):
        yield InputSlice(path, "arrow", index, num_bytes)


def _read_text(input_slice: InputSlice, keys: Sequence[str]) -> Iterator[Texts | UnreadableRecord]:
    try:
        yield (input_slice.path.read_bytes().removeprefix(BOM_UTF8).decode(),) * len(keys)
    except UnicodeDecodeError as error:
        yield UnreadableRecord(input_slice.path, f"byte {error.start}", "not UTF-8")


def _read_lines(input_slice: InputSlice, keys: Sequence[str]) -> Iterator[Texts | UnreadableRecord]:
    for offset, line in _slice_lines(input_slice):
        texts = _parse_line(line, keys)
        if isinstance(texts, str):
            yield UnreadableRecord(input_slice.path, f"line {line_number(input_slice, offset)}", texts)
        else:
            yield texts


def _slice_lines(input_slice: InputSlice) -> Iterator[tuple[int, bytes]]:
    """The lines of a slice that are not blank, each with its offset."""
    data = input_slice.data
    if data is None:
        with input_slice.path.open("rb") as file:
            file.seek(input_slice.start)
            data = file.read(input_slice.input_bytes)
    offset = 0
    for line in data.split(b"\n"):
        if line.removeprefix(BOM_UTF8).strip():
            yield offset, line
        offset += len(line) + 1


def _parse_object(line: bytes) -> dict[str, Any] | str:
    """A JSON object, or the reason why the line is none."""
    try:
        document: Any = JSON_DECODER.decode(line.removeprefix(BOM_UTF8).decode())
    except UnicodeDecodeError:
        return "not UTF-8"
    except (ValueError, RecursionError) as error:
        return f"not JSON: {one_line(error)}"
    return document if isinstance(document, dict) else "not a JSON object"


def _parse_line(line: bytes, keys: Sequence[str]) -> Texts | str:
    """The texts of a JSON document, or the reason why it has none."""
    document = _parse_object(line)
    if isinstance(document, str):
        return document
    if missing := [key for key in keys if not isinstance(document.get(key), str)]:
        return f"no text under {missing[0]!r}"
    texts = tuple(document[key] for key in keys)
    if any(SURROGATE.search(text) for text in texts if not text.isascii()):
        return "a lone surrogate, which is not a character"
    return texts


def _read_rows(input_slice: InputSlice, keys: Sequence[str]) -> Iterator[Texts | UnreadableRecord]:
    table = _read_table(input_slice, keys)
    columns = [table.column(key).to_pylist() for key in keys]
    for number, row in enumerate(zip(*columns, strict=True)):
        if wrong := [key for key, text in zip(keys, row, strict=True) if not isinstance(text, str)]:
            location = f"row {number} of part {input_slice.start}"
            yield UnreadableRecord(input_slice.path, location, f"{wrong[0]!r} is not text")
        else:
            yield row


def _read_table(input_slice: InputSlice, keys: Sequence[str] | None) -> "pa.Table":
    """The rows of a slice; all columns without `keys`."""
    import pyarrow as pa
    from pyarrow import parquet

    from trainyard.data.formats.arrow_dataset import open_stream

    path, index = input_slice.path, input_slice.start
    try:
        if input_slice.kind == "parquet":
            file = parquet.ParquetFile(_parquet_source(path))
            _require_columns(path, file.schema_arrow.names, keys or ())
            return file.read_row_group(index, columns=None if keys is None else list(keys))
        stream = open_stream(path)
        _require_columns(path, stream.schema.names, keys or ())
        return pa.Table.from_batches(islice(stream.batches, index, index + 1))
    except (OSError, pa.ArrowException) as error:
        raise UserError(f"{path}: part {index} cannot be read: {one_line(error)}") from None


def _require_columns(path: DataPath, names: Sequence[str], keys: Sequence[str]) -> None:
    for key in keys:
        if key not in names:
            raise UserError(f"{path}: no column {key!r}; has: {', '.join(names)}")
