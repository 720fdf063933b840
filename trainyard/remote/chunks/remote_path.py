"""Paths of remote objects, with the part of pathlib's interface that readers of data files use."""

import io
from collections.abc import Iterator
from functools import total_ordering
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from trainyard.core.errors import UserError
from trainyard.remote.chunks.cached_file import LARGE_CHUNK_BYTES, SMALL_CHUNK_BYTES, CachedFile
from trainyard.remote.chunks.chunk_cache import ChunkCache
from trainyard.remote.chunks.object_reader import ObjectReader, root_of
from trainyard.remote.object_store import StoredObject, has_glob


class RemoteFiles:
    """The objects that one run reads, each in the version that it had when it was first looked at."""

    def __init__(self, cache: ChunkCache) -> None:
        self.cache = cache
        self.chunk_bytes = LARGE_CHUNK_BYTES
        self.readers: dict[str, ObjectReader] = {}
        self.objects: dict[str, StoredObject | None] = {}
        self.listings: dict[str, list[str]] = {}
        self.files: dict[str, CachedFile] = {}

    def reader(self, url: str) -> ObjectReader:
        root = root_of(url)
        if root not in self.readers:
            self.readers[root] = ObjectReader(url)
        return self.readers[root]

    def stored(self, url: str) -> StoredObject | None:
        """The object of a URL; None if there is none."""
        if url not in self.objects:
            self.objects[url] = self.reader(url).find(url)
        return self.objects[url]

    def match(self, pattern: str) -> list["RemotePath"]:
        """The object of this URL, a prefix of objects (a directory), or all objects that match a glob, sorted."""
        if has_glob(pattern) and not self.reader(pattern).store.is_http:
            return [RemotePath(self, url) for url in self._list(pattern)]
        path = RemotePath(self, pattern)
        return [path] if path.is_file() or path.is_dir() else []

    def list_below(self, url: str) -> list["RemotePath"]:
        return [RemotePath(self, found) for found in self._list(url)]

    def _list(self, pattern: str) -> list[str]:
        if pattern not in self.listings:
            found = self.reader(pattern).match(pattern)
            for stored in found:
                self.objects.setdefault(stored.url, stored)
            self.listings[pattern] = [stored.url for stored in found]
        return self.listings[pattern]

    def file(self, url: str) -> CachedFile:
        if url not in self.files:
            stored = self.stored(url)
            if stored is None:
                raise UserError(f"{url}: no such object")
            self.files[url] = CachedFile(self.reader(url), stored, self.cache, self.chunk_bytes)
        return self.files[url]

    def set_chunk_size(self, total_bytes: int) -> None:
        """Choose the size of chunks for objects of this size in all."""
        fits = total_bytes <= self.cache.max_bytes
        self.chunk_bytes = LARGE_CHUNK_BYTES if fits else min(SMALL_CHUNK_BYTES, self.cache.max_bytes // 16)
        self.files.clear()


class ObjectStat(NamedTuple):
    st_size: int


@total_ordering
class RemotePath:
    def __init__(self, files: RemoteFiles, url: str) -> None:
        self.files, self.url = files, url.rstrip("/")
        self.pure = PurePosixPath(self.url.partition("://")[2])

    def __str__(self) -> str:
        return self.url

    def __repr__(self) -> str:
        return f"RemotePath({self.url!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RemotePath) and self.url == other.url

    def __lt__(self, other: "RemotePath") -> bool:
        return self.url < other.url

    def __hash__(self) -> int:
        return hash(self.url)

    def __truediv__(self, name: str) -> "RemotePath":
        return RemotePath(self.files, f"{self.url}/{name}")

    @property
    def name(self) -> str:
        return self.pure.name

    @property
    def stem(self) -> str:
        return self.pure.stem

    @property
    def suffix(self) -> str:
        return self.pure.suffix

    @property
    def parent(self) -> "RemotePath":
        return RemotePath(self.files, self.url.rpartition("/")[0])

    def with_name(self, name: str) -> "RemotePath":
        return self.parent / name

    def with_suffix(self, suffix: str) -> "RemotePath":
        return self.with_name(self.stem + suffix)

    def expanduser(self) -> "RemotePath":
        return self

    def is_file(self) -> bool:
        return self.files.stored(self.url) is not None

    def is_dir(self) -> bool:
        """True if there are objects below this name, or, without listings (HTTP), the files of a saved dataset."""
        if self.files.reader(self.url).store.is_http:
            return (self / "state.json").is_file()
        return not self.is_file() and bool(self.files.list_below(self.url))

    def stat(self) -> ObjectStat:
        return ObjectStat(self.source().size)

    def glob(self, pattern: str) -> Iterator["RemotePath"]:
        return iter(self.files.match(f"{self.url}/{pattern}"))

    def open(self, mode: str = "rb") -> io.BufferedReader:
        assert mode == "rb"
        return self.source().open()

    def read_bytes(self) -> bytes:
        return self.source().read(0, self.source().size).tobytes()

    def source(self) -> CachedFile:
        return self.files.file(self.url)


DataPath = Path | RemotePath
