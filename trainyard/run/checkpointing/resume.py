"""Resumes from a checkpoint: finds the latest valid one and loads every rank's slices, at any layout."""

import logging
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from trainyard.checkpoint import checkpoint as native
from trainyard.checkpoint.checkpoint import Checkpoint
from trainyard.checkpoint.file_names import COMMIT_FILE, shard_name, step_directory
from trainyard.checkpoint.partition import rank_slices
from trainyard.checkpoint.shard_file import CorruptCheckpoint
from trainyard.checkpoint.weights import BaseWeights, frozen_tensors
from trainyard.config.checkpoint_schema import CheckpointSection
from trainyard.config.optimizer_schema import OptimizerSection
from trainyard.config.schema import Config, LogSection
from trainyard.core.errors import UserError
from trainyard.core.yaml_io import read_yaml
from trainyard.devices import Device
from trainyard.families import ModelConfig
from trainyard.families.blueprint import Blueprint
from trainyard.formats.registry import FORMAT_DESCRIPTIONS, detect_format
from trainyard.metrics.run_directory import RunDirectory, find_run_directories, read_identity
from trainyard.parallel.mesh import Mesh
from trainyard.parallel.rank_context import RankContext
from trainyard.remote.local_copies import is_remote_model, pin_revision
from trainyard.remote.location import is_url
from trainyard.remote.storage import LocalStorage, Storage, open_storage
from trainyard.run.checkpointing.config_check import expected_kinds
from trainyard.run.checkpointing.directory_owner import Owner, check_owner, find_owner, is_lost_run, owner_name
from trainyard.run.checkpointing.memory_checkpoint import find_memory_checkpoint
from trainyard.run.checkpointing.rng_state import restore_rng_state
from trainyard.train.optim.optimizer import Optimizer

logger = logging.getLogger(__name__)


class ResumePoint(NamedTuple):
    """What a run continues."""

    run: RunDirectory | None = None
    """The directory to continue in, locked by the first rank; None: a new one."""
    checkpoint: Checkpoint | None = None
    lost_run: str | None = None
    """Identity of the run that continues in a new directory because its own is lost."""


def find_checkpoint(location: str | Path, mesh: Mesh, device: Device, run_id: str | None = None) -> Checkpoint | None:
    """Open the checkpoint at `location`, or the latest valid one in that directory or in its subdirectory checkpoints/.

    Invalid ones, and with `run_id` those of other runs, are logged and skipped. Returns None if none was ever
    completed; raises CorruptCheckpoint if all complete ones are damaged. All ranks call this; each verifies some of the
    files.
    """
    storage = open_storage(location)
    if mesh.broadcast_object(lambda: storage.file_size(COMMIT_FILE) is not None, device):
        checkpoint, problem = _open_verified(storage, mesh)
        if not checkpoint:
            raise UserError(problem)
        return checkpoint

    parents = (storage, storage / "checkpoints")

    def list_checkpoints() -> tuple[int, list[tuple[int, bool]]]:
        index = next((index for index, parent in enumerate(parents) if native.list_steps(parent)), 0)
        return index, [(step, native.is_committed(parents[index], step)) for step in native.list_steps(parents[index])]

    index, steps = mesh.broadcast_object(list_checkpoints, device)
    any_damaged = False
    for step, is_committed in steps:
        directory = parents[index] / step_directory(step)
        if not is_committed:
            logger.warning("skipping %s: it was never completed", directory)
            continue
        checkpoint, problem = _open_verified(directory, mesh)
        if checkpoint and (run_id is None or checkpoint.manifest.get("run", run_id) == run_id):
            return checkpoint
        any_damaged = any_damaged or checkpoint is None
        if checkpoint:
            checkpoint.close()
            problem = f"{directory}: it belongs to another run"
        logger.warning("skipping %s", problem)
    if any_damaged:
        raise CorruptCheckpoint(
            f"{parents[index]}: every complete checkpoint is damaged; "
            "nearest: checkpoint.resume=none, which starts from step 0"
        )
    return None


