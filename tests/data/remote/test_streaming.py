"""Samples from a store equal those of local files, bit for bit and in order, whatever the store and the cache do."""

import sys
import threading
from pathlib import Path
from types import FrameType

import pytest

from tests.data.remote.stored_data import FORMATS, assert_same, cache_bytes, make_config, moved, read_batches, upload
from tests.support.store_proxy import StoreProxy

MIB = 1 << 20
GIB_OF_40_KB = 0.04
"""With the unit of the tests (1 MiB): less than any of the data sets."""


@pytest.mark.parametrize(
    ("name", "fits"),
    [
        pytest.param(
            name,
            fits,
            id=f"{name}-{'fits' if fits else 'evicts'}",
            marks=[pytest.mark.nightly] if (name, fits) == ("blend", False) else [],
        )
        for name in FORMATS
        for fits in (True, False)
    ],
)
def test_batches_equal_those_of_local_files(proxy: StoreProxy, tmp_path: Path, url: str, name: str, fits: bool) -> None:
    (tmp_path / "data").mkdir()
    local = FORMATS[name](tmp_path / "data")
    upload(tmp_path / "data", url)
    expected = list(read_batches(make_config(local)))
    cache = tmp_path / "cache"
    remote = make_config(moved(local, tmp_path / "data", url, cache, gib=64 if fits else GIB_OF_40_KB))
    batches = []
    for batch in read_batches(remote):
        batches.append(batch)
        assert fits or cache_bytes(cache) <= GIB_OF_40_KB * MIB
    assert_same(batches, expected)
    assert_same(list(read_batches(remote, 5)), expected[5:])  # resumed in the middle
    if fits:
        assert max(proxy.reads.values()) == 1, proxy.reads.most_common(3)


def test_local_files_leave_the_code_of_urls_at_the_first_question(tmp_path: Path) -> None:
    called: set[str] = set()

    def note(frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and "/trainyard/remote/" in frame.f_code.co_filename:
            called.add(frame.f_code.co_name)

    config = make_config(FORMATS["tokens"](tmp_path))
    threading.setprofile(note)
    sys.setprofile(note)
    try:
        batches = list(read_batches(config))
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    assert batches
    assert called - {"<genexpr>"} == {"has_urls", "is_url"}
