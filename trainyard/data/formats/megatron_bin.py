"""Megatron's token files: PREFIX.bin holds the tokens of all sequences, PREFIX.idx their lengths and offsets.

    .idx: magic, version (u64), dtype code (u8), number of sequences N (u64), number of document entries D (u64), then
          N sequence lengths (i32), N byte offsets (i64), D document entries (i64): the first sequence of each
          document, and N

A sequence is a document or a sentence of one. Sequences follow each other without gaps, as every known writer leaves
them, so lengths, offsets and the size of PREFIX.bin determine each other: opening compares them, and a damaged index is
never read.
"""

import os
import shutil
import struct
from pathlib import Path
from typing import Any, BinaryIO, Self

import numpy as np
from numpy.typing import NDArray

from trainyard.core.atomic_files import fsync_directory
from trainyard.core.errors import UserError
from trainyard.core.quantities import counted
from trainyard.data.formats.remote_tokens import RemoteTokens
from trainyard.remote.chunks.remote_path import DataPath, RemotePath

INDEX_MAGIC = b"MMIDIDX\x00\x00"
LEGACY_MAGIC = b"TNTIDX\x00\x00"
INDEX_HEADER = struct.Struct("<9sQBQQ")
TOKEN_DTYPES: dict[int, str] = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}
"""By dtype code. Codes 6 and 7 are floating point with sizes that differ between versions: never tokens."""
DTYPE_CODES = {name: code for code, name in TOKEN_DTYPES.items()}
UINT16_VOCAB_LIMIT = 65500
"""Megatron stores tokens of vocabularies below this size as uint16."""

TEMPORARY_SUFFIXES = (".bin", ".idx", ".sizes", ".documents")
CHECKED_SEQUENCES = 1 << 20
COPY_BYTES = 4 << 20
"""Bytes of sequence lengths that are converted to offsets at a time."""

Tokens = NDArray[Any]


def token_dtype(vocab_size: int) -> str:
    return "uint16" if vocab_size < UINT16_VOCAB_LIMIT else "int32"


def prefix_of(path: DataPath) -> DataPath:
    """PREFIX of PREFIX, PREFIX.bin or PREFIX.idx."""
    path = path.expanduser()
    return path.with_suffix("") if path.suffix in (".bin", ".idx") else path


def is_token_file(path: Path) -> bool:
    """True for PREFIX.bin, PREFIX.idx, and the PREFIX of an index."""
    path = path.expanduser()
    return path.suffix in (".bin", ".idx") or (not path.is_file() and _with_suffix(path, ".idx").is_file())


def _with_suffix(prefix: DataPath, suffix: str) -> DataPath:
    return prefix.with_name(prefix.name + suffix)


class MegatronTokens:
    """Token sequences in a pair of files. Opening checks the index; tokens are read on access, from a memory map or by
    byte range."""

    def __init__(self, path: DataPath) -> None:
        self.prefix = prefix_of(path)
        index_path, token_path = (_with_suffix(self.prefix, suffix) for suffix in (".idx", ".bin"))
        for file in (index_path, token_path):
            if not file.is_file():
                raise UserError(f"{file}: no such file; token files are a pair PREFIX.bin and PREFIX.idx")
        self.dtype, self.sequence_lengths, offsets, self.document_bounds = _read_index(index_path)
        num_bytes = token_path.stat().st_size
        if num_bytes % self.dtype.itemsize:
            raise UserError(
                f"{token_path}: {num_bytes} bytes are not a whole number of {self.dtype} tokens; truncated?"
            )
        self.tokens = _open_tokens(token_path, self.dtype, num_bytes)
        """All tokens of the .bin file."""
        self.sequence_bounds = np.zeros(len(self) + 1, np.int64)
        """Where each sequence starts in `tokens`, and where the last ends."""
        np.cumsum(self.sequence_lengths, out=self.sequence_bounds[1:])
        _check_sequences(index_path, token_path, self, offsets)
        _check_documents(index_path, self)

    def __len__(self) -> int:
        """Number of sequences."""
        return len(self.sequence_lengths)

    def sequence(self, index: int) -> Tokens:
        start, end = self.sequence_bounds[index : index + 2].tolist()
        return self.tokens[start:end]

    def span(self, start: int, end: int) -> Tokens | RemoteTokens:
        """Tokens `start` to `end`, without reading them."""
        return self.tokens.span(start, end) if isinstance(self.tokens, RemoteTokens) else self.tokens[start:end]


