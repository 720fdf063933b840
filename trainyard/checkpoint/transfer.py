"""Local copies for conversions from and to URLs: all formats are read from and written to local files.

A source in a store is downloaded, except for native checkpoints, which are read in place. Models of the Hub and the web
are in their caches. A target at a URL is written to
a temporary directory first and then uploaded; the file that makes a checkpoint complete comes last.
"""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from threading import Event

from trainyard.checkpoint.io.storage import FsspecStorage, open_storage
from trainyard.checkpoint.registry import detect_format, latest_checkpoint
from trainyard.core.errors import UserError, one_line
from trainyard.remote.credentials import redact
from trainyard.remote.fetch import check_space, download
from trainyard.remote.local_copies import is_remote_model, local_weights
from trainyard.remote.location import is_url
from trainyard.remote.sources.object_store import list_stored_files

FINAL_FILES = ("config.json", "model.safetensors.index.json", ".metadata", "done", "complete.json")
"""Files that readers look for first. They are uploaded last, in this order."""
COPY_CHUNK_BYTES = 2**25
NUM_STREAMS = 8
"""Files that are copied at a time."""
PROGRESS_INTERVAL_S = 0.5

OnBytes = Callable[[int, int], None]
"""Called with the bytes copied so far and their total."""


@contextmanager
def local_source(source: str, on_bytes: OnBytes) -> Iterator[str | Path]:
    """Yield where to read a checkpoint from: its local path, a temporary copy, or the URL of a native checkpoint."""
    if not is_url(source) or is_remote_model(source):
        path = local_weights(source, on_bytes)
        if detect_format(path):  # otherwise it may be any directory, such as the root of a disk
            check_links(path)
        yield path
        return
    storage = open_storage(source)
    assert isinstance(storage, FsspecStorage)
    if latest_checkpoint(storage):
        yield source
        return
    with TemporaryDirectory(prefix="trainyard-") as temporary:
        copy = Path(temporary) / (PurePosixPath(storage.path).name or "checkpoint")
        files = list_stored_files(source)
        is_file = len(files) == 1 and files[0].label == redact(source)
        try:
            check_space(copy, sum(file.size or 0 for file in files), source)
        except UserError as error:
            raise UserError(f"{error}; set TMPDIR, or name the directory of one checkpoint") from None
        download(lambda: list_stored_files(source), copy, on_bytes, lambda path: path / copy.name if is_file else path)
        yield copy


@contextmanager
def local_target(target: str, on_bytes: OnBytes) -> Iterator[Path]:
    """Yield the path of a new directory. If `target` is a URL, the directory is uploaded after the block."""
    if not is_url(target):
        yield Path(target.removeprefix("file://"))
        return
    storage = _writable_storage(target)
    with TemporaryDirectory(prefix="trainyard-") as temporary:
        directory = Path(temporary) / (PurePosixPath(storage.path).name or "checkpoint")
        yield directory
        _upload(directory, storage, on_bytes)


def check_new_target(target: str) -> None:
    """Refuse a target that exists and is not empty. Nothing is created."""
    path = Path(target.removeprefix("file://")).expanduser()
    exists = bool(open_storage(target).listdir()) or (not is_url(target) and path.is_file())
    if exists:
        raise UserError(f"{target}: already exists and is not empty; choose a new directory")


def check_links(source: Path) -> None:
    """Refuse symbolic links in a directory that lead out of it, except those of the Hugging Face cache to its blobs."""
    root = source.resolve()
    for directory, subdirectories, files in os.walk(root):  # does not follow links to directories
        for name in (*subdirectories, *files):
            check_link(Path(directory, name), root)


def check_link(path: Path, root: Path) -> None:
    """Refuse `path` if it is a symbolic link that leads out of `root`."""
    if not path.is_symlink():
        return
    try:
        target, root = path.resolve(), root.resolve()
    except (OSError, RuntimeError) as error:
        raise UserError(f"{path}: not a readable link: {one_line(error)}") from None
    allowed = [root, *(parent.parent / "blobs" for parent in root.parents if parent.name == "snapshots")]
    if not any(target.is_relative_to(directory) for directory in allowed):
        raise UserError(f"{path}: a link to {target}, outside the checkpoint; nearest: a copy in its place")


def _writable_storage(target: str) -> FsspecStorage:
    """The empty storage at a URL, after a test file was written and removed."""
    storage = open_storage(target)
    assert isinstance(storage, FsspecStorage)
    check_new_target(target)
    try:
        storage.mkdir()
        with storage.write(".trainyard") as file:
            file.write(b"\n")
        storage.remove(".trainyard")
    except Exception as error:
        raise UserError(f"{target}: cannot be written: {one_line(error)}") from None
    return storage


def _upload(directory: Path, storage: FsspecStorage, on_bytes: OnBytes) -> None:
    """Copy all files of a directory. If that fails, the files that were copied are removed again."""
    paths = sorted(path for path in directory.rglob("*") if path.is_file())
    sizes = {str(path.relative_to(directory)): path.stat().st_size for path in paths}
    final = [name for name in FINAL_FILES if name in sizes]

    def send(name: str, report: Callable[[int], None]) -> None:
        parent = storage
        for part in PurePosixPath(name).parts[:-1]:
            parent = parent / part
        parent.mkdir()
        with (directory / name).open("rb") as source, parent.write(PurePosixPath(name).name) as file:
            while data := source.read(COPY_CHUNK_BYTES):
                file.write(data)
                report(len(data))

    try:
        done = copy_all({name: size for name, size in sizes.items() if name not in final}, send, on_bytes)
        for name in final:
            done = copy_all({name: sizes[name]}, send, on_bytes, done)
    except BaseException as error:
        with suppress(Exception):  # the first error is the one to report
            for name in sizes:
                storage.remove(name)
        if isinstance(error, Exception) and not isinstance(error, UserError):
            raise UserError(f"{storage}: cannot be written: {one_line(error)}") from None
        raise


def copy_all(
    sizes: dict[str, int], copy: Callable[[str, Callable[[int], None]], None], on_bytes: OnBytes, done: int = 0
) -> int:
    """Copy files in threads. Returns `done` and the bytes copied; `on_bytes` runs in the calling thread."""
    total = done + sum(sizes.values())
    counts = dict.fromkeys(sizes, 0)
    stopped = Event()

    def run(name: str) -> None:
        def report(count: int) -> None:
            counts[name] += count
            if stopped.is_set():  # another file failed, or Ctrl-C
                raise InterruptedError

        copy(name, report)

    pool = ThreadPoolExecutor(NUM_STREAMS)
    try:
        pending = {pool.submit(run, name) for name in sizes}
        while pending:
            finished, pending = wait(pending, PROGRESS_INTERVAL_S, FIRST_EXCEPTION)
            for future in finished:
                future.result()
            on_bytes(done + sum(counts.values()), total)
    finally:
        stopped.set()
        pool.shutdown(cancel_futures=True)
    return total
