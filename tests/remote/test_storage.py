"""A path, file://, memory:// and s3:// behave alike: the same operations, the same results, the same checkpoints.

The S3 side is a real server that speaks S3, on the loopback.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.checkpoint.saved_runs import run_training, verified_steps
from tests.run.test_resume import RunAtStep
from tests.support import configs
from tests.support.examples import examples
from tests.support.s3_server import s3_server
from trainyard import Callback
from trainyard.core.errors import NotWritable, UserError
from trainyard.metrics.run_directory import LOCK_FILE
from trainyard.remote.sources.retry import SourceUnavailable
from trainyard.remote.storage import Storage, open_storage
from trainyard.run.checkpointing import saver

ROOT = Path(__file__).parents[3]
KINDS = ["path", "file", "memory", "s3"]


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """With matrices this small, more threads cost more time than they save."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with s3_server() as url:
        yield url


@pytest.fixture
def urls(server: str, tmp_path: Path) -> Iterator[dict[str, str]]:
    """An empty directory of each kind."""
    (tmp_path / "path").mkdir()
    (tmp_path / "file").mkdir()
    yield {
        "path": str(tmp_path / "path"),
        "file": f"file://{tmp_path / 'file'}",
        "memory": f"memory://{tmp_path.name}",
        "s3": f"s3://yard/{tmp_path.name}",
    }
    fsspec.filesystem("memory").store.clear()


# Single operations

NAMES = st.sampled_from(["a.json", "b.safetensors"])
SUBDIRECTORIES = st.sampled_from(["", "step_00000001"])
POSITIONS = st.integers(0, 40)
OPERATIONS = st.one_of(
    st.tuples(st.just("write"), SUBDIRECTORIES, NAMES, st.binary(min_size=20, max_size=40)),
    st.tuples(st.just("fail"), SUBDIRECTORIES, NAMES, st.binary(max_size=40)),
    st.tuples(st.just("remove"), SUBDIRECTORIES, NAMES),
    st.tuples(st.just("remove_all"), SUBDIRECTORIES),
    st.tuples(st.just("listdir"), SUBDIRECTORIES),
    st.tuples(st.just("file_size"), SUBDIRECTORIES, NAMES),
    st.tuples(st.just("read"), SUBDIRECTORIES, NAMES, POSITIONS, POSITIONS).filter(
        lambda operation: operation[3] <= operation[4]
    ),
    st.tuples(
        st.just("read_strided"),
        SUBDIRECTORIES,
        NAMES,
        POSITIONS,
        st.integers(1, 4),
        st.integers(4, 8),
        st.integers(1, 4),
    ),
)


def perform(root: Storage, operation: str, subdirectory: str, *arguments: Any) -> Any:
    """The result of an operation, or the type of the error it raises."""
    storage = root / subdirectory if subdirectory else root
    if operation in ("write", "fail"):
        name, data = arguments
        storage.mkdir()
        try:
            with storage.write(name) as file:
                file.write(data)
                if operation == "fail":
                    raise ZeroDivisionError
        except ZeroDivisionError:
            return "failed"
        return None
    if operation == "remove":
        return storage.remove(*arguments)
    if operation == "remove_all":
        return root.remove(subdirectory) if subdirectory else None
    if operation == "listdir":  # an object store has no empty directories
        return [name for name in storage.listdir() if storage.file_size(name) is not None or (storage / name).listdir()]
    if operation == "file_size":
        return storage.file_size(*arguments)
    try:
        with storage.open(arguments[0]) as file:
            return file.size, bytes(getattr(file, operation)(*arguments[1:]))
    except (EOFError, FileNotFoundError) as error:
        return type(error)


def expected(files: dict[tuple[str, str], bytes], operation: str, subdirectory: str, *arguments: Any) -> Any:
    """The result of the same operation on a dict of files."""
    if operation == "write":
        files[subdirectory, arguments[0]] = arguments[1]
        return None
    if operation == "fail":
        return "failed"
    if operation == "remove":
        files.pop((subdirectory, arguments[0]), None)
        return None
    if operation == "remove_all":
        for key in [key for key in files if key[0] == subdirectory and subdirectory]:
            del files[key]
        return None
    if operation == "listdir":
        directories = {key[0] for key in files if key[0] and not subdirectory}
        return sorted({key[1] for key in files if key[0] == subdirectory} | directories)
    data = files.get((subdirectory, arguments[0]))
    if operation == "file_size":
        return None if data is None else len(data)
    if data is None:
        return FileNotFoundError
    if operation == "read":
        start, stop = arguments[1:]
        return (len(data), data[start:stop]) if stop <= len(data) or start == stop else EOFError
    start, width, stride, count = arguments[1:]
    if start + (count - 1) * stride + width > len(data):
        return EOFError
    starts = [start + i * stride for i in range(count)]
    return len(data), b"".join(data[start : start + width] for start in starts)


