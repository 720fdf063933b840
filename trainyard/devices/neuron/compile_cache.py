"""The compile cache of neuronx-cc on disk (the XLA way): what is in it, what is wrong with it, and mending that.

    ROOT/neuronxcc-VERSION/MODULE_GRAPH+FLAGS/
        model.hlo_module.pb (before: model.hlo.pb)  compile_flags.json  model.neff  model.done  model.log  *.lock

A compile that failed leaves a log and no model.neff, and then fails every later run of the same graph. A run that was
killed leaves a lock, and then every later run waits. Nobody cleans up either by himself.
"""

import fcntl
import json
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from trainyard.core.errors import UserError

DEFAULT_DIR = "/var/tmp/neuron-compile-cache"
URL_VARIABLE = "NEURON_COMPILE_CACHE_URL"
STATES = ("success", "failed", "locked", "empty")
"""success: compiled; failed: its failure is kept; locked: somebody compiles it, or did when killed; empty: collected
and not compiled yet."""
VERSION_DIR = re.compile(r"neuronxcc-(?P<version>.+)")
MODULE_DIR = re.compile(r"MODULE_(?P<graph>[0-9a-f]+)\+(?P<flags>[0-9a-f]{8})")
GRAPH_FILES = ("model.hlo_module.pb", "model.hlo.pb")
NO_FLAGS_HASH = "d41d8cd9"
TRASH_PREFIX = ".removed-"
LOG_TAIL_BYTES = 4000
"""Bytes of a log that are kept."""


@dataclass(frozen=True)
class NeuronCacheEntry:
    path: Path
    compiler_version: str
    """Version of neuronx-cc."""
    graph_hash: str
    """Hash of the graph."""
    flags_hash: str
    state: str
    """One of STATES."""
    flags: tuple[str, ...]
    size_bytes: int
    collected_at: float
    """When its graph was written, in seconds since 1970; 0: there is none."""
    modified_at: float
    """When anything of it was written last."""
    locks: tuple[Path, ...]
    log_tail: str
    """The end of model.log."""

    @property
    def key(self) -> str:
        return self.path.name


def cache_location(environ: Mapping[str, str] = os.environ) -> str:
    """Where neuronx-cc keeps what it compiles: --cache_dir of its flags wins over the variable. May be an s3:// URL."""
    words = environ.get("NEURON_CC_FLAGS", "").split()
    for number, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name == "--cache_dir":
            found = value if equals else "".join(words[number + 1 : number + 2])
            if found:
                return found
    return environ.get(URL_VARIABLE) or DEFAULT_DIR


def list_entries(root: Path | str) -> list[NeuronCacheEntry]:
    """All of a cache, in the order of their names; what does not belong there is passed over."""
    if "://" in str(root):
        raise UserError(f"{root}: only directories can be looked into; copy it to one first")
    place = Path(root)
    if place.exists() and not place.is_dir():
        raise UserError(f"{root}: not a directory; a cache holds neuronxcc-VERSION directories")
    found: list[NeuronCacheEntry] = []
    for version in _subdirectories(place):
        compiler = VERSION_DIR.fullmatch(version.name)
        for path in _subdirectories(version) if compiler else ():
            module = MODULE_DIR.fullmatch(path.name)
            if compiler and module:
                found.append(_read(path, compiler["version"], module["graph"], module["flags"]))
    return found


def _subdirectories(path: Path) -> list[Path]:
    try:
        return sorted(each for each in path.iterdir() if each.is_dir())
    except OSError:  # not there, gone in the meantime, or somebody else's
        return []


