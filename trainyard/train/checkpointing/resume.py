"""Resumes from a checkpoint: finds the latest valid one and loads every rank's slices, at any layout."""

import logging
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import torch

from trainyard.checkpoint.io.storage import Storage, StorageUnavailable, open_storage
from trainyard.checkpoint.native import checkpoint as native
from trainyard.checkpoint.native.checkpoint import Checkpoint
from trainyard.checkpoint.native.file_names import COMMIT_FILE, shard_name, step_directory
from trainyard.checkpoint.native.partition import rank_slices
from trainyard.checkpoint.native.shard_file import CorruptCheckpoint
from trainyard.checkpoint.registry import FORMAT_DESCRIPTIONS, CheckpointFormat, detect_format
from trainyard.config.schema import Config
from trainyard.core.errors import UserError
from trainyard.devices import Device
from trainyard.families.blueprint import Blueprint
from trainyard.metrics.run_directory import RunDirectory, find_run_directories, read_identity
from trainyard.parallel.mesh import Mesh
from trainyard.train.checkpointing.config_check import expected_kinds
from trainyard.train.checkpointing.memory_checkpoint import find_memory_checkpoint
from trainyard.train.optim.optimizer import Optimizer

logger = logging.getLogger(__name__)


def find_checkpoint(location: str | Path, mesh: Mesh, device: Device) -> Checkpoint | None:
    """Open the checkpoint at `location`, or the latest valid one in that directory or in its subdirectory checkpoints/.

    Invalid ones are logged and skipped. Returns None if none was ever completed; raises CorruptCheckpoint if all
    complete ones are damaged. All ranks call this; each verifies some of the files.
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
    for step, is_committed in steps:
        directory = parents[index] / step_directory(step)
        if not is_committed:
            logger.warning("skipping %s: it was never completed", directory)
            continue
        checkpoint, problem = _open_verified(directory, mesh)
        if checkpoint:
            return checkpoint
        logger.warning("skipping %s", problem)
    if any(is_committed for _, is_committed in steps):
        raise CorruptCheckpoint(
            f"{parents[index]}: every complete checkpoint is damaged; "
            "nearest: checkpoint.resume=none, which starts from step 0"
        )
    return None


def find_resume_point(
    config: Config, mesh: Mesh, device: Device, own_directory: Path | None = None
) -> tuple[RunDirectory | None, Checkpoint | None]:
    """The run directory to continue in, if any, locked by the first rank, and the checkpoint to resume from, if any.

    With `own_directory`, the run continues there: from its latest checkpoint or, if it has none, as the configuration
    says.
    """
    section = config.checkpoint
    if own_directory:
        own_run = mesh.broadcast_object(partial(RunDirectory.open, own_directory, config.log.name), device)
        saved = find_checkpoint(section.directory or own_directory / "checkpoints", mesh, device)
        if checkpoint := _newer_in_memory(config, own_run, saved, mesh):
            return own_run, checkpoint
        if section.resume == "auto" or Path(section.resume).expanduser().resolve() == own_directory.resolve():
            return own_run, None
        return own_run, find_resume_point(config, mesh, device)[1]
    if section.resume == "none" or section.weights_only:
        return None, None
    candidates = mesh.broadcast_object(partial(_resume_candidates, config), device)
    for paths, location in candidates:
        with ExitStack() as stack:  # releases the directories unless there is a checkpoint
            runs = [
                stack.enter_context(mesh.broadcast_object(partial(RunDirectory.open, path, config.log.name), device))
                for path in paths
            ]
            if checkpoint := find_checkpoint(location, mesh, device):
                if set(checkpoint.dtypes) == {"weights"} != set(expected_kinds(config)):
                    raise _unusable_source(section.resume, "native")
                run = _run_that_saved(checkpoint, runs) if section.directory else next(iter(runs), None)
                stack.pop_all()
                for other in runs:
                    if other is not run:
                        other.close()
                if run and mesh.layout_rank == 0:
                    native.remove_incomplete(open_storage(run.path))
                return run, _newer_in_memory(config, run, checkpoint, mesh) if run else checkpoint
        if section.resume == "auto":
            logger.warning("skipping %s: it has no complete checkpoint", location)
    if section.resume != "auto":
        format_name = None if "://" in section.resume else detect_format(Path(section.resume).expanduser())
        raise _unusable_source(section.resume, format_name)
    if not candidates:
        logger.info("no earlier run named %s in %s", config.log.name, config.log.directory)
    logger.info("checkpoint.resume=auto: starting from step 0")
    return None, None


def _newer_in_memory(config: Config, run: RunDirectory, saved: Checkpoint | None, mesh: Mesh) -> Checkpoint | None:
    """The copy of a run in the memory of its hosts, if there is one and it is later than the saved checkpoint."""
    if not config.checkpoint.memory_every:
        return saved
    copy = find_memory_checkpoint(config, run.run_id, saved.step if saved else 0, mesh)
    if copy and saved:
        saved.close()
    return copy or saved


def _resume_candidates(config: Config) -> list[tuple[list[Path], str | Path]]:
    """The locations to look for a checkpoint, best first, each with the run directories that may have saved it."""
    section = config.checkpoint
    if section.resume == "auto":
        paths = find_run_directories(Path(config.log.directory).expanduser(), config.log.name)
    elif _is_own_directory(section.resume, config):
        paths = [Path(section.resume).expanduser()]
    else:
        return [([], section.resume)]
    return [(paths, section.directory)] if section.directory else [([path], path / "checkpoints") for path in paths]


def _is_own_directory(location: str, config: Config) -> bool:
    """True for a directory of the run that `config` names, which the run continues in. From any other location, it
    continues in a new directory."""
    path = Path(location).expanduser()
    if "://" in location or path.resolve().parent != Path(config.log.directory).expanduser().resolve():
        return False
    identity = read_identity(path)
    return identity is not None and identity.name == config.log.name


def _run_that_saved(checkpoint: Checkpoint, runs: list[RunDirectory]) -> RunDirectory | None:
    """The directory of the run that saved a checkpoint; the latest one if the checkpoint does not name its run."""
    run_id = checkpoint.manifest.get("run")
    return next((run for run in runs if run_id in (None, run.run_id)), None)


def _unusable_source(resume: str, format_name: CheckpointFormat | None) -> UserError:
    problem, nearest = "no valid checkpoint", "auto, or none"
    if format_name:
        problem = f"{FORMAT_DESCRIPTIONS[format_name]}, without the optimizer's state"
        nearest = "checkpoint.weights_only=true"
    return UserError(f"checkpoint.resume={resume}: {problem}; nearest: {nearest}")


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
            if kind != "second" or state.has_second_moment(piece.param):
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
        if isinstance(problem, StorageUnavailable):
            raise problem  # it may be valid: do not resume from an older one
    return None, str(problems[0])