def test_operations_have_the_same_results_on_every_storage(urls: dict[str, str]) -> None:
    example = 0

    @examples(25, database=None, derandomize=True)
    @given(st.lists(OPERATIONS, min_size=5, max_size=20))
    def check(operations: list[tuple[Any, ...]]) -> None:
        nonlocal example
        example += 1
        storages = {kind: open_storage(f"{url}/{example}") for kind, url in urls.items()}
        files: dict[tuple[str, str], bytes] = {}
        first_writes = [("write", directory, "a.json", bytes(range(30))) for directory in ("", "step_00000001")]
        for operation in [*first_writes, *operations]:
            result = expected(files, *operation)
            results = {kind: perform(storage, *operation) for kind, storage in storages.items()}
            assert results == dict.fromkeys(storages, result), operation

    check()


@pytest.mark.parametrize("kind", KINDS)
def test_a_failed_write_leaves_nothing(urls: dict[str, str], kind: str) -> None:
    storage = open_storage(urls[kind])

    def write_and_interrupt(name: str) -> None:
        with storage.write(name) as file:
            file.write(b"half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_and_interrupt("new")
    assert storage.listdir() == []
    with storage.write("old") as file:
        file.write(b"intact")
    with pytest.raises(KeyboardInterrupt):
        write_and_interrupt("old")
    assert storage.listdir() == ["old"]
    with storage.open("old") as file:
        assert bytes(file.read(0, 6)) == b"intact"


@pytest.mark.parametrize("kind", KINDS)
def test_missing_files_and_directories_have_no_size(urls: dict[str, str], kind: str) -> None:
    storage = open_storage(urls[kind])
    assert (storage / "missing").listdir() == []
    assert storage.file_size("missing") is None
    storage.remove("missing")
    (storage / "subdirectory").mkdir()
    (storage / "subdirectory").mkdir()
    with (storage / "subdirectory").write("file") as file:
        file.write(b"123")
    assert storage.file_size("subdirectory") is None
    assert (storage / "subdirectory").file_size("file") == 3
    assert ((storage / "subdirectory") / "file").listdir() == []
    assert str(storage / "subdirectory").endswith("/subdirectory")
    with pytest.raises(OSError, match="subdirectory"), storage.open("subdirectory"):
        pass


def test_only_local_disks_report_free_space(urls: dict[str, str]) -> None:
    free = {kind: (open_storage(url) / "not" / "existing").free_bytes() for kind, url in urls.items()}
    assert free["memory"] is free["s3"] is None
    assert free["path"] == pytest.approx(shutil.disk_usage(urls["path"]).free, rel=0.1)
    assert free["file"] == pytest.approx(free["path"], rel=0.1)


# Training runs


def train(
    directory: str, logs: Path, steps: int, callbacks: Sequence[Callback] = (), **checkpoint: Any
) -> tuple[list[float], list[str]]:
    """The losses and the messages of a run."""
    section = {"directory": directory, "every": 1, "keep": 2, "export_hf": False, **checkpoint}
    schedule = {"decay_steps": 6}  # the same for any number of steps
    model = {**configs.LLAMA, "layers": 1}  # few tensors: the server is slow
    config = configs.tiny_config(
        model, train={"steps": steps}, schedule=schedule, checkpoint=section, log={"directory": str(logs)}
    )
    summary, messages = run_training(config, callbacks)
    path = summary.directory / "metrics.jsonl"  # a run that has nothing left to do writes none
    text = path.read_text() if path.exists() else ""
    return [record["loss"] for record in map(json.loads, text.splitlines()) if "loss" in record], messages


NIGHTLY_KINDS = [pytest.param(kind, marks=pytest.mark.nightly if kind != "path" else []) for kind in KINDS]


@pytest.mark.parametrize("kind", NIGHTLY_KINDS)
def test_a_run_saves_prunes_and_resumes(urls: dict[str, str], tmp_path: Path, kind: str) -> None:
    url = f"{urls[kind]}/run"
    undisturbed, _ = train(f"{urls[kind]}/undisturbed", tmp_path / "undisturbed", 4)
    first, _ = train(url, tmp_path / "logs", 2, resume="auto")
    assert verified_steps(url) == [2, 1]
    resumed, messages = train(url, tmp_path / "logs", 4, resume="auto")
    storage = open_storage(url)
    assert f"resuming from step 2: {storage}/step_00000002" in messages
    assert resumed == undisturbed
    assert first == undisturbed[:2]
    assert verified_steps(url) == [4, 3]
    names = [name for name in storage.listdir() if name != LOCK_FILE]
    assert names == ["step_00000003", "step_00000004"]  # no older checkpoints, no temporary files
    for path in (url, f"{url}/step_00000004"):
        branch, messages = train(f"{urls[kind]}/branch", tmp_path / "branch", 4, resume=path)
        assert f"resuming from step 4: {storage}/step_00000004" in messages
        assert branch == []


@pytest.mark.parametrize(
    "kind", ["s3", *(pytest.param(kind, marks=pytest.mark.nightly) for kind in ("path", "file", "memory"))]
)
def test_a_corrupt_checkpoint_is_skipped(urls: dict[str, str], tmp_path: Path, kind: str) -> None:
    url = urls[kind]
    train(url, tmp_path / "logs", 2)
    storage = open_storage(url) / "step_00000002"
    name = "rank_00000.safetensors"
    with storage.open(name) as file:
        data = bytearray(file.read(0, file.size))
    data[-5] ^= 1
    with storage.write(name) as file:
        file.write(data)
    _, messages = train(url, tmp_path / "logs", 2, resume="auto")
    assert any(line.startswith(f"skipping {storage}/{name}: corrupt: the checksum of") for line in messages)
    assert any(line.startswith("resuming from step 1:") for line in messages)
    assert verified_steps(url) == [2, 1]


def stored(url: str) -> dict[str, bytes]:
    filesystem, path = fsspec.core.url_to_fs(url)
    filesystem.invalidate_cache()
    return {name: filesystem.cat_file(name) for name in filesystem.find(path)}


@pytest.mark.parametrize("kind", ["s3", pytest.param("memory", marks=pytest.mark.nightly)])
def test_a_run_does_not_touch_the_checkpoints_of_another(urls: dict[str, str], tmp_path: Path, kind: str) -> None:
    """Two users of one prefix, with the same recipe: the second is refused before it writes anything."""
    url = urls[kind]
    train(url, tmp_path / "alice", 2)
    before = stored(url)
    assert [name.rsplit("/", 2)[-2] for name in before if name.endswith("complete.json")] == [
        "step_00000001",
        "step_00000002",
    ]
    for resume in ("auto", "none", f"{url}/step_00000002"):
        with pytest.raises(UserError) as error:
            train(url, tmp_path / "bob", 3, resume=resume)
        assert str(error.value) == (
            f"checkpoint.directory={url}: it has the checkpoints of another run, run in {tmp_path / 'alice' / 'run'}; "
            f"nearest: another directory, or log.name=run checkpoint.resume={url}, which continues that run"
        )
    assert stored(url) == before
    assert not (tmp_path / "bob").exists()
    shutil.rmtree(tmp_path / "alice")  # a container: the same command continues
    _, messages = train(url, tmp_path / "alice", 3, resume="auto")
    assert f"resuming from step 2: {url}/step_00000002" in messages
    assert verified_steps(url) == [3, 2]


@pytest.mark.parametrize("kind", ["memory", pytest.param("s3", marks=pytest.mark.nightly)])
def test_two_processes_do_not_save_in_one_directory(urls: dict[str, str], tmp_path: Path, kind: str) -> None:
    """A store has no locks, and before the first save no checkpoint says whose directory it is."""
    url, refused = urls[kind], []

    def start_another(directory: str, **keys: Any) -> None:
        with pytest.raises(UserError) as error:
            train(url, tmp_path / directory, 1, **keys)
        refused.append(str(error.value))

    def start_others() -> None:
        start_another("bob")
        start_another("alice", resume="auto")  # the same run
        start_another("alice")  # a new run of the same name and configuration

    train(url, tmp_path / "alice", 1, callbacks=[RunAtStep({1: start_others})])
    in_use = f"the run run in {tmp_path / 'alice' / 'run'} is training in this directory, or was killed"
    assert [line.startswith(f"checkpoint.directory={url}: cannot be written: {in_use}") for line in refused] == [
        True,
        False,
        True,
    ]
    assert refused[1].startswith(f"{tmp_path / 'alice' / 'run'}: another process is training in this directory")
    assert open_storage(url).listdir() == ["step_00000001"]  # no claim is left


def test_a_killed_process_does_not_block_its_run(
    urls: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed before its first save, by the loss of its host, whose process may yet be alive: it saves nothing more."""
    url = urls["memory"]
    lines: list[str] = []

    def lose_the_host() -> None:
        shutil.move(tmp_path / "alice", tmp_path / "lost")
        lines.extend(train(url, tmp_path / "alice", 2, resume="auto")[1])
        shutil.move(tmp_path / "alice", tmp_path / "new")
        shutil.move(tmp_path / "lost", tmp_path / "alice")

    monkeypatch.setattr(saver, "LAST_SAVE_PAUSES_S", ())
    message = f"of step 3, could not be written: {url}: another process has taken over this directory"
    with pytest.raises(NotWritable, match=message):
        train(url, tmp_path / "alice", 3, resume="auto", callbacks=[RunAtStep({1: lose_the_host})])
    assert "checkpoint.resume=auto: starting from step 0" in lines
    assert verified_steps(url) == [2, 1]


UPLOAD = """
import os, signal, sys
from trainyard.remote.storage import open_storage
with open_storage(sys.argv[1]).write("rank_00000.safetensors") as file:
    for _ in range(3):
        file.write(b"1" * 5 * 2**20)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_upload_leaves_nothing(server: str, urls: dict[str, str]) -> None:
    """Not even if the server has already received parts of it."""
    variables = {"FSSPEC_S3_ENDPOINT_URL": server, "FSSPEC_S3_KEY": "fake", "FSSPEC_S3_SECRET": "fake"}
    variables["FSSPEC_S3"] = '{"default_block_size": 5242880}'
    url = f"{urls['s3']}/step_00000001"
    process = subprocess.run([sys.executable, "-c", UPLOAD, url], cwd=ROOT, env=os.environ | variables)
    assert process.returncode == -signal.SIGKILL
    filesystem = fsspec.core.url_to_fs(url)[0]
    assert len(filesystem.list_multipart_uploads("yard")) == 1  # the parts have no name yet
    assert open_storage(urls["s3"]).listdir() == []
    assert open_storage(url).file_size("rank_00000.safetensors") is None


def test_a_missing_bucket_is_a_one_line_error(server: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^checkpoint.directory=s3://no-such-yard/x: cannot be written: ") as error:
        train("s3://no-such-yard/x", tmp_path, 1)
    assert "bucket does not exist" in str(error.value)
    assert "\n" not in str(error.value)
    with pytest.raises(UserError, match=r"^checkpoint.resume=s3://no-such-yard/x: no valid checkpoint"):
        train(str(tmp_path), tmp_path, 1, resume="s3://no-such-yard/x")


def test_an_unavailable_storage_stops_the_run_with_one_line(
    urls: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run must neither start over nor resume from an older checkpoint than the one it could not read."""
    url = urls["memory"]
    train(url, tmp_path / "logs", 2)
    filesystem = fsspec.get_filesystem_class("memory")

    def refusing(method: Callable[..., Any], text: str) -> Callable[..., Any]:
        def call(self: Any, path: str, *args: Any, **kwargs: Any) -> Any:
            if text in path:
                raise PermissionError("Access\nDenied")
            return method(self, path, *args, **kwargs)

        return call

    for name, text in (("ls", ""), ("info", "complete.json"), ("cat_file", "step_00000002")):
        with monkeypatch.context() as patch:
            patch.setattr(filesystem, name, refusing(getattr(filesystem, name), text))
            with pytest.raises(SourceUnavailable, match=r"^memory://.*: PermissionError: Access Denied$"):
                train(url, tmp_path / "logs", 2, resume="auto")


WITHOUT_S3FS = """
import sys
sys.modules["s3fs"] = None
from trainyard.remote.storage import open_storage
try:
    open_storage("s3://yard/x")
except ValueError as error:
    print(error)
"""


def test_a_missing_package_is_named() -> None:
    process = subprocess.run([sys.executable, "-c", WITHOUT_S3FS], cwd=ROOT, capture_output=True, text=True, check=True)
    assert process.stdout == "s3://yard/x: s3:// needs a package that is not installed: pip install 'trainyard[s3]'\n"
    with pytest.raises(UserError, match=r"^nosuch://x: "):
        open_storage("nosuch://x")
