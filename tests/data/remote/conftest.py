"""A store on the loopback, and chunks so small that test data has many."""

from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest

from tests.support.s3_server import s3_server
from tests.support.store_proxy import StoreProxy, store_proxy
from trainyard.data.loading import data_files
from trainyard.remote.chunks import cached_file, chunk_cache, remote_path

LARGE, SMALL = 4096, 1024


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with s3_server() as url:
        yield url


@pytest.fixture(scope="module")
def module_proxy(server: str) -> Iterator[StoreProxy]:
    with store_proxy(server) as proxy:
        yield proxy


@pytest.fixture
def proxy(module_proxy: StoreProxy, monkeypatch: pytest.MonkeyPatch) -> StoreProxy:
    """The store behind a proxy, which fsspec is configured to use."""
    settings = {"endpoint_url": module_proxy.url, "key": "fake", "secret": "fake"}
    monkeypatch.setitem(fsspec.config.conf, "s3", settings)
    module_proxy.reset()
    return module_proxy


@pytest.fixture(autouse=True)
def _small_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (cached_file, remote_path):
        monkeypatch.setattr(module, "LARGE_CHUNK_BYTES", LARGE)
        monkeypatch.setattr(module, "SMALL_CHUNK_BYTES", SMALL)
    monkeypatch.setattr(data_files, "GIB", 1 << 20)
    monkeypatch.setattr(chunk_cache, "GIB", 1 << 20)
    data_files._remote_files.clear()


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"s3://yard/{tmp_path.name}"
