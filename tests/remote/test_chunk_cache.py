"""Eviction from the cache, and arrays that stay readable after it."""

import os
from pathlib import Path

import fsspec
import numpy as np
import pytest

from trainyard.core.errors import UserError
from trainyard.remote.chunks.cached_file import CachedFile
from trainyard.remote.chunks.chunk_cache import Chunk, ChunkCache, open_cache
from trainyard.remote.chunks.chunk_reader import ChunkReader
from trainyard.remote.chunks.object_reader import ObjectReader


@pytest.fixture
def cache(tmp_path: Path) -> ChunkCache:
    return open_cache(tmp_path / "cache", 10_000)


def chunk(number: int, size: int = 996) -> Chunk:
    return Chunk(str(number), size, lambda: bytes([number]) * size)


def test_least_recently_used_chunks_are_evicted_and_stay_readable(cache: ChunkCache) -> None:
    contents = {number: cache.get(chunk(number)) for number in range(10)}
    for number in range(10):
        os.utime(cache.path(chunk(number).name), (number, number))
    cache.get(chunk(0))  # now the most recent
    cache.get(chunk(10))
    assert {number for number in range(11) if cache.contains(chunk(number))} == {*range(11)} - {1}
    assert all((content == number).all() for number, content in contents.items())


def test_temporary_files_of_killed_processes_are_counted_and_evicted_first(cache: ChunkCache) -> None:
    for number in range(9):
        cache.get(chunk(number))
    leftover = cache.path(chunk(0).name).with_name(".killed.part")
    leftover.write_bytes(bytes(1000))
    cache.usage_path.unlink()
    cache.get(chunk(9))
    assert not leftover.exists()


def test_reader_drops_chunks_that_others_evicted(cache: ChunkCache) -> None:
    reader = ChunkReader(cache, 1000, 8, chunk)
    reader.get([1, 2])
    cache.path(chunk(1).name).unlink()
    reader.touched_at = 0.0
    reader.get([2])
    assert set(reader.mapped) == {2}


def test_chunk_larger_than_the_cache_is_refused(cache: ChunkCache) -> None:
    with pytest.raises(UserError, match=r"^data\.cache\.gib=.*: too small to hold"):
        cache.get(chunk(1, 20_000))


def test_directory_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=rf"^data\.cache\.directory={tmp_path}/file/cache: Not a directory"):
        open_cache(tmp_path / "file" / "cache", 1)


def test_whole_file_is_one_array_until_a_chunk_is_evicted(cache: ChunkCache, tmp_path: Path) -> None:
    url = f"memory://{tmp_path.name}/x"
    content = np.random.RandomState(0).bytes(9000)
    fsspec.filesystem("memory").pipe_file(f"/{tmp_path.name}/x", content)
    cache.max_bytes = 1 << 20
    store = ObjectReader(url)
    stored = store.find(url)
    assert stored is not None
    file = CachedFile(store, stored, cache, 4096)
    assert file.content() is None
    assert file.read(4000, 9000).tobytes() == content[4000:]
    joined = file.content()
    assert joined is not None
    assert joined.tobytes() == content
    for path in cache.directory.glob("??/*"):
        path.unlink()
    file.reader.touched_at = 0.0
    file.content()
    assert file.content() is None
    assert joined.tobytes() == content  # whoever has the array keeps it
    assert file.read(0, 9000).tobytes() == content
    fsspec.filesystem("memory").store.clear()