def find_resume_point(config: Config, mesh: Mesh, device: Device, own_directory: Path | None = None) -> ResumePoint:
    """Where and from which checkpoint a run continues. Raises UserError if checkpoint.directory has the checkpoints of
    another run; nothing is written before that is known.

    With `own_directory`, the run continues there: from its latest checkpoint or, if it has none, as the configuration
    says.
    """
    section = config.checkpoint
    if not own_directory and section.resume == "none" and not (section.directory and section.saving_enabled):
        return ResumePoint()  # there is no directory that could be another run's
    is_lost = partial(is_lost_run, config=config)
    find_runs = partial(_runs_to_continue, section, config.log, is_lost, own_directory)
    paths, lost_run = mesh.broadcast_object(find_runs, device)
    is_source = section.resume not in ("auto", "none") and not section.weights_only
    for path, run_id in paths.items():
        with ExitStack() as stack:  # releases the directory unless there is a checkpoint
            run = stack.enter_context(mesh.broadcast_object(partial(RunDirectory.open, path, config.log.name), device))
            locations = mesh.broadcast_object(partial(_checkpoint_locations, path, section.directory), device)
            saved = next(filter(None, (find_checkpoint(each, mesh, device, run_id) for each in locations)), None)
            checkpoint = _newer_in_memory(section, run, saved, mesh) if saved or own_directory else None
            if own_directory and not checkpoint and is_source and _location(section.resume) != own_directory.resolve():
                checkpoint = _find_source(section.resume, config.optimizer, mesh, device)
            if checkpoint:
                _check_kinds(checkpoint, config.optimizer, section.resume)
            if checkpoint and not own_directory and mesh.layout_rank == 0:
                native.remove_incomplete(open_storage(run.path))
            if checkpoint or own_directory:
                stack.pop_all()
                return ResumePoint(run, checkpoint)
        if section.resume == "auto":
            logger.warning("skipping %s: it has no complete checkpoint", locations[0])
    if lost_run and (checkpoint := find_checkpoint(str(section.directory), mesh, device, lost_run)):
        logger.warning("note: the directory of this run is not here; it continues in a new one")
        return ResumePoint(None, checkpoint, lost_run)
    if is_source:
        return ResumePoint(None, _find_source(section.resume, config.optimizer, mesh, device))
    if section.resume == "auto":
        if not paths:
            logger.info("no earlier run named %s in %s", config.log.name, config.log.directory)
        logger.info("checkpoint.resume=auto: starting from step 0")
    return ResumePoint()


def _newer_in_memory(
    section: CheckpointSection, run: RunDirectory, saved: Checkpoint | None, mesh: Mesh
) -> Checkpoint | None:
    """The copy of a run in the memory of its hosts, if there is one and it is later than the saved checkpoint."""
    if not section.memory_every:
        return saved
    copy = find_memory_checkpoint(section.memory_directory, run.run_id, saved.step if saved else 0, mesh)
    if copy and saved:
        saved.close()
    return copy or saved


def _find_source(resume: str, optimizer: OptimizerSection, mesh: Mesh, device: Device) -> Checkpoint:
    """The checkpoint at checkpoint.resume, which another run may have saved."""
    if checkpoint := find_checkpoint(resume, mesh, device):
        _check_kinds(checkpoint, optimizer, resume)
        return checkpoint
    raise _unusable_source(resume, None if "://" in resume else detect_format(Path(resume).expanduser()))


def _check_kinds(checkpoint: Checkpoint, optimizer: OptimizerSection, resume: str) -> None:
    if set(checkpoint.dtypes) == {"weights"} != set(expected_kinds(optimizer)):
        raise _unusable_source(resume, "native")


def _runs_to_continue(
    section: CheckpointSection, log: LogSection, is_lost: Callable[[Owner], bool], own_directory: Path | None
) -> tuple[dict[Path, str | None], str | None]:
    """The run directories that this run may continue in, best first, with their identities, and the run that continues
    without one: by configuration and place (`is_lost`), or because checkpoint.resume names its directory."""
    may_adopt: Callable[[Owner], bool] | None = None
    by_name = False
    if own_directory:
        paths = [own_directory]
    elif section.resume == "none" or section.weights_only:
        paths = []
    elif section.resume == "auto" or (section.directory and _location(section.resume) == _location(section.directory)):
        paths, by_name = find_run_directories(Path(log.directory).expanduser(), log.name), section.resume != "auto"
        may_adopt = (lambda owner: owner_name(owner) == log.name or is_lost(owner)) if by_name else is_lost
    else:
        paths = [Path(section.resume).expanduser()] if _is_own_directory(section.resume, log) else []
    runs = {path: identity.run_id if (identity := read_identity(path)) else None for path in paths}
    if not section.directory or not (section.saving_enabled or paths or may_adopt):
        return runs, None
    owner = find_owner(open_storage(section.directory))
    try:
        run_id = check_owner(owner, section.directory, list(runs.values()), may_adopt)
    except UserError as error:
        raise UserError(f"checkpoint.directory={section.directory}: {error}") from None
    if run_id:
        continued: dict[Path, str | None] = {path: run_id for path, each in runs.items() if each == run_id}
        return continued, None if continued else run_id
    return ({} if by_name and owner is None else runs), None


def _location(text: str) -> str | Path:
    """The same for two names of one place."""
    storage = open_storage(text)
    return storage.path.resolve() if isinstance(storage, LocalStorage) else str(storage)


