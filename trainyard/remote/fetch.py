"""Downloads files in parallel, by ranges, into a staging directory that a later call resumes.

    .NAME.part/                 next to the target NAME
        lock                    held by the process that downloads; others wait
        journal.jsonl           size and version of each file, and the chunks of it that are on disk
        files/                  the data; renamed to NAME when everything is complete and checked

A chunk enters the journal after its data is on disk. A file whose version at the source differs from the journal's
starts again. So the target is complete or absent, whenever a process or a machine ends.
"""

import fcntl
import json
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from trainyard.core.atomic_files import fsync_directory, replace_directory
from trainyard.core.disk_space import check_space
from trainyard.core.errors import UserError, is_disk_full
from trainyard.remote.location import is_name_below
from trainyard.remote.sources import retry
from trainyard.remote.sources.remote_file import RemoteFile, SourceChanged
from trainyard.remote.sources.retry import TransferError

CHUNK_BYTES = 2**24
NUM_STREAMS = 8
"""Ranges that are transferred at a time."""
PROGRESS_INTERVAL_S = 0.2
MAX_CHANGES = 3
"""Times that files may change at the source during a download."""

OnBytes = Callable[[int, int], None]
"""Called with the bytes downloaded so far and their total."""
logger = logging.getLogger(__name__)


def ignore_bytes(done: int, total: int) -> None:
    """An OnBytes that shows nothing."""


def download(
    list_files: Callable[[], Sequence[RemoteFile]],
    target: Path,
    on_bytes: OnBytes = ignore_bytes,
    finish: Callable[[Path], Path | None] | None = None,
    streams: int = NUM_STREAMS,
    replace: bool = False,
) -> None:
    """Download files to `target`, which appears when all are complete and checked: a directory of them.

    `list_files` asks the source; it is called again if files change meanwhile. `finish` may replace the directory of
    complete files by something else to be renamed: one file of it, its unpacked content, or nothing. If another process
    downloads to the same target, this one waits; a target that exists by then is taken as it is, unless `replace` is
    set: then the new one takes its place.
    """
    staging = staging_directory(target)
    try:
        before = _identity(target)
        with _lock(staging):
            if os.path.lexists(target) and not (replace and _identity(target) == before):
                shutil.rmtree(staging, ignore_errors=True)
                return
            try:
                for change in range(MAX_CHANGES):
                    try:
                        _fetch(list_files(), staging, on_bytes, streams)
                        break
                    except SourceChanged as error:
                        if change == MAX_CHANGES - 1:
                            raise UserError(f"{error}, again and again; try later") from None
                        logger.warning("%s; starting again", error)
                complete = finish(staging / "files") if finish else staging / "files"
                if complete:
                    _rename(complete, target, replace)
            except UserError:
                if any(path.is_file() and path.stat().st_size for path in (staging / "files").rglob("*")):
                    raise  # the next attempt needs it
                shutil.rmtree(staging, ignore_errors=True)
                raise
            shutil.rmtree(staging, ignore_errors=True)
    except TransferError as error:
        raise UserError(f"{error}; gave up after {retry.MAX_ATTEMPTS} attempts; the same command continues") from None
    except OSError as error:
        raise _storage_error(target, error) from None


def staging_directory(target: Path) -> Path:
    return target.with_name(f".{target.name}.part")


def _rename(complete: Path, target: Path, replace: bool) -> None:
    """Give the complete file or directory its name."""
    if os.path.lexists(target) and not replace:
        raise UserError(f"{target}: appeared during the download; it is left as it is")
    if target.is_dir() and not target.is_symlink():
        replace_directory(complete, target)
    else:
        os.replace(complete, target)
        fsync_directory(target.parent)


def _identity(path: Path) -> tuple[int, int] | None:
    """Tells whether a path was replaced meanwhile."""
    with suppress(OSError):
        status = path.lstat()
        return status.st_ino, status.st_mtime_ns
    return None


