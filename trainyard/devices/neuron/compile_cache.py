"""Inspect and repair the compile cache of neuronx-cc (XLA path) on disk.

    ROOT/neuronxcc-VERSION/MODULE_GRAPH+FLAGS/
        model.hlo_module.pb (formerly model.hlo.pb)  compile_flags.json  model.neff  model.done  model.log  *.lock

A failed compile leaves a log and no model.neff, and then fails every later run of the same graph. A killed run leaves a
lock, and every later run waits for it. The compiler cleans up neither.
"""

import fcntl
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from glob import glob
from pathlib import Path

import psutil

from trainyard.core.atomic_files import TRASH_PREFIX, remove_atomically
from trainyard.core.errors import UserError

DEFAULT_DIR = "/var/tmp/neuron-compile-cache"
URL_VARIABLE = "NEURON_COMPILE_CACHE_URL"
CACHE_DIR_FLAG = re.compile(r"(?:^|\s)--cache_dir(?:=|\s+)(\S+)")
ENTRY_PATH = re.compile(r"neuronxcc-(?P<version>[^/]+)/MODULE_[0-9a-f]+\+(?P<flags>[0-9a-f]{8})$")
GRAPH_FILES = {"model.hlo_module.pb", "model.hlo.pb"}
NO_FLAGS_HASH = "d41d8cd9"
LOG_TAIL_BYTES = 4000
"""Bytes of a log that an entry keeps."""


@dataclass(frozen=True)
class NeuronCacheEntry:
    """One graph of the cache."""

    path: Path
    compiler_version: str
    """Version of neuronx-cc."""
    flags_hash: str
    flags: tuple[str, ...]
    file_bytes: dict[str, int]
    """Size of each file."""
    modified_at: float
    """Latest modification time of any file in seconds since 1970."""
    log_tail: str
    """The end of model.log."""

    @property
    def key(self) -> str:
        return self.path.name

    @property
    def size_bytes(self) -> int:
        return sum(self.file_bytes.values())

    @property
    def locks(self) -> list[Path]:
        return [self.path / name for name in sorted(self.file_bytes) if name.endswith(".lock")]

    @property
    def state(self) -> str:
        """success: compiled; failed: the failure is cached; locked: being compiled, or its compiler was killed; empty:
        collected but not compiled."""
        names = self.file_bytes.keys()
        if {"model.neff", "model.done"} <= names:
            return "success"
        if "model.log" in names and "model.neff" not in names:
            return "failed"
        return "locked" if self.locks else "empty"


def cache_location(environ: Mapping[str, str] = os.environ) -> str:
    """Location of the cache: --cache_dir in the compiler flags wins over the variable. May be an s3:// URL."""
    flag = CACHE_DIR_FLAG.search(environ.get("NEURON_CC_FLAGS", ""))
    return flag[1] if flag else environ.get(URL_VARIABLE) or DEFAULT_DIR


def list_entries(root: Path | str) -> list[NeuronCacheEntry]:
    """All entries of a cache, sorted by name; unrelated files are ignored."""
    if "://" in str(root):
        raise UserError(f"{root}: only directories can be inspected; copy the cache to one first")
    directory = Path(root)
    if directory.exists() and not directory.is_dir():
        raise UserError(f"{root}: not a directory; a cache contains neuronxcc-VERSION directories")
    paths = sorted(directory / name for name in glob("neuronxcc-*/MODULE_*", root_dir=directory))
    matches = [(path, ENTRY_PATH.search(path.as_posix())) for path in paths if path.is_dir()]
    return [_read(path, match["version"], match["flags"]) for path, match in matches if match]


def _read(path: Path, compiler: str, flags_hash: str) -> NeuronCacheEntry:
    stats: dict[str, os.stat_result] = {}
    with suppress(OSError):
        for file in path.iterdir():
            with suppress(OSError):  # a compile is running: files come and go
                if file.is_file() and not file.is_symlink():
                    stats[file.name] = file.stat()
    file_bytes = {name: stat.st_size for name, stat in stats.items()}
    modified_at = max((stat.st_mtime for stat in stats.values()), default=0.0)
    flags, log_tail = _flags(path / "compile_flags.json"), _tail(path / "model.log")
    return NeuronCacheEntry(path, compiler, flags_hash, flags, file_bytes, modified_at, log_tail)


