"""Documents from files of many kinds, in pieces that any process can read by itself.

JSON lines (.json, .jsonl; .gz and .zst of them), text (.txt: a file is a document), Parquet, and directories that the
datasets library saved. A piece is a few MiB: a range of bytes, a row group, a batch of records; what can only be read
from the beginning (compressed files) is read by the parent and handed out.
"""

import glob
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from trainyard.core.errors import UserError, one_line

if TYPE_CHECKING:
    import pyarrow as pa

SLICE_BYTES = 4 << 20
"""Bytes."""
JSON_LINES_SUFFIXES = (".json", ".jsonl")
COMPRESSION_BY_SUFFIX = {".gz": "gzip", ".zst": "zstd"}
TEXT_SUFFIXES = (".txt", ".text")
JSON_DECODER = json.JSONDecoder()
SURROGATE = re.compile("[\ud800-\udfff]")
"""JSON can say it; UTF-8 cannot."""
SUPPORTED_INPUTS = (
    "JSON lines (.json, .jsonl, also .gz and .zst), .txt, .parquet, or a directory of the datasets library"
)


class InputSlice(NamedTuple):
    path: Path
    kind: str
    """lines, text, parquet or arrow."""
    start: int
    """Of its bytes, or its row group or batch."""
    end: int
    data: bytes | None
    """Lines that the parent had to read."""
    input_bytes: int
    """Bytes of the input that are read when this piece is."""


class UnreadableRecord(NamedTuple):
    """What could not be read."""

    path: Path
    location: str
    """Within the file: `line 12`."""
    reason: str

    def __str__(self) -> str:
        return f"{self.path}: {self.location}: {self.reason}"


def resolve_inputs(patterns: Sequence[str]) -> list[Path]:
    """Files and directories by name or glob, sorted within each pattern."""
    found: list[Path] = []
    for pattern in patterns:
        matches = [Path(match) for match in sorted(glob.glob(str(Path(pattern).expanduser())))]
        if not matches:
            raise UserError(f"{pattern}: no such file")
        for path in matches:
            _file_kind(path)
        found += matches
    return found


def total_bytes(paths: Sequence[Path]) -> int:
    """Bytes of all inputs, compressed as they are."""
    return sum(file.stat().st_size for path in paths for file in (_arrow_files(path) if path.is_dir() else [path]))


def input_slices(paths: Sequence[Path]) -> Iterator[InputSlice]:
    for path in paths:
        kind = _file_kind(path)
        if kind == "text":
            yield InputSlice(path, kind, 0, 0, None, path.stat().st_size)
        elif kind == "parquet":
            yield from _row_groups(path)
        elif kind == "arrow":
            for file in _arrow_files(path):
                yield from _record_batches(file)
        elif path.suffix in COMPRESSION_BY_SUFFIX:
            yield from _decompressed_lines(path)
        else:
            yield from _line_ranges(path)


def read_documents(piece: InputSlice, keys: Sequence[str]) -> Iterator[tuple[str, ...] | UnreadableRecord]:
    """The texts under `keys` of each document, or what is wrong with it."""
    if piece.kind == "lines":
        yield from _read_lines(piece, keys)
        return
    if piece.kind == "text":
        try:
            text = piece.path.read_bytes().decode()
        except UnicodeDecodeError as error:
            yield UnreadableRecord(piece.path, f"byte {error.start}", "not UTF-8")
        else:
            yield (text,) * len(keys)
        return
    table = _read_table(piece, keys)
    columns = [table.column(key).to_pylist() for key in keys]
    for number, row in enumerate(zip(*columns, strict=True)):
        if all(isinstance(text, str) for text in row):
            yield row
        else:
            name = next(key for key, text in zip(keys, row, strict=True) if not isinstance(text, str))
            yield UnreadableRecord(piece.path, f"row {number} of part {piece.start}", f"{name!r} is no text")


def line_number(piece: InputSlice, offset: int) -> int:
    """Of the line that begins at a byte of a file's piece (bytes of the unpacked text)."""
    if piece.data is not None:
        return piece.start + piece.data.count(b"\n", 0, offset) + 1
    with piece.path.open("rb") as file:
        count, left = 1, piece.start + offset
        while left > 0 and (block := file.read(min(left, SLICE_BYTES))):
            count += block.count(b"\n")
            left -= len(block)
    return count


def _file_kind(path: Path) -> str:
    if path.is_dir():
        if not _arrow_files(path):
            raise UserError(
                f"{path}: a directory without the data-*.arrow of the datasets library; wanted: {SUPPORTED_INPUTS}"
            )
        return "arrow"
    suffixes = path.suffixes
    last = suffixes[-1] if suffixes else ""
    inner = suffixes[-2] if len(suffixes) > 1 else ""
    if last in JSON_LINES_SUFFIXES or (last in COMPRESSION_BY_SUFFIX and inner in JSON_LINES_SUFFIXES):
        return "lines"
    if last in TEXT_SUFFIXES:
        return "text"
    if last == ".parquet":
        return "parquet"
    raise UserError(f"{path}: not a kind of file that is read; wanted: {SUPPORTED_INPUTS}")