def _read(path: Path, compiler: str, graph: str, flags_hash: str) -> NeuronCacheEntry:
    files: dict[str, os.stat_result] = {}
    with suppress(OSError):
        for each in path.iterdir():
            with suppress(OSError):  # a compile goes on: files come and go
                if each.is_file() and not each.is_symlink():
                    files[each.name] = each.stat()
    locks = tuple(path / name for name in sorted(files) if name.endswith(".lock"))
    return NeuronCacheEntry(
        path=path,
        compiler_version=compiler,
        graph_hash=graph,
        flags_hash=flags_hash,
        state=_state(files.keys(), bool(locks)),
        flags=_flags(path / "compile_flags.json"),
        size_bytes=sum(each.st_size for each in files.values()),
        collected_at=next((files[name].st_mtime for name in GRAPH_FILES if name in files), 0.0),
        modified_at=max((each.st_mtime for each in files.values()), default=0.0),
        locks=locks,
        log_tail=_tail(path / "model.log"),
    )


def _state(names: Iterable[str], locked: bool) -> str:
    names = set(names)
    if {"model.neff", "model.done"} <= names:
        return "success"
    if "model.log" in names and "model.neff" not in names:
        return "failed"
    return "locked" if locked else "empty"


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
    """What is not as a compiler leaves it."""
    names = {path.name for path in entry.path.iterdir()} if entry.path.is_dir() else set()
    neff = entry.path / "model.neff"
    found = {
        "failed before, and is not tried again": entry.state == "failed",
        "no graph: it cannot be compiled again": not names.intersection(GRAPH_FILES),
        "model.neff without model.done: cut off": "model.neff" in names and "model.done" not in names,
        "model.done without model.neff": "model.done" in names and "model.neff" not in names,
        "model.neff is empty": "model.neff" in names and neff.stat().st_size == 0,
        "flags, though its name says none": entry.flags_hash == NO_FLAGS_HASH and bool(entry.flags),
        "locked": bool(entry.locks) and entry.state != "success",
    }
    return [text for text, wrong in found.items() if wrong]


def running_commands() -> list[str]:
    """What runs on this host, one line each."""
    return [" ".join(process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"])]


def stale_locks(
    entry: NeuronCacheEntry, minutes: float, running: Callable[[], list[str]] = running_commands
) -> list[Path]:
    """Locks that nobody holds: none that a process has locked, none younger than `minutes`, and none at all while a
    process on this host names the entry. A process on another host cannot be seen: its lock counts by age alone."""
    old = [lock for lock in entry.locks if _age_s(lock) >= 60 * minutes and not _is_locked(lock)]
    return [] if not old or any(entry.key in line for line in running()) else old


def clear_locks(
    found: Iterable[NeuronCacheEntry],
    minutes: float = 60,
    force: bool = False,
    running: Callable[[], list[str]] = running_commands,
) -> list[Path]:
    """Remove stale locks; with `force` all of them. Gives those that are gone."""
    gone = [lock for entry in found for lock in (entry.locks if force else stale_locks(entry, minutes, running))]
    for lock in gone:
        lock.unlink(missing_ok=True)
    return gone


def remove_failed(
    found: Iterable[NeuronCacheEntry], running: Callable[[], list[str]] = running_commands
) -> list[NeuronCacheEntry]:
    """Remove entries that hold a failure, so that their graphs are compiled again. One that is being compiled again
    just now stays. Gives those that are gone."""
    gone = [
        entry for entry in found if entry.state == "failed" and len(stale_locks(entry, 0, running)) == len(entry.locks)
    ]
    for entry in gone:
        _remove(entry.path)
    return gone


def _remove(path: Path) -> None:
    """Out of sight in one move, then gone: a half-removed entry would look like another state."""
    for left in path.parent.glob(f"{TRASH_PREFIX}*"):
        shutil.rmtree(left, ignore_errors=True)
    aside = Path(tempfile.mkdtemp(dir=path.parent, prefix=TRASH_PREFIX))
    os.replace(path, aside / path.name)
    shutil.rmtree(aside)


def _age_s(path: Path) -> float:
    """In seconds; what is gone is new."""
    try:
        return time.time() - path.stat().st_mtime
    except OSError:
        return -1.0


def _is_locked(lock: Path) -> bool:
    """Whether a process has it locked, in either of the two ways that there are."""
    try:
        with lock.open("r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True  # also where it cannot be known
    return False
