"""Runs that resume on data in a store, or move to one; what a process fetches before it needs it; other protocols."""

import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fsspec
import numpy as np
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from tests.data.remote.conftest import LARGE
from tests.data.remote.stored_data import (
    FORMATS,
    SEQ_LEN,
    STEPS,
    assert_same,
    make_config,
    moved,
    read_batches,
    upload,
    write_tokens,
)
from tests.support.logs import captured_log
from tests.support.store_proxy import StoreProxy
from trainyard import Trainer
from trainyard.config.load import parse
from trainyard.core.errors import UserError
from trainyard.data.loading.build import build_datasets
from trainyard.data.loading.fingerprint import fingerprint_files
from trainyard.data.loading.loader import FETCH_STEPS, BatchLoader
from trainyard.run.checkpointing.data_check import check_same_versions


@pytest.fixture
def local(tmp_path: Path, url: str, proxy: StoreProxy) -> dict[str, Any]:
    (tmp_path / "data").mkdir()
    data = FORMATS["tokens"](tmp_path / "data")
    upload(tmp_path / "data", url)
    return data


@pytest.fixture
def remote(local: dict[str, Any], tmp_path: Path, url: str) -> dict[str, Any]:
    return moved(local, tmp_path / "data", url, tmp_path / "cache")


def run(data: dict[str, Any], directory: Path, *overrides: str) -> tuple[float, list[str]]:
    """The last loss of a run that saves a checkpoint in the middle, and its notes."""
    lines: list[str] = []
    saving = {"every": STEPS // 2, "keep": 0, "export_hf": False, "directory": str(directory / "checkpoints")}
    config = make_config(data, checkpoint=saving, log={"directory": str(directory / "runs")})
    with captured_log(lines.append):
        loss = Trainer(parse(config.model_dump(mode="json"), list(overrides))).run().last_loss
    assert loss is not None
    return loss, [line for line in lines if line.startswith("note:")]


def resume(data: dict[str, Any], first: Path, directory: Path, *overrides: str) -> tuple[float, list[str]]:
    path = first / "checkpoints" / f"step_{STEPS // 2:08}"
    return run(data, directory, f"checkpoint.resume={path}", *overrides)


def test_run_continues_on_the_same_files_in_a_store_and_back(
    local: dict[str, Any], remote: dict[str, Any], tmp_path: Path, url: str
) -> None:
    loss, _ = run(local, tmp_path / "local")
    assert run(remote, tmp_path / "remote") == (loss, [])
    assert resume(remote, tmp_path / "remote", tmp_path / "1") == (loss, [])
    other_cache = {**remote, "cache": {"directory": str(tmp_path / "cache2"), "gib": 0.04}}
    assert resume(other_cache, tmp_path / "remote", tmp_path / "2") == (loss, [])
    moved_loss, notes = resume(remote, tmp_path / "local", tmp_path / "3")
    assert moved_loss == loss
    assert notes[0] == (
        f"note: data.paths={url}/a: the same files as in the checkpoint by equal sizes and checksums, in another "
        "place: the same samples follow"
    )
    moved_loss, notes = resume(local, tmp_path / "remote", tmp_path / "4")
    assert moved_loss == loss
    assert "the same files as in the checkpoint by equal sizes, in another place" in notes[0]


def test_changed_objects_are_noticed_on_resume(
    local: dict[str, Any], remote: dict[str, Any], tmp_path: Path, url: str
) -> None:
    run(local, tmp_path / "local")
    run(remote, tmp_path / "remote")
    tokens = np.fromfile(tmp_path / "data" / "a.bin", "<u2")
    tokens[100] = (tokens[100] + 1) % 250
    tokens.tofile(tmp_path / "data" / "a.bin")
    upload(tmp_path / "data", url)
    with pytest.raises(UserError, match=rf"^{url}/a\.bin: its contents changed .*\(the same [\d,]+ bytes\)"):
        resume(remote, tmp_path / "remote", tmp_path / "1")
    _, notes = resume(remote, tmp_path / "remote", tmp_path / "2", "checkpoint.accept_changed_data=true")
    assert "its contents changed" in notes[0]
    _, notes = resume(remote, tmp_path / "local", tmp_path / "3")
    assert f"{url}/a.bin: not the contents of {tmp_path}/data/a.bin: other samples follow" in notes[0]


def test_ranks_that_see_different_versions_stop(remote: dict[str, Any], local: dict[str, Any], url: str) -> None:
    data = make_config(remote).data
    own = fingerprint_files(data)
    other = {**own, f"{url}/a.bin": [own[f"{url}/a.bin"][0], "another"]}
    check_same_versions(data, SimpleNamespace(all_gather_object=lambda found: [found, found]))  # type: ignore[arg-type]
    with pytest.raises(UserError, match=rf"^{url}/a\.bin: changed while the run began"):
        check_same_versions(data, SimpleNamespace(all_gather_object=lambda found: [found, other]))  # type: ignore[arg-type]


def test_coming_steps_are_fetched_in_the_background(proxy: StoreProxy, remote: dict[str, Any], url: str) -> None:
    config = make_config(remote)
    train, _, shuffle = build_datasets(config)
    proxy.reads.clear()
    loader = BatchLoader(train, 1, 7, shuffle)
    batches = loader.prefetch(0, 40, slice(None), dict)  # type: ignore[arg-type]
    next(batches)
    steps = range(1 + FETCH_STEPS)
    starts = np.concatenate([loader.sample_indices(step) for step in steps]) * SEQ_LEN * 2
    needed = {f"bytes={start // LARGE * LARGE}-" for start in starts.tolist()}
    assert len(needed) > 4
    deadline = time.monotonic() + 60
    while not all(any(found.startswith(start) for _, found in list(proxy.reads)) for start in needed):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    batches.close()


def make_public(url: str) -> None:
    filesystem = fsspec.filesystem("s3")
    for path in filesystem.find(url):
        filesystem.chmod(path, "public-read")


def test_http(server: str, local: dict[str, Any], tmp_path: Path, url: str) -> None:
    """A plain web server: no listings, but ranges and versions."""
    expected = list(read_batches(make_config(local)))
    make_public(url)
    remote = moved(local, tmp_path / "data", f"{server}/yard/{tmp_path.name}", tmp_path / "cache", gib=0.04)
    assert_same(list(read_batches(make_config(remote))), expected)
    batches = read_batches(make_config(remote))
    next(batches)
    content = (tmp_path / "data" / "a.bin").read_bytes()
    (tmp_path / "data" / "a.bin").write_bytes(bytes(len(content)))
    upload(tmp_path / "data", url)
    make_public(url)
    # A read ahead of the step may have come between the new object and its permission.
    with pytest.raises(UserError, match=r"^http://.*/a\.bin: (changed since the run began|no access)"):
        list(batches)


def test_saved_dataset_behind_http(server: str, proxy: StoreProxy, tmp_path: Path, url: str) -> None:
    (tmp_path / "data").mkdir()
    local = FORMATS["arrow"](tmp_path / "data")
    upload(tmp_path / "data", url)
    make_public(url)
    remote = moved(local, tmp_path / "data", f"{server}/yard/{tmp_path.name}", tmp_path / "cache")
    assert_same(list(read_batches(make_config(remote))), list(read_batches(make_config(local))))


@pytest.mark.parametrize("name", ["tokens", "arrow", "hdf5", "text"])
def test_any_fsspec_url(tmp_path: Path, name: str) -> None:
    """A file system without conditional reads: the version is compared after each."""
    (tmp_path / "data").mkdir()
    local = FORMATS[name](tmp_path / "data")
    url = f"memory://{tmp_path.name}"
    upload(tmp_path / "data", url)
    remote = moved(local, tmp_path / "data", url, tmp_path / "cache", gib=0.04)
    assert_same(list(read_batches(make_config(remote))), list(read_batches(make_config(local))))
    batches = read_batches(make_config(remote))
    if name in ("tokens", "arrow"):  # the others have read everything by now
        next(batches)
        time.sleep(0.1)
        upload(tmp_path / "data", url)  # the same bytes, another time
        with pytest.raises(UserError, match=r"^memory://.*: changed since the run began"):
            list(batches)
    fsspec.filesystem("memory").store.clear()


class FakeHub(MemoryFileSystem):
    """Hub paths whose branch is a commit of files in memory."""

    protocol = "hf"
    endpoint = token = None
    commits: tuple[str, ...] = ("1" * 40,)

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return super()._strip_protocol(path.replace("hf://", "memory://"))

    def resolve_path(self, path: str) -> Any:
        kind, owner, name, *rest = path.strip("/").split("/")
        name, _, revision = name.partition("@")
        return SimpleNamespace(
            repo_type=kind.removesuffix("s"),
            repo_id=f"{owner}/{name}",
            revision=revision or "main",
            path_in_repo="/".join(rest),
        )


def test_hub_paths_stay_at_the_commit_of_the_first_look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules["fsspec.registry"]._registry, "hf", FakeHub)
    monkeypatch.setattr(
        "huggingface_hub.HfApi.repo_info", lambda self, repo_id, **keys: SimpleNamespace(sha=FakeHub.commits[-1])
    )
    (tmp_path / "data").mkdir()
    local = FORMATS["tokens"](tmp_path / "data")
    expected = list(read_batches(make_config(local)))
    upload(tmp_path / "data", f"memory://datasets/me/set@{'1' * 40}")
    remote = moved(local, tmp_path / "data", "hf://datasets/me/set", tmp_path / "cache", gib=0.04)
    batches = read_batches(make_config(remote))
    found = [next(batches)]
    write_tokens(tmp_path / "data" / "a", 5)
    upload(tmp_path / "data", f"memory://datasets/me/set@{'2' * 40}")
    monkeypatch.setattr(FakeHub, "commits", ("1" * 40, "2" * 40))
    assert_same([*found, *batches], expected)
    assert_same(list(read_batches(make_config(remote))), list(read_batches(make_config(local))))
    fsspec.filesystem("memory").store.clear()
