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
        if file.read(4).removeprefix(BOM_UTF8).startswith(b"["):
            raise UserError(f"{path}: one JSON array; expected JSON lines, one document per line")
        while start < total:
            file.seek(min(start + SLICE_BYTES, total))
            file.readline()
            end = min(file.tell(), total)
            yield InputSlice(path, "lines", start, end - start)
            start = end


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
    data = input_slice.data
    if data is None:
        with input_slice.path.open("rb") as file:
            file.seek(input_slice.start)
            data = file.read(input_slice.input_bytes)
    offset = 0
    for line in data.split(b"\n"):
        if line.removeprefix(BOM_UTF8).strip():
            texts = _parse_line(line, keys)
            if isinstance(texts, str):
                yield UnreadableRecord(input_slice.path, f"line {line_number(input_slice, offset)}", texts)
            else:
                yield texts
        offset += len(line) + 1


def _parse_line(line: bytes, keys: Sequence[str]) -> Texts | str:
    """The texts of a JSON document, or the reason why it has none."""
    try:
        document: Any = JSON_DECODER.decode(line.removeprefix(BOM_UTF8).decode())
    except UnicodeDecodeError:
        return "not UTF-8"
    except (ValueError, RecursionError) as error:
        return f"not JSON: {one_line(error)}"
    if not isinstance(document, dict):
        return "not a JSON object"
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


def _read_table(input_slice: InputSlice, keys: Sequence[str]) -> "pa.Table":
    import pyarrow as pa
    from pyarrow import parquet

    from trainyard.data.formats.arrow_dataset import open_stream

    path, index = input_slice.path, input_slice.start
    try:
        if input_slice.kind == "parquet":
            file = parquet.ParquetFile(_parquet_source(path))
            _require_columns(path, file.schema_arrow.names, keys)
            return file.read_row_group(index, columns=list(keys))
        stream = open_stream(path)
        _require_columns(path, stream.schema.names, keys)
        return pa.Table.from_batches(islice(stream.batches, index, index + 1))
    except (OSError, pa.ArrowException) as error:
        raise UserError(f"{path}: part {index} cannot be read: {one_line(error)}") from None


def _require_columns(path: DataPath, names: Sequence[str], keys: Sequence[str]) -> None:
    for key in keys:
        if key not in names:
            raise UserError(f"{path}: no column {key!r}; has: {', '.join(names)}")
