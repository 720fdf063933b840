"""Uploads local files to an object store: those that make the rest complete come last."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import suppress
from pathlib import Path
from threading import Event
from typing import Any

from trainyard.core.errors import UserError, one_line
from trainyard.remote.credentials import redact
from trainyard.remote.fetch import OnBytes
from trainyard.remote.manifest import MANIFEST_FILE, manifest_text, read_manifest
from trainyard.remote.storage import FsspecStorage, open_storage

COPY_CHUNK_BYTES = 2**25
NUM_STREAMS = 8
"""Files that are copied at a time."""
PROGRESS_INTERVAL_S = 0.5


def upload_directory(directory: Path, storage: FsspecStorage, last: Sequence[str], on_bytes: OnBytes) -> None:
    """Copy all files of a directory. If that fails, the files that were copied are removed again."""
    files = {str(path.relative_to(directory)): path for path in sorted(directory.rglob("*")) if path.is_file()}
    try:
        _copy_files(files, storage, last, on_bytes)
    except BaseException as error:
        with suppress(Exception):  # the first error is the one to report
            for name in files:
                storage.remove(name)
        if isinstance(error, Exception) and not isinstance(error, UserError):
            raise UserError(f"{storage}: cannot be written: {one_line(error)}") from None
        raise


def upload_with_manifest(
    files: Mapping[str, Path], target: str, last: Sequence[str], overwrite: bool, on_bytes: OnBytes
) -> int:
    """Upload files, with a manifest before and after them; returns the bytes."""
    storage = open_storage(target)
    if not isinstance(storage, FsspecStorage):
        raise UserError(f"{target}: expected hf://OWNER/NAME or a URL such as s3://bucket/name")
    present = _present(storage)
    manifest = read_manifest(storage.store, storage.path, redact(target)) if MANIFEST_FILE in present else None
    stale = present - files.keys() - {MANIFEST_FILE}
    begun = set(manifest.files) if manifest and not manifest.is_complete else set()  # by an upload that did not finish
    if not overwrite and (stale - begun or (manifest and manifest.is_complete)):
        raise UserError(f"{redact(target)}: already exists and is not empty; --overwrite replaces it")

    def write_manifest(entries: dict[str, dict[str, Any]], is_complete: bool) -> None:
        with storage.write(MANIFEST_FILE) as file:
            file.write(manifest_text(entries, is_complete))

    try:
        storage.mkdir()
        write_manifest({name: {"size": path.stat().st_size} for name, path in files.items()}, is_complete=False)
        for name in (*reversed(_final_names(files, last)), *sorted(stale)):  # readers must not see old and new mixed
            if name in present:
                storage.remove(name)
        entries = _copy_files(files, storage, last, on_bytes)
        write_manifest(entries, is_complete=True)
    except UserError:
        raise
    except Exception as error:
        problem = f"cannot be written: {redact(one_line(error))}"
        raise UserError(f"{redact(target)}: {problem}; it is not complete; run the command again") from None
    return sum(entry["size"] for entry in entries.values())


def copy_all(
    sizes: Mapping[str, int], copy: Callable[[str, Callable[[int], None]], None], on_bytes: OnBytes, done: int = 0
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


def _copy_files(
    files: Mapping[str, Path], storage: FsspecStorage, last: Sequence[str], on_bytes: OnBytes
) -> dict[str, dict[str, Any]]:
    """Copy files to the store; returns size and SHA-256 of each, as they were sent."""
    entries: dict[str, dict[str, Any]] = {}

    def send(name: str, report: Callable[[int], None]) -> None:
        digest, size = hashlib.sha256(), 0
        directory, _, base = name.rpartition("/")
        parent = storage / directory if directory else storage
        parent.mkdir()
        with files[name].open("rb") as source, parent.write(base) as remote:
            while data := source.read(COPY_CHUNK_BYTES):
                remote.write(data)
                digest.update(data)
                size += len(data)
                report(len(data))
        entries[name] = {"size": size, "sha256": digest.hexdigest()}

    sizes = {name: path.stat().st_size for name, path in files.items()}
    final = _final_names(files, last)
    done = copy_all({name: size for name, size in sizes.items() if name not in final}, send, on_bytes)
    for name in final:
        done = copy_all({name: sizes[name]}, send, on_bytes, done)
    return entries


def _final_names(files: Mapping[str, Path], last: Sequence[str]) -> list[str]:
    """The files to send after all others, in the order of `last`, whatever their directories."""
    ranks = {name: last.index(base) for name in sorted(files) if (base := name.rpartition("/")[2]) in last}
    return sorted(ranks, key=ranks.__getitem__)


def _present(storage: FsspecStorage) -> set[str]:
    """Names of all files in the store below the target."""
    try:
        found = storage.store.list_files(storage.path)
    except Exception as error:
        raise UserError(f"{storage}: cannot be read: {redact(one_line(error))}") from None
    root = storage.path.strip("/")
    return {path.strip("/").removeprefix(root).strip("/") for path in found}
