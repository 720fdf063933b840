"""Stores that fail, objects that change, processes that are killed, disks that are full: no sample ever changes."""

import errno
import json
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections import namedtuple
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch

from tests.data.remote.stored_data import (
    FORMATS,
    STEPS,
    assert_same,
    cache_bytes,
    environment,
    make_config,
    moved,
    read_batches,
    upload,
    write_tokens,
)
from tests.support.store_proxy import StoreProxy
from trainyard.config.load import parse
from trainyard.core.errors import RunStopped, UserError
from trainyard.data.loading.build import build_datasets
from trainyard.data.loading.fingerprint import fingerprint_files
from trainyard.remote.chunks import chunk_cache, object_reader
from trainyard.remote.chunks.chunk_cache import Chunk, open_cache
from trainyard.remote.sources import retry

ROOT = Path(__file__).parents[3]


@pytest.fixture
def local(tmp_path: Path) -> dict[str, Any]:
    (tmp_path / "data").mkdir()
    return FORMATS["tokens"](tmp_path / "data")


@pytest.fixture
def remote(local: dict[str, Any], tmp_path: Path, url: str) -> dict[str, Any]:
    upload(tmp_path / "data", url)
    return moved(local, tmp_path / "data", url, tmp_path / "cache")


@pytest.mark.parametrize("name", ["tokens", pytest.param("arrow", marks=pytest.mark.nightly), "hdf5"])
def test_failing_store_only_delays(
    proxy: StoreProxy, tmp_path: Path, url: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Most requests fail, in every way that a request can."""
    monkeypatch.setattr(retry, "FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr(retry, "MAX_PAUSE_S", 0.02)
    (tmp_path / "data").mkdir()
    data = FORMATS[name](tmp_path / "data")
    upload(tmp_path / "data", url)
    kinds = ["500", "503", "cut", "half", None, None] * 100
    random.Random(0).shuffle(kinds)
    expected = list(read_batches(make_config(data)))
    proxy.reset()
    proxy.fault = lambda method, path, number: kinds[number % len(kinds)]
    remote = moved(data, tmp_path / "data", url, tmp_path / "cache")
    assert_same(list(read_batches(make_config(remote))), expected)
    assert {"500", "503", "cut", "half"} <= set(kinds[: proxy.num_requests])


def test_store_that_does_not_recover_stops_the_run_with_the_name_of_the_object(
    proxy: StoreProxy, remote: dict[str, Any], url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(object_reader, "READ_LIMIT_S", 1.0)
    batches = read_batches(make_config(remote))
    next(batches)
    time.sleep(0.2)
    proxy.fault = lambda method, path, number: "503"
    failing_since = time.monotonic()
    with pytest.raises(RunStopped, match=rf"^{url}/a\.bin: the store has not answered for \d+ s: .*$"):
        list(batches)
    assert time.monotonic() - failing_since < 20


@pytest.mark.parametrize("fault", ["503", pytest.param("cut", marks=pytest.mark.nightly)])
def test_unreachable_store_is_reported_before_the_first_step(
    proxy: StoreProxy, remote: dict[str, Any], fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(object_reader, "LIST_LIMIT_S", 0.5)
    proxy.fault = lambda method, path, number: fault
    with pytest.raises(UserError, match=r"^s3://yard/.*: the store has not answered"):
        build_datasets(make_config(remote))


def test_object_that_changes_during_a_run_is_an_error(
    proxy: StoreProxy, remote: dict[str, Any], tmp_path: Path, url: str
) -> None:
    """The new version has the same size; none of its bytes is used."""
    remote["cache"]["gib"] = 0.04  # so that chunks are read again
    expected = list(read_batches(make_config({**remote})))
    batches = read_batches(make_config({**remote}))
    found = [next(batches)]
    write_tokens(tmp_path / "data" / "a", 0)
    content = bytearray((tmp_path / "data" / "a.bin").read_bytes())
    content[:] = bytes(len(content))
    (tmp_path / "data" / "a.bin").write_bytes(content)
    upload(tmp_path / "data", url)
    with pytest.raises(UserError, match=rf"^{url}/a\.bin: changed since the run began"):
        found.extend(batches)
    assert_same(found, expected[: len(found)])


def test_object_that_changed_between_runs_is_read_again_and_has_another_fingerprint(
    proxy: StoreProxy, remote: dict[str, Any], tmp_path: Path, url: str
) -> None:
    config = make_config(remote)
    old = list(read_batches(config))
    old_fingerprints = fingerprint_files(config.data)
    write_tokens(tmp_path / "data" / "a", 5)
    upload(tmp_path / "data", url)
    new = list(read_batches(config))
    assert not torch.equal(old[0]["tokens"], new[0]["tokens"])
    assert_same(new, list(read_batches(make_config({**remote, "paths": [str(tmp_path / "data" / "a")]}))))
    new_fingerprints = fingerprint_files(config.data)
    assert old_fingerprints.keys() == new_fingerprints.keys() == {f"{url}/a.bin", f"{url}/a.idx"}
    assert old_fingerprints != new_fingerprints


READ_ALL = """
import sys, json
from tests.data.remote.stored_data import make_config, read_batches
from trainyard.data.loading import data_files
from trainyard.remote.chunks import cached_file, remote_path
for module in (cached_file, remote_path):
    module.LARGE_CHUNK_BYTES, module.SMALL_CHUNK_BYTES = 4096, 1024
data_files.GIB = 1 << 20
import torch
data, rank = json.loads(sys.argv[1]), int(sys.argv[2])
batches = list(read_batches(make_config(data), samples=slice(rank * 4, rank * 4 + 4)))
torch.save(batches, sys.argv[3])
"""


def start_reader(data: dict[str, Any], rank: int, out: Path, endpoint: str) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-c", READ_ALL, json.dumps(data), str(rank), str(out)]
    return subprocess.Popen(command, env=environment(endpoint), cwd=ROOT)


@pytest.mark.parametrize("fits", [True, pytest.param(False, marks=pytest.mark.nightly)], ids=["fits", "evicts"])
def test_two_ranks_share_a_cache(proxy: StoreProxy, remote: dict[str, Any], tmp_path: Path, fits: bool) -> None:
    """Each chunk is downloaded once, unless it was evicted."""
    remote["cache"]["gib"] = 64 if fits else 0.04
    ranks = [start_reader(remote, rank, tmp_path / f"{rank}.pt", proxy.url) for rank in range(2)]
    assert [rank.wait(300) for rank in ranks] == [0, 0]
    assert (max(proxy.reads.values()) == 1) == fits, proxy.reads.most_common(3)
    assert fits or cache_bytes(tmp_path / "cache") <= 0.04 * 2**20
    expected = list(read_batches(make_config({**remote, "paths": [str(tmp_path / "data" / "a")]})))
    shares = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    joined = [{name: torch.cat([one[name], other[name]]) for name in one} for one, other in zip(*shares, strict=True)]
    assert_same(joined[:STEPS], expected[:STEPS])


def test_killed_process_leaves_complete_chunks_only(proxy: StoreProxy, remote: dict[str, Any], tmp_path: Path) -> None:
    """The process that starts again reads what is missing, and nothing twice."""
    reached = threading.Event()

    def fault(method: str, path: str, number: int) -> str | None:
        if len(proxy.reads) >= 8:
            reached.set()
            return "hang"
        return None

    proxy.fault = fault
    process = start_reader(remote, 0, tmp_path / "0.pt", proxy.url)
    assert reached.wait(300)
    process.send_signal(signal.SIGKILL)
    process.wait()
    before = {file.name for file in (tmp_path / "cache").glob("??/*") if not file.name.startswith(".")}
    assert before
    proxy.fault = lambda method, path, number: None
    time.sleep(1.2)  # answers to the killed process end
    complete = dict(proxy.reads)
    proxy.reads.clear()
    expected = list(read_batches(make_config({**remote, "paths": [str(tmp_path / "data" / "a")]})))
    assert_same(list(read_batches(make_config(remote))), expected)
    after = {file.name for file in (tmp_path / "cache").glob("??/*") if not file.name.startswith(".")}
    assert before < after
    assert max(proxy.reads.values()) == 1
    assert sum(proxy.reads.values()) <= len(after) + 2 - len(before)  # the index, one chunk, is read by two ranges
    assert complete


def test_damaged_chunk_is_read_again(proxy: StoreProxy, remote: dict[str, Any], tmp_path: Path) -> None:
    config = make_config(remote)
    expected = list(read_batches(config))
    chunks = sorted((tmp_path / "cache").glob("??/*"))
    for number, file in enumerate(chunks):
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes([content, content[:-9], b""][number % 3])
    proxy.reads.clear()
    assert_same(list(read_batches(config)), expected)
    assert sum(proxy.reads.values()) >= len(chunks)


@pytest.mark.parametrize("after", [0, 5])
def test_full_disk_is_one_line(
    proxy: StoreProxy, remote: dict[str, Any], tmp_path: Path, after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a full disk, old chunks are evicted to make room."""
    expected = list(read_batches(make_config({**remote, "paths": [str(tmp_path / "data" / "a")]})))
    write = chunk_cache.ChunkCache._write
    cache = tmp_path / "cache"

    def full_disk(self: Any, path: Path, data: memoryview) -> Any:
        if len(list(cache.glob("??/*"))) >= after:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(self, path, data)

    monkeypatch.setattr(chunk_cache.ChunkCache, "_write", full_disk)
    if after:
        assert_same(list(read_batches(make_config(remote))), expected)
    else:
        with pytest.raises(UserError, match=rf"^data\.cache\.directory={cache}: the disk is full; .*$"):
            list(read_batches(make_config(remote)))


def test_disk_without_space_for_others_counts_as_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(chunk_cache.shutil, "disk_usage", lambda path: usage(10**6, 10**6 - 9_000, 9_000))
    cache = open_cache(tmp_path / "cache", 1 << 20)
    with pytest.raises(UserError, match="the disk is full"):
        cache.get(Chunk("a", 100, lambda: bytes(100)))


def forbid(proxy: StoreProxy) -> None:
    proxy.fault = lambda method, path, number: "403"


MISTAKES = {
    "missing object": ("tokens", "s3://yard/nothing/a", "no such token files"),
    "missing bucket": ("tokens", "s3://no-such-bucket/a", "no such token files"),
    "empty prefix": ("arrow", "s3://yard/nothing", "no such object, nor any below that name"),
    "no match": ("hdf5", "s3://yard/nothing/*.hdf5", "no such object, nor any below that name"),
    "unknown protocol": ("tokens", "s4://yard/a", "Protocol not known: s4"),
    "no server": ("tokens", "http://127.0.0.1:9/a", "the store has not answered"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_one_line_with_the_url(
    proxy: StoreProxy, tmp_path: Path, mistake: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(object_reader, "LIST_LIMIT_S", 0.3)
    source, path, message = MISTAKES[mistake]
    data = {"source": source, "paths": [path], "cache": {"directory": str(tmp_path / "cache")}}
    with pytest.raises(UserError, match=re.escape(message)) as caught:
        build_datasets(make_config(data))
    assert path in str(caught.value)
    assert "\n" not in str(caught.value)


def test_no_access_is_one_line_with_the_url(proxy: StoreProxy, remote: dict[str, Any]) -> None:
    forbid(proxy)
    with pytest.raises(UserError, match=r"^s3://yard/.*/a\.idx: no access with the credentials") as caught:
        build_datasets(make_config(remote))
    assert "fake" not in str(caught.value)


def test_missing_credentials_are_one_line(
    server: str, remote: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(fsspec.config.conf, "s3", {"endpoint_url": server})
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    with pytest.raises(UserError, match=r"^s3://yard/.*: no access .*credentials"):
        build_datasets(make_config(remote))


def test_missing_package_names_the_extra(remote: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any, **keys: Any) -> None:
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr(fsspec.core, "url_to_fs", fail)
    with pytest.raises(UserError, match=r"pip install 'trainyard\[s3\]'$"):
        build_datasets(make_config(remote))


@pytest.mark.parametrize("path", ["https://me:secret@host/a", "https://host/a?X-Amz-Signature=secret"])
def test_secrets_in_urls_are_refused(path: str) -> None:
    config = make_config({"source": "synthetic"}).model_dump(mode="json")
    config["data"]["source"], config["data"]["paths"] = "tokens", [path]
    with pytest.raises(UserError, match=r"data\.paths: contains a password") as caught:
        parse(config)
    assert "secret" not in str(caught.value)