def _open_tokens(path: DataPath, dtype: np.dtype[Any], num_bytes: int) -> Tokens | RemoteTokens:
    if isinstance(path, RemotePath):
        return RemoteTokens(path.source(), dtype, 0, num_bytes // dtype.itemsize)
    # As a plain array: slices of numpy's memory maps take several times as long.
    return np.asarray(np.memmap(path, dtype, "r")) if num_bytes else np.zeros(0, dtype)


def _open_index(path: DataPath) -> NDArray[np.uint8]:
    if isinstance(path, RemotePath):
        return path.source().local_copy()
    return np.asarray(np.memmap(path, np.uint8, "r")) if path.stat().st_size else np.zeros(0, np.uint8)


def _read_index(path: DataPath) -> tuple[np.dtype[Any], NDArray[np.int32], NDArray[np.int64], NDArray[np.int64]]:
    """Token dtype, sequence lengths, sequence offsets (in bytes) and document bounds (in sequences)."""
    content = _open_index(path)
    size, header = len(content), content[: INDEX_HEADER.size].tobytes()
    if header.startswith(LEGACY_MAGIC):
        raise UserError(f"{path}: an index in the old TNTIDX format, which has no memory map; tokenize the text again")
    if not header.startswith(INDEX_MAGIC):
        raise UserError(f"{path}: not a token index (starts with {header[:9]!r}, not {INDEX_MAGIC!r})")
    if len(header) < INDEX_HEADER.size:
        raise UserError(f"{path}: {size} bytes are too few for an index; truncated?")
    _, version, code, num_sequences, num_entries = INDEX_HEADER.unpack(header)
    if version != 1:
        raise UserError(f"{path}: index version {version}; only version 1 is supported")
    if code not in TOKEN_DTYPES:
        known = ", ".join(f"{number} {name}" for number, name in TOKEN_DTYPES.items())
        raise UserError(f"{path}: dtype code {code} is not a token type; known: {known}")
    expected = INDEX_HEADER.size + 12 * num_sequences + 8 * num_entries
    if size not in (expected, expected + num_sequences):  # multimodal datasets have one more byte per sequence
        raise UserError(
            f"{path}: {size} bytes, but {counted(num_sequences, 'sequence')} and {num_entries} "
            f"document entries take {expected}"
        )
    start = INDEX_HEADER.size
    lengths = content[start : start + 4 * num_sequences].view("<i4")
    offsets = np.frombuffer(content, "<i8", num_sequences, start + 4 * num_sequences)
    documents = np.frombuffer(content, "<i8", num_entries, start + 12 * num_sequences)
    dtype = np.dtype(TOKEN_DTYPES[code]).newbyteorder("<")
    return dtype, lengths, offsets, documents


def _check_sequences(
    index_path: DataPath, token_path: DataPath, data: MegatronTokens, offsets: NDArray[np.int64]
) -> None:
    """Raise UserError unless the sequences follow each other from the first to the last token."""
    lengths, bounds, num_tokens = data.sequence_lengths, data.sequence_bounds, len(data.tokens)
    for start in range(0, len(data), CHECKED_SEQUENCES):  # in blocks, for a small amount of memory
        block = slice(start, start + CHECKED_SEQUENCES)
        invalid = (lengths[block] < 0) | (offsets[block] != bounds[:-1][block] * data.dtype.itemsize)
        if invalid.any():
            index = start + int(invalid.argmax())
            problem = f"sequence {index} has {lengths[index]} tokens"
            if lengths[index] >= 0:
                expected = bounds[index] * data.dtype.itemsize
                problem = f"sequence {index} starts at byte {offsets[index]}, the previous one ends at {expected}"
            raise UserError(f"{index_path}: {problem}; the index is damaged")
    if bounds[-1] != num_tokens:
        raise UserError(
            f"{token_path}: {counted(num_tokens, 'token')}, but by the index {bounds[-1]}; "
            "truncated, or from another index"
        )


def _check_documents(index_path: DataPath, data: MegatronTokens) -> None:
    bounds = data.document_bounds
    ends_match = len(bounds) and bounds[0] == 0 and bounds[-1] == len(data)
    if not (ends_match and (bounds[1:] >= bounds[:-1]).all()) and (len(data) or len(bounds)):
        raise UserError(
            f"{index_path}: document entries do not increase from 0 to {len(data)}, the number of sequences"
        )


class MegatronTokensWriter:
    """Writes both files under temporary names and renames them when complete, the index last.

    Memory does not grow: lengths and document entries wait in temporary files until their number is known.
    """

    def __init__(self, prefix: Path, dtype: str) -> None:
        self.prefix, self.dtype = prefix, np.dtype(dtype).newbyteorder("<")
        self.dtype_code = DTYPE_CODES[dtype]
        self.num_sequences = self.num_document_entries = 0
        self.temporary_paths = {
            suffix: prefix.with_name(f".{prefix.name}{suffix}.part") for suffix in TEMPORARY_SUFFIXES
        }
        self.files: dict[str, BinaryIO] = {suffix: path.open("w+b") for suffix, path in self.temporary_paths.items()}
        self._add_documents(np.zeros(1, np.int64))

    def add(
        self, tokens: Tokens, sequence_lengths: NDArray[np.int32], sequences_per_document: NDArray[np.int64]
    ) -> None:
        """Append documents: the tokens of their sequences, one after the other."""
        assert tokens.dtype == self.dtype
        self.files[".bin"].write(tokens.tobytes())
        self.files[".sizes"].write(sequence_lengths.astype("<i4").tobytes())
        self._add_documents(self.num_sequences + np.cumsum(sequences_per_document, dtype=np.int64))
        self.num_sequences += len(sequence_lengths)

    def _add_documents(self, entries: NDArray[np.int64]) -> None:
        self.files[".documents"].write(entries.astype("<i8").tobytes())
        self.num_document_entries += len(entries)

    def _path(self, suffix: str) -> Path:
        return self.prefix.with_name(self.prefix.name + suffix)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self._commit()
        finally:
            for suffix, file in self.files.items():
                file.close()
                self.temporary_paths[suffix].unlink(missing_ok=True)

    def _commit(self) -> None:
        index, lengths, documents = (self.files[suffix] for suffix in (".idx", ".sizes", ".documents"))
        index.write(INDEX_HEADER.pack(INDEX_MAGIC, 1, self.dtype_code, self.num_sequences, self.num_document_entries))
        lengths.seek(0)
        shutil.copyfileobj(lengths, index)
        lengths.seek(0)
        start = 0
        while block := lengths.read(COPY_BYTES):
            ends = start + np.cumsum(np.frombuffer(block, "<i4"), dtype=np.int64)
            index.write(((ends - np.frombuffer(block, "<i4")) * self.dtype.itemsize).astype("<i8").tobytes())
            start = int(ends[-1])
        documents.seek(0)
        shutil.copyfileobj(documents, index)
        for suffix in (".bin", ".idx"):
            self.files[suffix].flush()
            os.fsync(self.files[suffix].fileno())
        # Remove the old index first: it must never be next to new tokens.
        self._path(".idx").unlink(missing_ok=True)
        for suffix in (".bin", ".idx"):
            os.replace(self.temporary_paths[suffix], self._path(suffix))
        fsync_directory(self.prefix.parent)
