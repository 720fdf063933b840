"""Where a run of extract stands: what is complete, and where the dump is read on. Its directory says so by itself."""

import fcntl
import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from trainyard.core.atomic_files import atomic_write_text
from trainyard.core.errors import UserError
from trainyard.data.wikipedia.dump import DumpPosition, WikiDump

PROGRESS_FILE = ".extract.json"
LOCK_FILE = ".extract.lock"
SHARD_PATTERN = re.compile(r"wiki_\d{5,}\.jsonl(?:\.gz)?")


@dataclass(frozen=True)
class ExtractOptions:
    """What decides which bytes are written."""

    shard_size: int = 256 << 20
    """Bytes of JSON text in a shard, about."""
    namespaces: tuple[int, ...] = (0,)
    min_text: int = 0
    """Characters."""
    compress: bool = False
    """Shards are .jsonl.gz."""


START_POSITION = DumpPosition()


@dataclass
class ExtractState:
    """How far a run is. Its file has this as of the last complete shard."""

    place: DumpPosition = START_POSITION
    shards: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    """Articles, bytes of JSON, and pages skipped by reason."""
    finished: bool = False


@contextmanager
def lock_output(output: Path) -> Iterator[None]:
    """The directory is there and no other run writes to it meanwhile. What a killed one left half-written is gone."""
    try:
        output.mkdir(parents=True, exist_ok=True)
        lock = (output / LOCK_FILE).open("wb")
    except OSError as error:
        raise UserError(f"--output {output}: cannot be written: {error.strerror}") from None
    with lock:
        try:
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            raise UserError(f"--output {output}: another run writes there; wait for it, or name another") from None
        except OSError:
            pass  # a file system without locks
        for left in [*output.glob(".wiki_*.part"), *output.glob(f".{PROGRESS_FILE}.*.part")]:
            left.unlink()
        yield


def load_state(dumps: Sequence[WikiDump], output: Path, job: ExtractOptions, restart: bool) -> ExtractState:
    """Where a run goes on: at the beginning, after the last complete shard, or, finished, nowhere."""
    progress = output / PROGRESS_FILE
    there = sorted(path for path in output.iterdir() if SHARD_PATTERN.fullmatch(path.name))
    if restart:
        progress.unlink(missing_ok=True)
        for path in there:
            path.unlink()
        return ExtractState()
    if not progress.exists():
        if there:
            raise UserError(
                f"{output}: has {there[0].name}, but not {PROGRESS_FILE} beside it; --restart removes such files"
            )
        return ExtractState()
    try:
        saved = json.loads(progress.read_text())
        state = ExtractState(
            DumpPosition(*saved["place"]), int(saved["shards"]), Counter(saved["counts"]), saved["finished"]
        )
        before = dict(saved["job"])
    except (ValueError, KeyError, TypeError):
        raise UserError(f"{progress}: not what extract writes there; --restart begins anew") from None
    other = [key.replace("_", " ") for key, value in _describe_run(dumps, job).items() if before.get(key) != value]
    if other:
        raise UserError(f"{output}: was begun with other {', '.join(other)}; --restart begins anew")
    for number in range(state.shards):
        if not (output / shard_name(number, job)).exists():
            raise UserError(f"{output}: {shard_name(number, job)} is gone; --restart begins anew")
    return state


def shard_name(number: int, job: ExtractOptions) -> str:
    return f"wiki_{number:05d}.jsonl{'.gz' * job.compress}"


def save_state(dumps: Sequence[WikiDump], output: Path, job: ExtractOptions, state: ExtractState) -> None:
    saved = {**vars(state), "job": _describe_run(dumps, job)}
    atomic_write_text(output / PROGRESS_FILE, json.dumps(saved, indent=1) + "\n")


def _describe_run(dumps: Sequence[WikiDump], job: ExtractOptions) -> dict[str, Any]:
    """All that must be the same for a run to go on."""
    stats = [(dump.path.name, dump.path.stat()) for dump in dumps]
    files = [[name, stat.st_size, stat.st_mtime_ns] for name, stat in stats]
    return {"input": files, **asdict(job), "namespaces": list(job.namespaces)}
