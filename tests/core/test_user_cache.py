"""Every cache of a user is below one directory, whatever XDG_CACHE_HOME says."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from trainyard.core.user_cache import user_cache
from trainyard.data.loading import data_files
from trainyard.devices.neuron.device import neff_cache_dir
from trainyard.remote import local_copies
from trainyard.train.compile import inductor_cache

CACHES: list[Callable[[], Path]] = [
    neff_cache_dir,
    inductor_cache.cache_root,
    local_copies.cache_root,
    data_files.default_directory,
]


@pytest.mark.parametrize("cache", CACHES, ids=lambda cache: f"{cache.__module__}.{cache.__name__}")
@pytest.mark.parametrize("value", ["", "relative", "{home}/xdg", None])
def test_caches_follow_xdg(
    cache: Callable[[], Path], value: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An empty or relative value is not a place, says the specification."""
    for name in (inductor_cache.CACHE_VARIABLE, local_copies.DIRECTORY_VARIABLE, "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    if value is not None:
        monkeypatch.setenv("XDG_CACHE_HOME", value.format(home=tmp_path))
    expected = tmp_path / ("xdg" if value and value.endswith("/xdg") else ".cache") / "trainyard"
    assert cache().is_relative_to(expected)


def test_user_without_a_home_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # as for a user id that the system does not know
    assert user_cache("data").is_absolute()
