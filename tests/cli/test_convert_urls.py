"""`trainyard convert` and `inspect` with URLs: every format goes to and from a server that speaks S3."""

import json
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from safetensors.torch import load_file

from tests.cli.conftest import Call, fail, succeed
from tests.formats.test_nxd import RandomWeights, llama
from tests.support.s3_server import s3_server
from trainyard.cli.console import ProgressDisplay
from trainyard.formats.hf import write_hf
from trainyard.remote import store_upload
from trainyard.remote.storage import FsspecStorage


@pytest.fixture(scope="module")
def s3() -> Iterator[Any]:
    """The file system of an S3 server with a bucket named yard."""
    with s3_server():
        yield fsspec.filesystem("s3")


@pytest.fixture
def hf(tmp_path: Path) -> Path:
    write_hf(tmp_path / "hf", RandomWeights(llama(layers=1)))
    (tmp_path / "hf" / "tokenizer.json").write_text("{}")
    return tmp_path / "hf"


@pytest.fixture(autouse=True)
def temporary(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing stays in the temporary directory."""
    directory = tmp_path_factory.mktemp("tmp")
    monkeypatch.setattr("tempfile.tempdir", str(directory))
    yield
    assert not list(directory.iterdir())


def names(s3: Any, url: str) -> list[str]:
    s3.invalidate_cache()
    root = url.removeprefix("s3://")
    return sorted(path.removeprefix(f"{root}/") for path in s3.find(root))


def test_every_format_goes_to_s3_and_back(call: Call, s3: Any, hf: Path, tmp_path: Path) -> None:
    source = "hf"
    options = {"nxd": ["--layout", "tp=2"], "native": ["--layout", "tp=2"], "dcp": [], "hf": []}
    for form, extra in options.items():
        target = f"s3://yard/{tmp_path.name}/{form}"
        out = succeed(call("convert", source, target, "--to", form, *extra, "--check-bits"))
        assert "all 12 tensors are equal bit for bit" in out
        assert out.endswith(f"{target}: uploaded\n")
        assert source == "hf" or f"{source}: " in out
        source = target
    assert {"config.json", "model.safetensors"} <= set(names(s3, source))
    succeed(call("convert", source, "back"))
    assert (tmp_path / "back" / "model.safetensors").read_bytes() == (hf / "model.safetensors").read_bytes()


def test_tokenizer_files_travel_and_inspect_reads_a_url(call: Call, s3: Any, hf: Path, tmp_path: Path) -> None:
    url = f"s3://yard/{tmp_path.name}/out"
    succeed(call("convert", "hf", url))
    assert names(s3, url) == ["config.json", "model.safetensors", "tokenizer.json", "trainyard.sha256"]
    assert json.loads(succeed(call("inspect", url, "--json")))["format"] == "hf"
    out = succeed(call("convert", url, f"s3://yard/{tmp_path.name}/other", "--dry-run"))
    assert "nothing is written" in out
    assert not names(s3, f"s3://yard/{tmp_path.name}/other")
    fail(call("convert", "hf", url), f"{url}: already exists and is not empty")
    fail(call("convert", "hf", url, "--dry-run"), f"{url}: already exists and is not empty")


def test_a_single_file_at_a_url(call: Call, s3: Any, hf: Path, tmp_path: Path) -> None:
    torch.save(load_file(hf / "model.safetensors"), tmp_path / "weights.pt")
    url = f"s3://yard/{tmp_path.name}/weights.pt"
    s3.put(str(tmp_path / "weights.pt"), url)
    out = succeed(call("convert", url, "out", "--config", "hf/config.json", "--check-bits"))
    assert f"{url}: a single file of Hugging Face weights" in out


def test_a_failed_upload_leaves_nothing(
    call: Call, s3: Any, hf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bucket refuses the last file, which makes the checkpoint complete."""
    url = f"s3://yard/{tmp_path.name}/out"
    write = FsspecStorage.write

    def failing_write(self: Any, name: str) -> Any:
        if name == "complete.json":
            assert "rank_00000.safetensors" in names(s3, url)
            raise PermissionError("access denied")
        return write(self, name)

    monkeypatch.setattr(FsspecStorage, "write", failing_write)
    fail(call("convert", "hf", url, "--to", "native"), f"{url}: cannot be written: access denied")
    assert names(s3, url) == []


def test_ctrl_c_while_uploading_leaves_nothing(
    call: Call, s3: Any, hf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(self: Any, done: int, total: int, details: str = "") -> None:
        if self.label == "upload":
            raise KeyboardInterrupt

    monkeypatch.setattr(ProgressDisplay, "update", interrupt)
    url = f"s3://yard/{tmp_path.name}/out"
    fail(call("convert", "hf", url), "interrupted", code=130)
    assert names(s3, url) == []


def test_ctrl_c_does_not_wait_for_the_end_of_a_large_file() -> None:
    def copy_slowly(name: str, report: Callable[[int], None]) -> None:
        for _ in range(10_000):
            time.sleep(0.01)
            report(1)

    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        store_upload.copy_all({"large": 10_000, "other": 10_000}, copy_slowly, interrupt)
    assert time.monotonic() - start < 10


def test_mistakes_are_one_line(call: Call, s3: Any, hf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fail(call("convert", "hf", "s3://no-such-bucket/x"), "s3://no-such-bucket/x: cannot be written: ")
    fail(call("convert", "s3://yard/nothing", "out"), "s3://yard/nothing: no such file, directory or bucket")
    fail(call("convert", "hf", "nosuch://a/b"), "nosuch://a/b: ")
    s3.pipe(f"yard/{tmp_path.name}/evil/../../x", b"")
    fail(call("convert", f"s3://yard/{tmp_path.name}/evil", "out"), ".*cannot be the name of a local file")
    url = f"s3://yard/{tmp_path.name}/out"
    succeed(call("convert", "hf", url))
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=9))
    fail(call("convert", url, "out"), rf"{url}: needs .* [KM]iB, but only 9 B are free in .*; set TMPDIR")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf"]
