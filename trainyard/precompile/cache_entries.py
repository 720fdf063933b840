"""The cache of compiled code: what is in it, what is damaged, and clearing up."""

import base64
import fcntl
import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from trainyard.compile import inductor_cache
from trainyard.precompile.precompile import read_records

HASHED_PATH_DEPTH = {"fxgraph": 4, "aotautograd": 3}
"""torch's directories whose files are named by a hash of what they hold, and how many names such a path has."""
STAGING_PREFIX = ".sealing-"
TRASH_PREFIX = ".removed-"


@dataclass(frozen=True)
class CachedGraph:
    """One compiled graph."""

    key: str
    size_bytes: int
    """Of its entry alone: graphs share code."""
    last_used: float
    """When it was read or written last, in seconds since 1970, good to a day."""
    name: str
    """What it computes, where it was precompiled."""
    compile_seconds: float
    """To compile it; 0 where that is not known."""


def cache_dirs(root: Path) -> list[Path]:
    """The caches below: one for each toolchain, and for each host where hosts do not share."""
    found = [
        path.parent
        for pattern in ("*", "host-*/*")
        for path in root.glob(f"{pattern}/{inductor_cache.FINGERPRINT_FILE}")
    ]
    return sorted(path for path in found if not path.name.startswith("."))


def list_graphs(place: Path) -> list[CachedGraph]:
    """Newest first."""
    known = {graph["key"]: graph for record in read_records(place) for graph in record["graphs"]}
    found = []
    for path in (place / "fxgraph").glob("*/*"):
        about = [each.stat() for each in path.iterdir() if each.is_file()] if path.is_dir() else []
        if about:
            graph = known.get(path.name, {})
            used = max(max(each.st_atime, each.st_mtime) for each in about)
            size = sum(each.st_size for each in about)
            found.append(CachedGraph(path.name, size, used, graph.get("name", ""), graph.get("seconds", 0.0)))
    return sorted(found, key=lambda entry: -entry.last_used)


def total_bytes(place: Path) -> int:
    total = 0
    for path in inductor_cache.list_files(place):
        with suppress(OSError):
            total += path.stat().st_size
    return total


def active_locks(place: Path) -> list[Path]:
    """Locks that a process has: something is being compiled."""
    return [path for path in (place / "locks").glob("*.lock") if _is_locked(path)]


def clear_locks(place: Path) -> int:
    """Remove the locks that nobody holds. torch's are let go by the system when their process ends, so that a file left
    behind stops nobody; they are only many."""
    free = [path for path in (place / "locks").glob("*.lock") if not _is_locked(path)]
    for path in free:
        path.unlink(missing_ok=True)
    return len(free)


def find_damage(place: Path, on_progress: Callable[[int], None] = lambda count: None) -> dict[Path, str]:
    """Damaged files, with what is wrong: libraries that are cut off, entries that are not what their name says."""
    found = dict.fromkeys(inductor_cache.damaged_files(place), "cut off, or left by a killed compiler")
    for count, path in enumerate(inductor_cache.list_files(place), 1):
        on_progress(count)
        names = path.relative_to(place).parts
        if HASHED_PATH_DEPTH.get(names[0]) == len(names) and path not in found and not path.name.startswith("."):
            with suppress(OSError):
                if entry_hash(path.read_bytes()) != path.name:
                    found[path] = "not what its name says"
    for path in place.glob(f"{STAGING_PREFIX}*"):
        if not _owner_alive(path):
            found[path] = "left by a killed precompile"
    return found


def remove_atomically(path: Path) -> None:
    """Out of sight in one move, then gone: nobody meets half of it."""
    if not path.is_dir():
        path.unlink(missing_ok=True)
        return
    aside = Path(tempfile.mkdtemp(dir=path.parent, prefix=TRASH_PREFIX))
    os.replace(path, aside / path.name)
    shutil.rmtree(aside)


def entry_hash(content: bytes) -> str:
    """As torch names entries (torch 2.11 to 2.14)."""
    return base64.b32encode(hashlib.sha256(content).digest())[:51].decode().lower()


def _is_locked(lock: Path) -> bool:
    try:
        with lock.open("r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True  # also where it cannot be known
    return False


def _owner_alive(sealing: Path) -> bool:
    """Whether the process that made this directory, whose number it holds, still runs here."""
    number = sealing.name.removeprefix(STAGING_PREFIX).partition("-")[0]
    return number.isdigit() and Path(f"/proc/{number}").exists()
