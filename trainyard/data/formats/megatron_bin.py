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

from trainyard.core.atomic_files import sync_directory
from trainyard.core.errors import UserError

MAGIC = b"MMIDIDX\x00\x00"
OLD_MAGIC = b"TNTIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")
DTYPES: dict[int, str] = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}
"""By code. 6 and 7 are floating-point numbers, whose sizes differ between versions: no tokens."""
CODES = {name: code for code, name in DTYPES.items()}
SMALL_VOCAB = 65500
"""Below it tokens are uint16, as the reference does it."""

PARTS = (".bin", ".idx", ".sizes", ".documents")
BLOCK = 4 << 20
"""Bytes of sizes turned into offsets at a time."""

Tokens = NDArray[Any]


def best_dtype(vocab: int) -> str:
    return "uint16" if vocab < SMALL_VOCAB else "int32"


def prefix_of(path: Path) -> Path:
    """PREFIX of PREFIX, PREFIX.bin or PREFIX.idx."""
    path = path.expanduser()
    return path.with_suffix("") if path.suffix in (".bin", ".idx") else path


def _named(prefix: Path, suffix: str) -> Path:
    return prefix.with_name(prefix.name + suffix)


class Indexed:
    """Sequences of tokens in two files, mapped into memory: opening reads the index, tokens come as they are asked."""

    def __init__(self, path: Path) -> None:
        self.prefix = prefix_of(path)
        index, tokens = (_named(self.prefix, suffix) for suffix in (".idx", ".bin"))
        for file in (index, tokens):
            if not file.is_file():
                raise UserError(f"{file}: no such file; a set of tokens is PREFIX.bin and PREFIX.idx")
        self.dtype, self.sizes, self.starts, self.documents = _read_index(index)
        length = tokens.stat().st_size
        if length % self.dtype.itemsize:
            raise UserError(f"{tokens}: {length} bytes are not whole {self.dtype} tokens; truncated?")
        self.tokens: Tokens = np.memmap(tokens, self.dtype, "r") if length else np.zeros(0, self.dtype)
        """All of them, one after the other."""
        _check(index, tokens, self)

    def __len__(self) -> int:
        """Sequences."""
        return len(self.sizes)

    def sequence(self, number: int) -> Tokens:
        start = self.starts[number]
        return self.tokens[start : start + self.sizes[number]]

    @property
    def contiguous(self) -> bool:
        """Whether sequences lie one after the other with nothing between: so every writer leaves them."""
        ends = np.cumsum(self.sizes, dtype=np.int64)
        return bool((self.starts == ends - self.sizes).all() and (not len(ends) or ends[-1] == len(self.tokens)))


def _read_index(path: Path) -> tuple[np.dtype[Any], NDArray[np.int32], NDArray[np.int64], NDArray[np.int64]]:
    size = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(HEADER.size)
    if head.startswith(OLD_MAGIC):
        raise UserError(f"{path}: an index of the kind before memory maps (TNTIDX); make the set anew from its text")
    if not head.startswith(MAGIC):
        raise UserError(f"{path}: not an index of tokens (begins with {head[:9]!r}, not {MAGIC!r})")
    if len(head) < HEADER.size:
        raise UserError(f"{path}: {size} bytes are too few for an index; truncated?")
    _, version, code, count, entries = HEADER.unpack(head)
    if version != 1:
        raise UserError(f"{path}: version {version} of the index; only 1 is known")
    if code not in DTYPES:
        known = ", ".join(f"{number} {name}" for number, name in DTYPES.items())
        raise UserError(f"{path}: dtype code {code}, which is no kind of token; known: {known}")
    expected = HEADER.size + 12 * count + 8 * entries
    if size not in (expected, expected + count):  # one more byte each: modes of multimodal sets
        raise UserError(f"{path}: {size} bytes, but {count} sequences and {entries} document entries take {expected}")
    whole = np.memmap(path, np.uint8, "r")
    at = HEADER.size
    sizes = whole[at : at + 4 * count].view("<i4")
    offsets = np.frombuffer(whole, "<i8", count, at + 4 * count)
    documents = np.frombuffer(whole, "<i8", entries, at + 12 * count)
    dtype = np.dtype(DTYPES[code]).newbyteorder("<")
    if (offsets % dtype.itemsize).any():
        raise UserError(f"{path}: offsets that are not multiples of {dtype.itemsize}, the bytes of a token")
    return dtype, sizes, offsets // dtype.itemsize, documents


