"""A path, file://, memory:// and s3:// behave as one: the same operations, the same results, the same checkpoints.

The S3 side is a real server that speaks S3, on the loopback.
"""

import json
import logging
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.checkpoint.saved_runs import verified_steps
from tests.support import configs
from tests.support.logs import captured_log
from trainyard import Trainer
from trainyard.checkpoint.io.storage import Storage, StorageUnavailable, open_storage
from trainyard.core.errors import UserError

ROOT = Path(__file__).parents[2]
KINDS = ["path", "file", "memory", "s3"]


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """Threads that wait spin: with matrices this small they cost more than they bring."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """Where S3 is, with a bucket named yard. Told to fsspec as a user would: in its configuration."""
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    running = ThreadedMotoServer("127.0.0.1", port=0, verbose=False)
    running.start()
    address, port = running.get_host_and_port()
    where = f"http://{address}:{port}"
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(fsspec.config.conf, "s3", {"endpoint_url": where, "key": "fake", "secret": "fake"})
        fsspec.core.url_to_fs("s3://yard")[0].mkdir("yard")
        yield where
        running.stop()
        fsspec.get_filesystem_class("s3").clear_instance_cache()


@pytest.fixture
def urls(server: str, tmp_path: Path) -> Iterator[dict[str, str]]:
    """A fresh directory of each kind."""
    (tmp_path / "path").mkdir()
    (tmp_path / "file").mkdir()
    yield {
        "path": str(tmp_path / "path"),
        "file": f"file://{tmp_path / 'file'}",
        "memory": f"memory://{tmp_path.name}",
        "s3": f"s3://yard/{tmp_path.name}",
    }
    fsspec.filesystem("memory").store.clear()


# One operation at a time.

NAMES = st.sampled_from(["a.json", "b.safetensors"])
UNDER = st.sampled_from(["", "step_00000001"])
NUMBER = st.integers(0, 40)
OPERATIONS = st.one_of(
    st.tuples(st.just("write"), UNDER, NAMES, st.binary(min_size=20, max_size=40)),
    st.tuples(st.just("fail"), UNDER, NAMES, st.binary(max_size=40)),
    st.tuples(st.just("remove"), UNDER, NAMES),
    st.tuples(st.just("remove_all"), UNDER),
    st.tuples(st.just("names"), UNDER),
    st.tuples(st.just("size"), UNDER, NAMES),
    st.tuples(st.just("read"), UNDER, NAMES, NUMBER, NUMBER).filter(lambda each: each[3] <= each[4]),
    st.tuples(st.just("read_strided"), UNDER, NAMES, NUMBER, st.integers(1, 4), st.integers(4, 8), st.integers(1, 4)),
)


def perform(root: Storage, what: str, under: str, *arguments: Any) -> Any:
    """An operation's result; for what it raises, what that is."""
    place = root / under if under else root
    if what in ("write", "fail"):
        name, data = arguments
        place.mkdir()
        try:
            with place.write(name) as file:
                file.write(data)
                if what == "fail":
                    raise ZeroDivisionError
        except ZeroDivisionError:
            return "failed"
        return None
    if what == "remove":
        return place.remove(*arguments)
    if what == "remove_all":
        return root.remove(under) if under else None
    if what == "names":  # directories with nothing in them are no matter: an object store has none
        return [name for name in place.listdir() if place.file_size(name) is not None or (place / name).listdir()]
    if what == "size":
        return place.file_size(*arguments)
    try:
        with place.open(arguments[0]) as file:
            return file.size, bytes(getattr(file, what)(*arguments[1:]))
    except (EOFError, FileNotFoundError) as error:
        return type(error)


def expected(files: dict[tuple[str, str], bytes], what: str, under: str, *arguments: Any) -> Any:
    """The same on a dictionary."""
    if what == "write":
        files[under, arguments[0]] = arguments[1]
        return None
    if what == "fail":
        return "failed"
    if what == "remove":
        files.pop((under, arguments[0]), None)
        return None
    if what == "remove_all":
        for key in [key for key in files if key[0] == under and under]:
            del files[key]
        return None
    if what == "names":
        directories = {key[0] for key in files if key[0] and not under}
        return sorted({key[1] for key in files if key[0] == under} | directories)
    data = files.get((under, arguments[0]))
    if what == "size":
        return None if data is None else len(data)
    if data is None:
        return FileNotFoundError
    if what == "read":
        start, stop = arguments[1:]
        return (len(data), data[start:stop]) if stop <= len(data) or start == stop else EOFError
    start, width, apart, count = arguments[1:]
    if start + (count - 1) * apart + width > len(data):
        return EOFError
    places = [start + number * apart for number in range(count)]
    return len(data), b"".join(data[at : at + width] for at in places)


