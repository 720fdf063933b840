"""A file at a source: its size, its version, its checksum, and how to read ranges of it."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

from trainyard.remote.sources.retry import with_retries

HASH_BLOCK_BYTES = 2**22


class SourceChanged(Exception):
    """The file at the source is not the one whose transfer began."""


class Checksum(NamedTuple):
    algorithm: str
    """sha256, sha1 or md5 of the content; git: the id of a blob in git."""
    digest: str
    """Hexadecimal."""

    def matches(self, path: Path) -> bool:
        return self.compute(path) == self.digest.lower()

    def compute(self, path: Path) -> str:
        digest = hashlib.new("sha1" if self.algorithm == "git" else self.algorithm)
        if self.algorithm == "git":
            digest.update(b"blob %d\0" % path.stat().st_size)
        with path.open("rb") as file:
            while block := file.read(HASH_BLOCK_BYTES):
                digest.update(block)
        return digest.hexdigest()


class RangeReader(Protocol):
    def read(self, start: int, stop: int | None) -> Iterator[bytes]:
        """Yield the bytes from `start` to `stop` (None: the end) in blocks. Raises TransferError or SourceChanged. A
        connection that ends early may also just yield fewer bytes."""

    def checksum(self) -> Checksum | None:
        """The checksum that the source has of the file, if it has one."""


@dataclass(frozen=True)
class RemoteFile:
    name: str
    """Relative path of the local copy."""
    label: str
    """What messages call the file, without credentials."""
    size: int | None
    """Bytes; None if the source does not tell."""
    version: str | None
    """Changes if the content changes (ETag, commit, modification time); None: unknown, so nothing can be resumed."""
    reader: RangeReader
    has_ranges: bool = True
    """False if the source sends files only from the start."""

    def content(self) -> bytes:
        """All bytes: of a small file that is read before others are chosen."""
        return with_retries(lambda: b"".join(self.reader.read(0, self.size)))

    @property
    def resumable(self) -> bool:
        return self.has_ranges and self.version is not None and self.size is not None