def _checkpoint_locations(path: Path, directory: str | None) -> list[str | Path]:
    """Where the run in directory `path` may have checkpoints: where it saved last, `directory`, and by default."""
    file = path / "config.yaml"
    section = (read_yaml(file) if file.is_file() else {}).get("checkpoint")
    before = section.get("directory") if isinstance(section, dict) else None
    return list(dict.fromkeys(filter(None, (before, directory, path / "checkpoints"))))


def _is_own_directory(location: str, log: LogSection) -> bool:
    """True for a directory of the run that `log` names, which the run continues in. From any other location, it
    continues in a new directory."""
    path = Path(location).expanduser()
    if "://" in location or path.resolve().parent != Path(log.directory).expanduser().resolve():
        return False
    identity = read_identity(path)
    return identity is not None and identity.name == log.name


def _unusable_source(resume: str, format_name: str | None) -> UserError:
    problem, nearest = "no valid checkpoint", "auto, or none"
    if format_name:
        problem = f"{FORMAT_DESCRIPTIONS[format_name]}, without the optimizer's state"
        nearest = "checkpoint.weights_only=true"
    return UserError(f"checkpoint.resume={resume}: {problem}; nearest: {nearest}")


def find_base(
    model: ModelConfig, weights_from: str | None, seed: int, resumed: Checkpoint | None, mesh: Mesh, device: Device
) -> BaseWeights:
    """Where a run starts from or, for weights that it does not train, where the run started from whose checkpoint
    `resumed` it continues. A configuration that names another place than that of the checkpoint has moved them. All
    ranks call this."""
    if not frozen_tensors(model):
        return BaseWeights(weights_from, seed)
    if resumed and not resumed.unstored:  # it was not written by a run
        return BaseWeights(str(resumed.storage), seed)
    if resumed and weights_from in (None, resumed.config.checkpoint.weights_from):
        if not resumed.base:
            raise UserError(f"{resumed.storage}: holds trained weights only; pass Trainer the other weights again")
        return resumed.base
    seed = resumed.base.seed if resumed and resumed.base else seed
    if weights_from and is_remote_model(weights_from):
        weights_from = mesh.broadcast_object(partial(pin_revision, weights_from), device)
    elif weights_from and not is_url(weights_from):
        weights_from = str(Path(weights_from).expanduser().absolute())
    return BaseWeights(weights_from, seed)


def restore(checkpoint: Checkpoint, optimizer: Optimizer, context: RankContext) -> int:
    """Load weights, optimizer state and random generators. Returns the step after which the run continues."""
    mesh = context.mesh
    logger.info("resuming from step %s: %s", checkpoint.step, checkpoint.storage)
    with checkpoint:
        load_state(checkpoint, optimizer, context.blueprint, mesh)
        restore_rng_state(checkpoint.rank_extras(mesh.layout_rank), context.device, mesh.layout_rank)
    return checkpoint.step


def load_state(checkpoint: Checkpoint, optimizer: Optimizer, blueprint: Blueprint, mesh: Mesh) -> None:
    """Load this rank's weights and optimizer state, whatever layout wrote the checkpoint."""
    state = optimizer.state
    slices = [
        piece
        for name in state.names
        for piece in rank_slices(blueprint, name, mesh.model_shard, state.shard_row_range(name), skip_replicas=False)
    ]
    own_file = shard_name(mesh.layout_rank)
    files = {file for piece in slices for file in checkpoint.files_with(piece)}
    checkpoint.fetch(files | ({own_file} & set(checkpoint.files)))
    for piece in slices:
        for kind, buffer in state.saved_buffers().items():
            if state.has(piece.param, kind):
                view = state.shard_view(buffer, piece.param)[piece.local_index]
                view.copy_(checkpoint.read_state(kind, piece))
    manifest = checkpoint.manifest
    optimizer.guard.update_count.fill_(manifest["updates"])
    optimizer.guard.skip_counts.copy_(torch.tensor(manifest["skipped"], dtype=torch.int32))
    optimizer.publish_weights()


def _open_verified(storage: Storage, mesh: Mesh) -> tuple[Checkpoint | None, str]:
    """Open a checkpoint and verify it, each rank a part of its files. Returns None and one line if it is not valid."""
    checkpoint: Checkpoint | None = None
    local_error: UserError | None = None
    try:
        checkpoint = Checkpoint(storage)
        checkpoint.verify(checkpoint.files[mesh.layout_rank :: mesh.layout.world_size])
    except UserError as error:
        local_error = error
    problems = [problem for problem in mesh.all_gather_object(local_error) if problem]
    if checkpoint and not problems:
        checkpoint.all_verified = True
        return checkpoint, ""
    if checkpoint:
        checkpoint.close()
    for problem in problems:
        if not isinstance(problem, CorruptCheckpoint):
            raise problem  # it may be valid: do not resume from an older one
    return None, str(problems[0])
