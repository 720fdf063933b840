"""Which run owns a checkpoint.directory. No other run resumes from it unasked, saves next to it or removes from it.

A checkpoint belongs to the run in its manifest, wherever it is. The manifest has the identity of the run (run.json),
its configuration and its run directory. A run whose directory is lost, such as with the disk of a container, is
recognized by the latter two: the same command continues it.

A local directory is also locked (run_directory.py). Stores behind a URL have no locks: there, a process that trains
leaves a claim, and checks before each save that no other process has replaced it.
"""

import json
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

from trainyard.checkpoint import checkpoint as native
from trainyard.checkpoint.file_names import step_directory
from trainyard.checkpoint.shard_file import CorruptCheckpoint
from trainyard.config.checkpoint_schema import CheckpointSection
from trainyard.config.load import parse
from trainyard.config.schema import Config, LogSection
from trainyard.core.errors import UserError
from trainyard.metrics.run_directory import RunDirectory, is_training
from trainyard.remote.storage import LocalStorage, Storage, open_storage
from trainyard.run.checkpointing.config_check import FREE_KEYS, changed_keys

CLAIM_PREFIX = ".claim-"
Owner = dict[str, Any]
"""What a manifest or a claim says about its run: `run`, `run_directory` and `config`. Converted checkpoints have only
`config`."""


def owner_record(run: RunDirectory) -> Owner:
    """What every manifest and claim of a run says about it, besides its configuration."""
    return {"run": run.run_id, "run_directory": str(run.path.resolve())}


def lock_directories(
    section: CheckpointSection, log: LogSection, continued: RunDirectory | None, lost_run: str | None = None
) -> RunDirectory:
    """The directory of a run, new unless the run continues in one, with the lock of a local checkpoint.directory. A run
    that is refused leaves no directory behind. `lost_run`: of a run whose own directory is lost."""
    storage = open_storage(section.directory) if section.directory and section.saving_enabled else None
    run = continued or RunDirectory.create(Path(log.directory).expanduser(), log.name, lost_run)
    if isinstance(storage, LocalStorage):
        try:
            run.lock_checkpoints(storage.path)
        except UserError:
            if continued:
                run.close()
            else:
                run.discard()
            raise
    return run


def find_owner(storage: Storage) -> Owner | None:
    """The latest readable manifest in a directory of checkpoints; empty if none can be read; None if there is none."""
    found: Owner | None = None
    for parent in (storage, storage / "checkpoints"):
        for step in native.list_steps(parent):
            if native.is_committed(parent, step):
                found = {}
                with suppress(CorruptCheckpoint):
                    return native.read_commit_file(parent / step_directory(step))
    return found


def check_owner(
    owner: Owner | None,
    directory: str,
    run_ids: Collection[str | None],
    may_adopt: Callable[[Owner], bool] | None = None,
) -> str | None:
    """The run that owns a directory, None if it has no owner. Raises UserError unless this run may continue it.

    `run_ids` are the runs that it may continue: those with a run directory. `may_adopt` says whether also one without.
    """
    if owner is None:
        return None
    run_id = owner.get("run")
    if run_id in run_ids or (run_id is None and run_ids):
        return run_id
    if may_adopt and may_adopt(owner):
        return run_id
    name = owner_name(owner)
    place = f", {name} in {owner['run_directory']}" if "run_directory" in owner else f", {name}" if name else ""
    continues = f", or log.name={name} checkpoint.resume={directory}, which continues that run"
    raise UserError(
        f"it has the checkpoints of another run{place}; nearest: another directory"
        + (continues if name and (may_adopt or not run_ids) else "")
    )


def owner_name(owner: Owner) -> str | None:
    """The log.name of a run."""
    name: str | None = owner.get("config", {}).get("log", {}).get("name")
    return name


def is_lost_run(owner: Owner, config: Config) -> bool:
    """True if the same command started `owner` at the same place."""
    place = Path(config.log.directory).expanduser().resolve()
    if "run_directory" not in owner or Path(owner["run_directory"]).parent != place:
        return False
    try:
        saved = parse(owner["config"])
    except UserError:
        return False
    return saved.log.name == config.log.name and all(key in FREE_KEYS for key, _, _ in changed_keys(saved, config))


class DirectoryClaim:
    """The lock of a directory in a store without locks: a file that names the run of the process that saves there.

    Every process writes a file of its own and then looks for those of others, so that of two processes that start at
    the same time at least one sees the other.
    """

    def __init__(self, storage: Storage, run: RunDirectory, config: Config) -> None:
        self.storage, self.config = storage, config
        self.record = {**owner_record(run), "config": config.model_dump(mode="json")}
        self.name = f"{CLAIM_PREFIX}{uuid4().hex}"
        with storage.write(self.name) as file:
            file.write(json.dumps(self.record).encode())
        try:
            for name in storage.listdir():
                if name.startswith(CLAIM_PREFIX) and name != self.name:
                    self._replace(name)
        except BaseException:
            self.release()
            raise

    def _replace(self, name: str) -> None:
        """Remove the claim of a killed process of this run, or raise UserError."""
        try:
            with self.storage.open(name) as file:
                owner: Owner = json.loads(bytes(file.read(0, file.size)))
            place = owner["run_directory"]  # this process trains in its own
            is_lost = place == self.record["run_directory"] or not is_training(Path(place))
            if owner["run"] == self.record["run"] or (is_lost and is_lost_run(owner, self.config)):
                self.storage.remove(name)
                return
            run = f"the run {owner['config']['log']['name']} in {owner['run_directory']}"
        except FileNotFoundError:  # the other process has just ended
            return
        except (ValueError, TypeError, KeyError, EOFError):
            run = "another run"
        raise UserError(
            f"{run} is training in this directory, or was killed before its first save; nearest: another directory, or "
            f"remove {self.storage}/{name} if it was killed"
        )

    def check(self) -> None:
        """Raise UserError if another process has replaced this claim."""
        if self.storage.file_size(self.name) is None:
            raise UserError(f"{self.storage}: another process has taken over this directory")

    def release(self) -> None:
        with suppress(Exception):  # the next process of this run replaces it
            self.storage.remove(self.name)
