"""Progress of `trainyard data extract`, stored in the output directory: the complete shards, and where to resume."""

import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from trainyard.core.atomic_files import atomic_write_text
from trainyard.core.errors import UserError
from trainyard.core.file_lock import file_lock
from trainyard.prepare.wikipedia.dump import DumpPosition, WikiDump

PROGRESS_FILE = ".extract.json"
LOCK_FILE = ".extract.lock"
SHARD_PATTERN = re.compile(r"wiki_\d{5,}\.jsonl(?:\.gz)?")


@dataclass(frozen=True)
class ExtractOptions:
    """Everything besides the dumps that determines the output bytes."""

    shard_size: int = 256 << 20
    """Approximate bytes of JSON text per shard."""
    namespaces: tuple[int, ...] = (0,)
    min_text: int = 0
    """Minimum characters of an article."""
    compress: bool = False
    """Write .jsonl.gz."""


START_POSITION = DumpPosition()


@dataclass
class ExtractState:
    """Progress of a run. The progress file holds it as of the last complete shard."""

    position: DumpPosition = START_POSITION
    shards: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    """Articles, bytes of JSON, and skipped pages by reason."""
    finished: bool = False


@contextmanager
def lock_output(output: Path) -> Iterator[None]:
    """Create the directory, keep other runs from writing to it, and remove incomplete files of a killed run."""
    lock = output / LOCK_FILE
    try:
        output.mkdir(parents=True, exist_ok=True)
        lock.touch()
    except OSError as error:
        raise UserError(f"--output {output}: cannot be written: {error.strerror}") from None

    def busy() -> NoReturn:
        raise UserError(f"--output {output}: another run is writing there; wait for it, or use another directory")

    with file_lock(lock, busy):
        for path in [*output.glob(".wiki_*.part"), *output.glob(f".{PROGRESS_FILE}.*.part")]:
            path.unlink()
        yield


def load_state(dumps: Sequence[WikiDump], output: Path, options: ExtractOptions, restart: bool) -> ExtractState:
    """The state to resume from: the start, the end of the last complete shard, or finished."""
    progress = output / PROGRESS_FILE
    shards = sorted(path for path in output.iterdir() if SHARD_PATTERN.fullmatch(path.name))
    if restart:
        progress.unlink(missing_ok=True)
        for path in shards:
            path.unlink()
        return ExtractState()
    if not progress.exists():
        if shards:
            raise UserError(f"{output}: has {shards[0].name} but no {PROGRESS_FILE}; --restart removes such files")
        return ExtractState()
    try:
        saved = json.loads(progress.read_text())
        position, counts = DumpPosition(*saved["place"]), Counter(saved["counts"])
        state = ExtractState(position, int(saved["shards"]), counts, saved["finished"])
        previous = dict(saved["job"])
    except (ValueError, KeyError, TypeError):
        raise UserError(f"{progress}: not a progress file of extract; pass --restart to start over") from None
    changed = [
        key.replace("_", " ") for key, value in _describe_run(dumps, options).items() if previous.get(key) != value
    ]
    if changed:
        raise UserError(
            f"{output}: the previous run used a different {', '.join(changed)}; pass --restart to start over"
        )
    for index in range(state.shards):
        if not (output / shard_name(index, options)).exists():
            raise UserError(f"{output}: {shard_name(index, options)} is missing; pass --restart to start over")
    return state


def shard_name(index: int, options: ExtractOptions) -> str:
    return f"wiki_{index:05d}.jsonl{'.gz' * options.compress}"


def save_state(dumps: Sequence[WikiDump], output: Path, options: ExtractOptions, state: ExtractState) -> None:
    saved = {
        "place": state.position,
        "shards": state.shards,
        "counts": state.counts,
        "finished": state.finished,
        "job": _describe_run(dumps, options),
    }
    atomic_write_text(output / PROGRESS_FILE, json.dumps(saved, indent=1) + "\n")


def _describe_run(dumps: Sequence[WikiDump], options: ExtractOptions) -> dict[str, Any]:
    """Everything that must be unchanged for a run to resume."""
    stats = [(dump.path.name, dump.path.stat()) for dump in dumps]
    files = [[name, stat.st_size, stat.st_mtime_ns] for name, stat in stats]
    return {"input": files, **asdict(options), "namespaces": list(options.namespaces)}