def _check(index: Path, tokens: Path, found: Indexed) -> None:
    if not len(found.sizes):
        if found.documents.any():
            raise UserError(f"{index}: documents with sequences, but no sequences")
        return
    ends = found.starts + found.sizes
    # `ends` may be beyond 64 bits, and then negative.
    wrong = (found.sizes < 0) | (found.starts < 0) | (ends > len(found.tokens)) | (ends < 0)
    if wrong.any():
        number = int(wrong.argmax())
        raise UserError(
            f"{tokens}: {len(found.tokens)} tokens, but sequence {number} is said to be {found.starts[number]} to "
            f"{ends[number]}; truncated, or not of this index"
        )
    documents = found.documents
    rising = (np.diff(documents) >= 0).all() if len(documents) else False
    if not rising or documents[0] != 0 or documents[-1] != len(found.sizes):
        raise UserError(f"{index}: document entries do not rise from 0 to {len(found.sizes)}, the number of sequences")


class Writer:
    """Writes both files under other names and gives them their own when all is there, the index last.

    Nothing is kept in memory: sizes and document entries wait in files of their own until their number is known.
    """

    def __init__(self, prefix: Path, dtype: str) -> None:
        self.prefix, self.dtype = prefix, np.dtype(dtype).newbyteorder("<")
        self.code = CODES[dtype]
        self.sequences = self.entries = 0
        self.parts = {suffix: prefix.with_name(f".{prefix.name}{suffix}.part") for suffix in PARTS}
        self.files: dict[str, BinaryIO] = {suffix: path.open("w+b") for suffix, path in self.parts.items()}
        self._add_documents(np.zeros(1, np.int64))

    def add(self, tokens: Tokens, sizes: NDArray[np.int32], documents: NDArray[np.int64]) -> None:
        """Sequences one after the other, how long each is, and how many sequences each document has."""
        assert tokens.dtype == self.dtype
        self.files[".bin"].write(tokens.tobytes())
        self.files[".sizes"].write(sizes.astype("<i4").tobytes())
        self._add_documents(self.sequences + np.cumsum(documents, dtype=np.int64))
        self.sequences += len(sizes)

    def _add_documents(self, entries: NDArray[np.int64]) -> None:
        self.files[".documents"].write(entries.astype("<i8").tobytes())
        self.entries += len(entries)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        try:
            if kind is None:
                self._finish()
        finally:
            for suffix, file in self.files.items():
                file.close()
                self.parts[suffix].unlink(missing_ok=True)

    def _finish(self) -> None:
        index, sizes, documents = (self.files[suffix] for suffix in (".idx", ".sizes", ".documents"))
        index.write(HEADER.pack(MAGIC, 1, self.code, self.sequences, self.entries))
        sizes.seek(0)
        shutil.copyfileobj(sizes, index)
        sizes.seek(0)
        before = 0
        while block := sizes.read(BLOCK):
            ends = before + np.cumsum(np.frombuffer(block, "<i4"), dtype=np.int64)
            index.write(((ends - np.frombuffer(block, "<i4")) * self.dtype.itemsize).astype("<i8").tobytes())
            before = int(ends[-1])
        documents.seek(0)
        shutil.copyfileobj(documents, index)
        for suffix in (".bin", ".idx"):
            self.files[suffix].flush()
            os.fsync(self.files[suffix].fileno())
        # An old index must not stand beside new tokens.
        _named(self.prefix, ".idx").unlink(missing_ok=True)
        for suffix in (".bin", ".idx"):
            os.replace(self.parts[suffix], _named(self.prefix, suffix))
        sync_directory(self.prefix.parent)
