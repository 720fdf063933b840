"""List, verify and clean the inductor cache."""

import base64
import fcntl
import hashlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from trainyard.preflight.precompile.collect_graphs import STAGING_PREFIX
from trainyard.preflight.precompile.precompile import read_records
from trainyard.train.compile import inductor_cache

HASHED_PATH_DEPTH = {"fxgraph": 4, "aotautograd": 3}
"""torch's directories whose files are named by a hash of their content, and the number of parts of such a path."""


@dataclass(frozen=True)
class CachedGraph:
    """One compiled graph in the cache."""

    key: str
    size_bytes: int
    """Size of its index entry only, because graphs share code."""
    last_used: float
    """Last access in seconds since 1970, accurate to a day."""
    name: str
    """Phase, function and direction of the graph; empty unless it was precompiled."""
    compile_seconds: float
    """Compile time; 0 if unknown."""


def cache_dirs(root: Path) -> list[Path]:
    """All cache directories below a root: one per toolchain and, if hosts do not share, per host."""
    found = [
        path.parent
        for pattern in ("*", "host-*/*")
        for path in root.glob(f"{pattern}/{inductor_cache.FINGERPRINT_FILE}")
    ]
    return sorted(path for path in found if not path.name.startswith("."))


def list_graphs(cache_dir: Path) -> list[CachedGraph]:
    """All graphs of a cache, most recently used first."""
    recorded = {graph["key"]: graph for record in read_records(cache_dir) for graph in record["graphs"]}
    found = []
    for path in (cache_dir / "fxgraph").glob("*/*"):
        stats = [file.stat() for file in path.iterdir() if file.is_file()] if path.is_dir() else []
        if stats:
            graph = recorded.get(path.name, {})
            used = max(max(file.st_atime, file.st_mtime) for file in stats)
            size = sum(file.st_size for file in stats)
            found.append(CachedGraph(path.name, size, used, graph.get("name", ""), graph.get("seconds", 0.0)))
    return sorted(found, key=lambda entry: -entry.last_used)


def total_bytes(cache_dir: Path) -> int:
    total = 0
    for path in inductor_cache.list_files(cache_dir):
        with suppress(OSError):
            total += path.stat().st_size
    return total


def active_locks(cache_dir: Path) -> list[Path]:
    """Locks held by a process, which is compiling."""
    return [path for path in (cache_dir / "locks").glob("*.lock") if _is_locked(path)]


def clear_locks(cache_dir: Path) -> int:
    """Remove lock files without a holder and return their number. The system releases a lock when its process ends, so
    leftover files block nobody; they only accumulate."""
    unlocked = [path for path in (cache_dir / "locks").glob("*.lock") if not _is_locked(path)]
    for path in unlocked:
        path.unlink(missing_ok=True)
    return len(unlocked)


def find_damage(cache_dir: Path, on_progress: Callable[[int], None] = lambda count: None) -> dict[Path, str]:
    """Damaged files and what is wrong with them: truncated libraries, and entries that do not match their hash."""
    found = dict.fromkeys(inductor_cache.damaged_files(cache_dir), "truncated, or left by a killed compiler")
    for count, path in enumerate(inductor_cache.list_files(cache_dir), 1):
        on_progress(count)
        parts = path.relative_to(cache_dir).parts
        if HASHED_PATH_DEPTH.get(parts[0]) == len(parts) and path not in found and not path.name.startswith("."):
            with suppress(OSError):
                if entry_hash(path.read_bytes()) != path.name:
                    found[path] = "content does not match its hash"
    for path in cache_dir.glob(f"{STAGING_PREFIX}*"):
        if not _owner_alive(path):
            found[path] = "left by a killed precompile"
    return found


def entry_hash(content: bytes) -> str:
    """Name of an entry with this content (torch 2.11 to 2.14)."""
    return base64.b32encode(hashlib.sha256(content).digest())[:51].decode().lower()


def _is_locked(lock: Path) -> bool:
    try:
        with lock.open("r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True  # or unknown
    return False


def _owner_alive(staging: Path) -> bool:
    """True if the process whose id is in the name of this directory is still running."""
    number = staging.name.removeprefix(STAGING_PREFIX).partition("-")[0]
    return number.isdigit() and Path(f"/proc/{number}").exists()