def _flags(path: Path) -> tuple[str, ...]:
    try:
        flags = json.loads(path.read_text())
    except (OSError, ValueError):
        return ()
    return tuple(map(str, flags)) if isinstance(flags, list) else (str(flags),)


def _tail(path: Path) -> str:
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - LOG_TAIL_BYTES))
            return file.read().decode(errors="replace").strip()
    except OSError:
        return ""


def entry_problems(entry: NeuronCacheEntry) -> list[str]:
    """Descriptions of everything that is wrong with an entry."""
    files = entry.file_bytes
    checks = {
        "failed, and will not be retried": entry.state == "failed",
        "no graph: cannot be recompiled": not GRAPH_FILES & files.keys(),
        "model.neff without model.done: truncated": "model.neff" in files and "model.done" not in files,
        "model.done without model.neff": "model.done" in files and "model.neff" not in files,
        "model.neff is empty": files.get("model.neff") == 0,
        "has flags, but its name says none": entry.flags_hash == NO_FLAGS_HASH and bool(entry.flags),
        "locked": bool(entry.locks) and entry.state != "success",
    }
    return [text for text, wrong in checks.items() if wrong]


def damaged_entries(entries: Iterable[NeuronCacheEntry]) -> list[NeuronCacheEntry]:
    """Entries with a problem other than a lock, which `clear_locks` removes, and not being compiled now."""
    return [entry for entry in entries if set(entry_problems(entry)) - {"locked"} and not is_being_compiled(entry)]


def running_commands() -> list[str]:
    """Command lines of all processes on this host."""
    return [" ".join(process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"])]


def stale_locks(
    entry: NeuronCacheEntry, minutes: float, running: Callable[[], list[str]] = running_commands
) -> list[Path]:
    """Locks without a holder: not locked by a process, at least `minutes` old, and no process on this host names the
    entry on its command line. Processes on other hosts are invisible, so only the age of their locks counts."""
    old = [lock for lock in entry.locks if _age_s(lock) >= 60 * minutes and not _is_locked(lock)]
    return [] if not old or any(entry.key in line for line in running()) else old


def clear_locks(
    entries: Iterable[NeuronCacheEntry],
    minutes: float = 60,
    force: bool = False,
    running: Callable[[], list[str]] = running_commands,
) -> list[Path]:
    """Remove stale locks, or all locks with `force`. Returns the removed ones."""
    removed = [lock for entry in entries for lock in (entry.locks if force else stale_locks(entry, minutes, running))]
    for lock in removed:
        lock.unlink(missing_ok=True)
    return removed


def remove_entries(
    entries: Iterable[NeuronCacheEntry],
    running: Callable[[], list[str]] = running_commands,
    force: bool = False,
) -> list[NeuronCacheEntry]:
    """Remove entries, without `force` only those not being compiled now. Returns the removed ones: their graphs will be
    compiled again."""
    removed = [entry for entry in entries if force or not is_being_compiled(entry, running)]
    for entry in removed:
        for leftover in entry.path.parent.glob(f"{TRASH_PREFIX}*"):  # of a killed removal
            shutil.rmtree(leftover, ignore_errors=True)
        remove_atomically(entry.path)
    return removed


def is_being_compiled(entry: NeuronCacheEntry, running: Callable[[], list[str]] = running_commands) -> bool:
    """True if a process on this host holds a lock of the entry or names it on its command line."""
    return bool(entry.locks) and stale_locks(entry, 0, running) != entry.locks


def _age_s(path: Path) -> float:
    """Age in seconds; negative if the file is gone."""
    try:
        return time.time() - path.stat().st_mtime
    except OSError:
        return -1.0


def _is_locked(lock: Path) -> bool:
    """True if a process holds the lock, by flock or by lockf."""
    try:
        with lock.open("r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True  # or unknown
    return False