def _line_ranges(path: Path) -> Iterator[InputSlice]:
    """Ranges of bytes that end where a line does. Only their ends are read here."""
    total, start = path.stat().st_size, 0
    with path.open("rb") as file:
        if file.read(1) == b"[":
            raise UserError(f"{path}: one JSON array; wanted: JSON lines, a document on each line")
        while start < total:
            file.seek(min(start + SLICE_BYTES, total))
            file.readline()
            end = min(file.tell(), total)
            yield InputSlice(path, "lines", start, end, None, end - start)
            start = end


def _decompressed_lines(path: Path) -> Iterator[InputSlice]:
    import pyarrow as pa

    line = 0
    rest = b""
    with path.open("rb") as raw, pa.input_stream(raw, compression=COMPRESSION_BY_SUFFIX[path.suffix]) as stream:
        before = 0
        while True:
            try:
                block = stream.read(SLICE_BYTES)
            except (OSError, pa.ArrowException) as error:
                raise UserError(f"{path}: cannot be unpacked after line {line}: {one_line(error)}") from None
            data, rest = rest + block, b""
            if block:
                cut = data.rfind(b"\n") + 1
                data, rest = data[:cut], data[cut:]
            if data:
                now = raw.tell()
                yield InputSlice(path, "lines", line, 0, data, now - before)
                before, line = now, line + data.count(b"\n")
            if not block:
                return


def _row_groups(path: Path) -> Iterator[InputSlice]:
    import pyarrow as pa
    from pyarrow import parquet

    try:
        metadata = parquet.ParquetFile(path).metadata
    except (OSError, pa.ArrowException) as error:
        raise UserError(f"{path}: not a Parquet file: {one_line(error)}") from None
    groups = metadata.num_row_groups
    for number in range(groups):
        yield InputSlice(path, "parquet", number, number + 1, None, path.stat().st_size // groups)


def _arrow_files(path: Path) -> list[Path]:
    """Of a saved dataset, or of all splits of one."""
    return sorted(path.glob("data-*.arrow")) or sorted(path.glob("*/data-*.arrow"))


def _record_batches(path: Path) -> Iterator[InputSlice]:
    import pyarrow as pa

    sizes = []
    try:
        with pa.memory_map(str(path)) as file:
            sizes += [batch.nbytes for batch in pa.ipc.open_stream(file)]
    except (OSError, pa.ArrowException) as error:
        raise UserError(f"{path}: not an Arrow stream: {one_line(error)}") from None
    for number, bytes_ in enumerate(sizes):
        yield InputSlice(path, "arrow", number, number + 1, None, bytes_)


def _read_lines(piece: InputSlice, keys: Sequence[str]) -> Iterator[tuple[str, ...] | UnreadableRecord]:
    data = piece.data
    if data is None:
        with piece.path.open("rb") as file:
            file.seek(piece.start)
            data = file.read(piece.end - piece.start)
    offset = 0
    for line in data.split(b"\n"):
        why = ""
        if line.strip():
            try:
                document: Any = JSON_DECODER.decode(line.decode())
            except UnicodeDecodeError:
                why = "not UTF-8"
            except (ValueError, RecursionError) as error:
                why = f"not JSON: {one_line(error)}"
            else:
                if not isinstance(document, dict):
                    why = "not a JSON object"
                elif missing := [key for key in keys if not isinstance(document.get(key), str)]:
                    why = f"no text under {missing[0]!r}"
                elif any(SURROGATE.search(document[key]) for key in keys if not document[key].isascii()):
                    why = "half of a pair of surrogates, which is no character"
                else:
                    yield tuple(document[key] for key in keys)
        if why:
            yield UnreadableRecord(piece.path, f"line {line_number(piece, offset)}", why)
        offset += len(line) + 1


def _read_table(piece: InputSlice, keys: Sequence[str]) -> "pa.Table":
    import pyarrow as pa
    from pyarrow import parquet

    try:
        if piece.kind == "parquet":
            file = parquet.ParquetFile(piece.path)
            _require_columns(piece.path, file.schema_arrow.names, keys)
            return file.read_row_group(piece.start, columns=list(keys))
        with pa.memory_map(str(piece.path)) as mapped:
            stream = pa.ipc.open_stream(mapped)
            _require_columns(piece.path, stream.schema.names, keys)
            for _ in range(piece.start):
                stream.read_next_batch()
            return pa.Table.from_batches([stream.read_next_batch()])
    except (OSError, pa.ArrowException, StopIteration) as error:
        raise UserError(f"{piece.path}: part {piece.start} cannot be read: {one_line(error)}") from None


def _require_columns(path: Path, names: Sequence[str], keys: Sequence[str]) -> None:
    for key in keys:
        if key not in names:
            raise UserError(f"{path}: no column {key!r}; has: {', '.join(names)}")
