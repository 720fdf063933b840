"""Megatron's token files: PREFIX.bin has the tokens of all sequences, PREFIX.idx says where each begins and ends.

    .idx: magic, version (u64), dtype code (u8), sequences N (u64), document entries D (u64), then
          N sizes (i32), N byte offsets (i64), D numbers of the first sequence of each document, and N (i64)

A sequence is a document, or a sentence of one. Whatever an index says is checked against the files before it is used.
"""

import os
import shutil
import struct
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

import numpy as np
from numpy.typing import NDArray

from trainyard.core.atomic_files import fsync_directory
from trainyard.core.errors import UserError

INDEX_MAGIC = b"MMIDIDX\x00\x00"
LEGACY_MAGIC = b"TNTIDX\x00\x00"
INDEX_HEADER = struct.Struct("<9sQBQQ")
TOKEN_DTYPES: dict[int, str] = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}
"""By code. 6 and 7 are floating-point numbers, whose sizes differ between versions: no tokens."""
DTYPE_CODES = {name: code for code, name in TOKEN_DTYPES.items()}
UINT16_VOCAB_LIMIT = 65500
"""Below it tokens are uint16, as the reference does it."""

TEMPORARY_SUFFIXES = (".bin", ".idx", ".sizes", ".documents")
COPY_BYTES = 4 << 20
"""Bytes of sizes turned into offsets at a time."""

Tokens = NDArray[Any]


def token_dtype(vocab: int) -> str:
    return "uint16" if vocab < UINT16_VOCAB_LIMIT else "int32"


def prefix_of(path: Path) -> Path:
    """PREFIX of PREFIX, PREFIX.bin or PREFIX.idx."""
    path = path.expanduser()
    return path.with_suffix("") if path.suffix in (".bin", ".idx") else path


def _with_suffix(prefix: Path, suffix: str) -> Path:
    return prefix.with_name(prefix.name + suffix)


class MegatronTokens:
    """Sequences of tokens in two files, mapped into memory: opening reads the index, tokens come as they are asked."""

    def __init__(self, path: Path) -> None:
        self.prefix = prefix_of(path)
        index, tokens = (_with_suffix(self.prefix, suffix) for suffix in (".idx", ".bin"))
        for file in (index, tokens):
            if not file.is_file():
                raise UserError(f"{file}: no such file; a set of tokens is PREFIX.bin and PREFIX.idx")
        self.dtype, self.sequence_lengths, self.sequence_starts, self.document_bounds = _read_index(index)
        length = tokens.stat().st_size
        if length % self.dtype.itemsize:
            raise UserError(f"{tokens}: {length} bytes are not whole {self.dtype} tokens; truncated?")
        self.tokens: Tokens = np.memmap(tokens, self.dtype, "r") if length else np.zeros(0, self.dtype)
        """All of them, one after the other."""
        _validate(index, tokens, self)

    def __len__(self) -> int:
        """Sequences."""
        return len(self.sequence_lengths)

    def sequence(self, number: int) -> Tokens:
        start = self.sequence_starts[number]
        return self.tokens[start : start + self.sequence_lengths[number]]

    @property
    def contiguous(self) -> bool:
        """Whether sequences lie one after the other with nothing between: so every writer leaves them."""
        ends = np.cumsum(self.sequence_lengths, dtype=np.int64)
        return bool(
            (self.sequence_starts == ends - self.sequence_lengths).all()
            and (not len(ends) or ends[-1] == len(self.tokens))
        )