@dataclass
class _Progress:
    """What is on disk of one file."""

    file: RemoteFile
    path: Path
    done: set[int] = field(default_factory=set)
    """First bytes of complete chunks."""
    remaining: int = 0
    """Chunks that are not complete."""

    @property
    def done_bytes(self) -> int:
        size = self.file.size or 0
        return sum(min(CHUNK_BYTES, size - start) for start in self.done)


class _Stopped(Exception):
    """Another chunk failed."""


class _Transfer:
    """One call of `_fetch`: the state that its threads share."""

    def __init__(self, staging: Path) -> None:
        self.root, self.journal_path = staging / "files", staging / "journal.jsonl"
        self.stopped = threading.Event()
        self.lock = threading.Lock()
        self.new_bytes = 0
        self.reported_until = 0.0
        """When a wait that was reported ends, in seconds of the monotonic clock."""
        self.journal = self.journal_path.open("a", encoding="utf-8")

    def record(self, entry: dict[str, object]) -> None:
        with self.lock:
            self.journal.write(json.dumps(entry) + "\n")
            self.journal.flush()

    def prepare(self, file: RemoteFile, old: dict[str, dict[str, object]]) -> _Progress:
        """Decide what of a file need not be transferred again."""
        if not is_name_below(file.name):
            raise UserError(f"{file.label}: {file.name!r} cannot be the name of a local file")
        progress = _Progress(file, self.root / file.name)
        progress.path.parent.mkdir(parents=True, exist_ok=True)
        entry = old.get(file.name)
        same = entry and (entry["size"], entry["version"], entry["chunk"]) == (file.size, file.version, CHUNK_BYTES)
        if same and file.resumable and progress.path.is_file():
            progress.done = set(entry["done"]) if entry and isinstance(entry["done"], set) else set()
        else:
            progress.path.unlink(missing_ok=True)
            self.record({"file": file.name, "size": file.size, "version": file.version, "chunk": CHUNK_BYTES})
        return progress

    def chunks(self, progress: _Progress) -> list[tuple[_Progress, int, int | None]]:
        file = progress.file
        if not file.has_ranges or file.size is None:
            starts: list[tuple[int, int | None]] = [(0, file.size)]
        else:
            size = file.size
            starts = [(start, min(start + CHUNK_BYTES, size)) for start in range(0, size, CHUNK_BYTES)]
        missing = [(progress, start, stop) for start, stop in starts if start not in progress.done]
        progress.remaining = len(missing)
        return missing

    def transfer(self, progress: _Progress, start: int, stop: int | None) -> None:
        """Transfer one chunk, with as many attempts as it takes; then check the file if it is complete."""
        handle = os.open(progress.path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
        try:
            self._transfer_range(progress.file, handle, start, stop)
            os.fdatasync(handle)
        finally:
            os.close(handle)
        if progress.file.has_ranges:
            self.record({"file": progress.file.name, "done": start})
        with self.lock:
            progress.remaining -= 1
            complete = progress.remaining == 0
        if complete:
            self.check(progress)

    def _transfer_range(self, file: RemoteFile, handle: int, start: int, stop: int | None) -> None:
        position, attempt = start, 0
        while stop is None or position < stop:
            try:
                for block in file.reader.read(position, stop):
                    if self.stopped.is_set():
                        raise _Stopped
                    _write_all(handle, block, position)
                    position += len(block)
                    if file.has_ranges:
                        attempt = 0
                    with self.lock:
                        self.new_bytes += len(block)
                if stop is None:
                    return
                if position < stop:
                    raise TransferError(f"{file.label}: the connection ended early")
            except TransferError as error:
                attempt += 1
                delay = retry.delay_before(attempt, error)
                if delay is None:
                    raise
                if not file.has_ranges:
                    with self.lock:
                        self.new_bytes -= position - start
                    position = start
                    os.ftruncate(handle, 0)
                with self.lock:  # the other streams wait for the same server
                    is_reported = time.monotonic() < self.reported_until
                    self.reported_until = max(self.reported_until, time.monotonic() + delay)
                if not is_reported:
                    retry.report_wait(error, delay)
                if self.stopped.wait(delay):
                    raise _Stopped from None

    def check(self, progress: _Progress) -> None:
        """Check size and checksum of a complete file. A wrong one is removed, so that the next attempt starts again."""
        file, path = progress.file, progress.path
        if not path.exists():
            path.touch()  # an empty file has no chunks
        problem = ""
        size = path.stat().st_size
        if file.size is not None and size != file.size:
            problem = f"has {size:,} bytes instead of {file.size:,}"
        elif (checksum := file.reader.checksum()) and (found := checksum.compute(path)) != checksum.digest.lower():
            problem = f"its {checksum.algorithm} is {found} instead of {checksum.digest.lower()}"
        if problem:
            path.unlink()
            self.record({"file": file.name, "size": None, "version": None, "chunk": 0})
            raise UserError(f"{file.label}: {problem}; it was removed; the file or the connection is damaged")


def _fetch(files: Sequence[RemoteFile], staging: Path, on_bytes: OnBytes, streams: int) -> None:
    """Complete all files of a staging directory."""
    state = _Transfer(staging)
    pool = ThreadPoolExecutor(streams)
    try:
        old = _read_journal(state.journal_path)
        all_progress = [state.prepare(file, old) for file in files]
        _remove_others(state.root, {progress.path for progress in all_progress})
        chunks = [chunk for progress in all_progress for chunk in state.chunks(progress)]
        total = sum(file.size or 0 for file in files)
        already = sum(progress.done_bytes for progress in all_progress)
        check_space(staging, total - already, staging.name.removeprefix(".").removesuffix(".part"))
        pending = {pool.submit(state.transfer, *chunk) for chunk in chunks}
        complete = [progress for progress in all_progress if not progress.remaining]
        pending |= {pool.submit(state.check, progress) for progress in complete}  # resumed, or empty
        on_bytes(already, total)
        while pending:
            finished, pending = wait(pending, PROGRESS_INTERVAL_S, FIRST_EXCEPTION)
            for future in finished:
                future.result()
            on_bytes(already + state.new_bytes, max(total, already + state.new_bytes))
    finally:
        state.stopped.set()
        pool.shutdown(cancel_futures=True)
        state.journal.close()


def _read_journal(path: Path) -> dict[str, dict[str, object]]:
    """Size, version and complete chunks of each file. A line that a crash cut is ignored."""
    entries: dict[str, dict[str, object]] = {}
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            entry = json.loads(line)
            name = entry["file"]
            if "done" in entry:
                done = entries[name]["done"]
                assert isinstance(done, set)
                done.add(int(entry["done"]))
            else:
                entries[name] = {key: entry[key] for key in ("size", "version", "chunk")} | {"done": set()}
        except (ValueError, KeyError, TypeError):
            continue
    return entries


def _remove_others(root: Path, wanted: set[Path]) -> None:
    """Remove files of an earlier attempt that the source no longer has."""
    for path in root.rglob("*"):
        if path not in wanted and not path.is_dir():
            path.unlink()


def _write_all(handle: int, block: bytes, position: int) -> None:
    view = memoryview(block)
    while view:
        count = os.pwrite(handle, view, position)
        view, position = view[count:], position + count


@contextmanager
def _lock(staging: Path) -> Iterator[None]:
    """Create the staging directory and hold its lock. On file systems without locks, there is none."""
    while True:
        (staging / "files").mkdir(parents=True, exist_ok=True)
        handle = os.open(staging / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                logger.info("%s: another process is downloading it; waiting", staging)
                fcntl.flock(handle, fcntl.LOCK_EX)
            except OSError as error:
                logger.debug("%s: no lock: %s", staging, error)
            if not _is_current(handle, staging / "lock"):  # the other process has finished and removed it
                continue
            yield
            return
        finally:
            os.close(handle)


def _is_current(handle: int, path: Path) -> bool:
    with suppress(OSError):
        return os.path.samestat(os.fstat(handle), path.stat())
    return False


def _storage_error(target: Path, error: OSError) -> UserError:
    if is_disk_full(error):
        return UserError(f"{target}: the disk is full; free some space, and the same command continues")
    return UserError(f"{target}: cannot be written: {error.strerror or error}")