def test_operations_give_the_same_everywhere(urls: dict[str, str]) -> None:
    number = 0

    @settings(max_examples=25, deadline=None, database=None, derandomize=True)
    @given(st.lists(OPERATIONS, min_size=5, max_size=20))
    def check(operations: list[tuple[Any, ...]]) -> None:
        nonlocal number
        number += 1
        places = {kind: open_storage(f"{url}/{number}") for kind, url in urls.items()}
        files: dict[tuple[str, str], bytes] = {}
        begin = [("write", under, "a.json", bytes(range(30))) for under in ("", "step_00000001")]
        for operation in [*begin, *operations]:
            wanted = expected(files, *operation)
            found = {kind: perform(place, *operation) for kind, place in places.items()}
            assert found == dict.fromkeys(places, wanted), operation

    check()


@pytest.mark.parametrize("kind", KINDS)
def test_a_failed_write_leaves_nothing(urls: dict[str, str], kind: str) -> None:
    place = open_storage(urls[kind])

    def failing(name: str) -> None:
        with place.write(name) as file:
            file.write(b"half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        failing("new")
    assert place.listdir() == []
    with place.write("old") as file:
        file.write(b"whole")
    with pytest.raises(KeyboardInterrupt):
        failing("old")
    assert place.listdir() == ["old"]
    with place.open("old") as file:
        assert bytes(file.read(0, 5)) == b"whole"


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_no_file_has_no_size(urls: dict[str, str], kind: str) -> None:
    place = open_storage(urls[kind])
    assert (place / "missing").listdir() == []
    assert place.file_size("missing") is None
    place.remove("missing")
    (place / "under").mkdir()
    (place / "under").mkdir()
    with (place / "under").write("file") as file:
        file.write(b"123")
    assert place.file_size("under") is None
    assert (place / "under").file_size("file") == 3
    assert ((place / "under") / "file").listdir() == []
    assert str(place / "under").endswith("/under")
    with pytest.raises(OSError, match="under"), place.open("under"):
        pass


def test_only_a_disk_says_how_much_is_free(urls: dict[str, str]) -> None:
    free = {kind: (open_storage(url) / "not" / "yet").free_bytes() for kind, url in urls.items()}
    assert free["memory"] is free["s3"] is None
    assert free["path"] == pytest.approx(shutil.disk_usage(urls["path"]).free, rel=0.1)
    assert free["file"] == pytest.approx(free["path"], rel=0.1)


# Whole runs.


def train(directory: str, logs: Path, steps: int, **checkpoint: Any) -> tuple[list[float], list[str]]:
    """Losses, and what was said."""
    section = {"directory": directory, "every": 1, "keep": 2, "export_hf": False, **checkpoint}
    schedule = {"decay_steps": 6}  # the same whatever the number of steps
    model = {**configs.LLAMA, "layers": 1}  # few tensors, for a server that is slower than it could be
    config = configs.tiny_config(
        model, train={"steps": steps}, schedule=schedule, checkpoint=section, log={"directory": str(logs)}
    )
    said: list[str] = []
    with captured_log(said.append):
        summary = Trainer(config).run()
    text = (summary.directory / "metrics.jsonl").read_text()
    return [record["loss"] for record in map(json.loads, text.splitlines()) if "loss" in record], said


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_saves_prunes_and_goes_on(urls: dict[str, str], tmp_path: Path, kind: str) -> None:
    url = f"{urls[kind]}/run"
    whole, _ = train(f"{urls[kind]}/whole", tmp_path / "whole", 4)
    first, _ = train(url, tmp_path / "logs", 2, resume="auto")
    assert verified_steps(url) == [2, 1]
    again, said = train(url, tmp_path / "logs", 4, resume="auto")
    where = str(open_storage(url))
    assert f"resuming from step 2: {where}/step_00000002" in said
    assert again == whole
    assert first == whole[:2]
    assert verified_steps(url) == [4, 3]
    assert open_storage(url).listdir() == [
        "step_00000003",
        "step_00000004",
    ]  # nothing of the older ones, no temporaries
    for path in (url, f"{url}/step_00000004"):
        branch, said = train(f"{urls[kind]}/branch", tmp_path / "branch", 4, resume=path)
        assert f"resuming from step 4: {where}/step_00000004" in said
        assert branch == []


@pytest.mark.parametrize("kind", KINDS)
def test_a_damaged_checkpoint_is_passed_over(urls: dict[str, str], tmp_path: Path, kind: str) -> None:
    url = urls[kind]
    train(url, tmp_path / "logs", 2)
    place = open_storage(url) / "step_00000002"
    name = "rank_00000.safetensors"
    with place.open(name) as file:
        data = bytearray(file.read(0, file.size))
    data[-5] ^= 1
    with place.write(name) as file:
        file.write(data)
    _, said = train(url, tmp_path / "logs", 2, resume="auto")
    assert any(line.startswith(f"skipping {place}/{name}: broken: the checksum of") for line in said)
    assert any(line.startswith("resuming from step 1:") for line in said)
    assert verified_steps(url) == [2, 1]


UPLOAD = """
import os, signal, sys
from trainyard.checkpoint.io.storage import open_storage
with open_storage(sys.argv[1]).write("rank_00000.safetensors") as file:
    for _ in range(3):
        file.write(b"1" * 5 * 2**20)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_upload_leaves_nothing(server: str, urls: dict[str, str]) -> None:
    """Also when parts of it have arrived already."""
    variables = {"FSSPEC_S3_ENDPOINT_URL": server, "FSSPEC_S3_KEY": "fake", "FSSPEC_S3_SECRET": "fake"}
    variables["FSSPEC_S3"] = '{"default_block_size": 5242880}'
    url = f"{urls['s3']}/step_00000001"
    done = subprocess.run([sys.executable, "-c", UPLOAD, url], cwd=ROOT, env=os.environ | variables)
    assert done.returncode == -signal.SIGKILL
    system = fsspec.core.url_to_fs(url)[0]
    assert len(system.list_multipart_uploads("yard")) == 1  # parts have arrived, under no name
    assert open_storage(urls["s3"]).listdir() == []
    assert open_storage(url).file_size("rank_00000.safetensors") is None


def test_a_bucket_that_is_not_there_is_one_line(server: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^checkpoint.directory=s3://no-such-yard/x: cannot be written: ") as told:
        train("s3://no-such-yard/x", tmp_path, 1)
    assert "bucket does not exist" in str(told.value)
    assert "\n" not in str(told.value)
    with pytest.raises(UserError, match=r"^checkpoint.resume=s3://no-such-yard/x: no valid checkpoint"):
        train(str(tmp_path), tmp_path, 1, resume="s3://no-such-yard/x")


def test_a_store_that_does_not_answer_is_one_line_and_no_reason_to_begin_anew(
    urls: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor to go on from an older checkpoint than the one that could not be read."""
    url = urls["memory"]
    train(url, tmp_path / "logs", 2)
    system = fsspec.get_filesystem_class("memory")

    def refusing(method: Callable[..., Any], part: str) -> Callable[..., Any]:
        def call(self: Any, path: str, *arguments: Any, **named: Any) -> Any:
            if part in path:
                raise PermissionError("Access\nDenied")
            return method(self, path, *arguments, **named)

        return call

    for name, part in (("ls", ""), ("info", "complete.json"), ("cat_file", "step_00000002")):
        with monkeypatch.context() as patch:
            patch.setattr(system, name, refusing(getattr(system, name), part))
            with pytest.raises(StorageUnavailable, match=r"^memory://.*: PermissionError: Access Denied$"):
                train(url, tmp_path / "logs", 2, resume="auto")


WITHOUT = """
import sys
sys.modules["s3fs"] = None
from trainyard.checkpoint.io.storage import open_storage
try:
    open_storage("s3://yard/x")
except ValueError as error:
    print(error)
"""


def test_what_is_not_installed_is_named() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "s3://yard/x: s3:// needs a package that is not installed: pip install 'trainyard[s3]'\n"
    with pytest.raises(UserError, match=r"^nosuch://x: "):
        open_storage("nosuch://x")