def _read_index(path: Path) -> tuple[np.dtype[Any], NDArray[np.int32], NDArray[np.int64], NDArray[np.int64]]:
    size = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(INDEX_HEADER.size)
    if head.startswith(LEGACY_MAGIC):
        raise UserError(f"{path}: an index of the kind before memory maps (TNTIDX); make the set anew from its text")
    if not head.startswith(INDEX_MAGIC):
        raise UserError(f"{path}: not an index of tokens (begins with {head[:9]!r}, not {INDEX_MAGIC!r})")
    if len(head) < INDEX_HEADER.size:
        raise UserError(f"{path}: {size} bytes are too few for an index; truncated?")
    _, version, code, count, entries = INDEX_HEADER.unpack(head)
    if version != 1:
        raise UserError(f"{path}: version {version} of the index; only 1 is known")
    if code not in TOKEN_DTYPES:
        known = ", ".join(f"{number} {name}" for number, name in TOKEN_DTYPES.items())
        raise UserError(f"{path}: dtype code {code}, which is no kind of token; known: {known}")
    expected = INDEX_HEADER.size + 12 * count + 8 * entries
    if size not in (expected, expected + count):  # one more byte each: modes of multimodal sets
        raise UserError(f"{path}: {size} bytes, but {count} sequences and {entries} document entries take {expected}")
    whole = np.memmap(path, np.uint8, "r")
    at = INDEX_HEADER.size
    sizes = whole[at : at + 4 * count].view("<i4")
    offsets = np.frombuffer(whole, "<i8", count, at + 4 * count)
    documents = np.frombuffer(whole, "<i8", entries, at + 12 * count)
    dtype = np.dtype(TOKEN_DTYPES[code]).newbyteorder("<")
    if (offsets % dtype.itemsize).any():
        raise UserError(f"{path}: offsets that are not multiples of {dtype.itemsize}, the bytes of a token")
    return dtype, sizes, offsets // dtype.itemsize, documents


def _validate(index: Path, tokens: Path, found: MegatronTokens) -> None:
    if not len(found.sequence_lengths):
        if found.document_bounds.any():
            raise UserError(f"{index}: documents with sequences, but no sequences")
        return
    ends = found.sequence_starts + found.sequence_lengths
    # `ends` may be beyond 64 bits, and then negative.
    wrong = (found.sequence_lengths < 0) | (found.sequence_starts < 0) | (ends > len(found.tokens)) | (ends < 0)
    if wrong.any():
        number = int(wrong.argmax())
        raise UserError(
            f"{tokens}: {len(found.tokens)} tokens, but sequence {number} is said to be {found.sequence_starts[number]} to "
            f"{ends[number]}; truncated, or not of this index"
        )
    documents = found.document_bounds
    rising = (np.diff(documents) >= 0).all() if len(documents) else False
    if not rising or documents[0] != 0 or documents[-1] != len(found.sequence_lengths):
        raise UserError(
            f"{index}: document entries do not rise from 0 to {len(found.sequence_lengths)}, the number of sequences"
        )


class MegatronTokensWriter:
    """Writes both files under other names and gives them their own when all is there, the index last.

    Nothing is kept in memory: sizes and document entries wait in files of their own until their number is known.
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
        """Sequences one after the other, how long each is, and how many sequences each document has."""
        assert tokens.dtype == self.dtype
        self.files[".bin"].write(tokens.tobytes())
        self.files[".sizes"].write(sequence_lengths.astype("<i4").tobytes())
        self._add_documents(self.num_sequences + np.cumsum(sequences_per_document, dtype=np.int64))
        self.num_sequences += len(sequence_lengths)

    def _add_documents(self, entries: NDArray[np.int64]) -> None:
        self.files[".documents"].write(entries.astype("<i8").tobytes())
        self.num_document_entries += len(entries)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        try:
            if kind is None:
                self._commit()
        finally:
            for suffix, file in self.files.items():
                file.close()
                self.temporary_paths[suffix].unlink(missing_ok=True)

    def _commit(self) -> None:
        index, sizes, documents = (self.files[suffix] for suffix in (".idx", ".sizes", ".documents"))
        index.write(INDEX_HEADER.pack(INDEX_MAGIC, 1, self.dtype_code, self.num_sequences, self.num_document_entries))
        sizes.seek(0)
        shutil.copyfileobj(sizes, index)
        sizes.seek(0)
        before = 0
        while block := sizes.read(COPY_BYTES):
            ends = before + np.cumsum(np.frombuffer(block, "<i4"), dtype=np.int64)
            index.write(((ends - np.frombuffer(block, "<i4")) * self.dtype.itemsize).astype("<i8").tobytes())
            before = int(ends[-1])
        documents.seek(0)
        shutil.copyfileobj(documents, index)
        for suffix in (".bin", ".idx"):
            self.files[suffix].flush()
            os.fsync(self.files[suffix].fileno())
        # An old index must not stand beside new tokens.
        _with_suffix(self.prefix, ".idx").unlink(missing_ok=True)
        for suffix in (".bin", ".idx"):
            os.replace(self.temporary_paths[suffix], _with_suffix(self.prefix, suffix))
        fsync_directory(self.prefix.parent)
