"""Goes on from a checkpoint: finds the newest whole one, and gives every rank its pieces, at any layout."""

from pathlib import Path
from typing import Any, Protocol

import torch

from trainyard.checkpoint.io.storage import Storage, StorageUnavailable, open_storage
from trainyard.checkpoint.native import checkpoint as native_checkpoint
from trainyard.checkpoint.native.checkpoint import Checkpoint
from trainyard.checkpoint.native.partition import rank_slices
from trainyard.checkpoint.registry import FORMAT_DESCRIPTIONS, detect_format, first_model_difference
from trainyard.config.schema import Config
from trainyard.core.errors import UserError
from trainyard.devices import Device
from trainyard.metrics.writers import latest_run_directory
from trainyard.models.blueprint import Blueprint
from trainyard.parallel.mesh import Mesh
from trainyard.train.optim.optimizer import Optimizer

COMPARED_SECTIONS = ("data", "train", "optimizer", "schedule", "precision")
"""Sections whose differences are told."""


class Say(Protocol):
    def __call__(self, line: str, /) -> None: ...


def find_checkpoint(where: str | Path, mesh: Mesh, device: Device, say: Say) -> Checkpoint | None:
    """The newest whole checkpoint in a directory of them, or the one that `where` is itself. Broken ones are named and
    passed over; None where there is none at all. Every rank calls this; each checks some of the files."""
    place = open_storage(where)
    if mesh.broadcast_object(lambda: place.file_size(native_checkpoint.COMMIT_FILE) is not None, device):
        found, line = _open_verified(place, mesh)
        if not found:
            raise UserError(line)
        return found
    steps = mesh.broadcast_object(lambda: native_checkpoint.list_steps(place), device)
    for step in steps:
        if not mesh.broadcast_object(lambda step=step: native_checkpoint.is_committed(place, step), device):  # type: ignore[misc]
            say(f"passing over {place / native_checkpoint.step_directory(step)}: it was never completed")
            continue
        found, line = _open_verified(place / native_checkpoint.step_directory(step), mesh)
        if found:
            return found
        say(f"passing over {line}")
    return None


def find_resume_point(config: Config, mesh: Mesh, device: Device, say: Say) -> tuple[Path | None, Checkpoint | None]:
    """The run directory to go on in, if there is one, and the checkpoint to go on from."""
    section = config.checkpoint
    if section.resume == "none" or section.weights_only:
        return None, None
    if section.resume != "auto":
        found = find_checkpoint(section.resume, mesh, device, say)
        if not found or set(found.dtypes) != set(native_checkpoint.STATE_KINDS):
            form = None if "://" in section.resume else detect_format(Path(section.resume).expanduser())
            if form == "native" and not found:  # a line has said what is wrong with it
                form = None
            what = f"{FORMAT_DESCRIPTIONS[form]}, without the optimizer's state" if form else "no whole checkpoint"
            near = "checkpoint.weights_only=true" if form else "auto, or none"
            raise UserError(f"checkpoint.resume={section.resume}: {what}; nearest: {near}")
        return None, found
    parent = Path(config.log.directory).expanduser()
    directory = mesh.broadcast_object(lambda: latest_run_directory(parent, config.log.name), device)
    where = section.directory or (directory / "checkpoints" if directory else None)
    found = find_checkpoint(where, mesh, device, say) if where else None
    if directory and found and mesh.layout_rank == 0:
        native_checkpoint.remove_incomplete(open_storage(directory))
    return (directory if found else None), found


def load_state(checkpoint: Checkpoint, optimizer: Optimizer, blueprint: Blueprint, mesh: Mesh) -> None:
    """Weights and the optimizer's state, this rank's part of them, whatever layout they were saved at."""
    rows = {"weights": optimizer.master_weights, "first": optimizer.exp_avg, "second": optimizer.exp_avg_sq}
    for name in optimizer.names:
        held = optimizer.flat.shard_row_range(name, optimizer.shard_index)
        for box in rank_slices(blueprint, name, mesh.tp.size, mesh.tp.rank, held, skip_replicas=False):
            for kind, row in rows.items():
                optimizer.shard_view(row, name)[box.local_index].copy_(checkpoint.read_state(kind, box))
    body = checkpoint.manifest
    optimizer.update_count.fill_(body["updates"])
    optimizer.skip_counts.copy_(torch.tensor(body["skipped"], dtype=torch.int32))
    optimizer.publish_weights()


def check_compatible(checkpoint: Checkpoint, config: Config, say: Say) -> None:
    """The model must be the same; what else differs is said."""
    old, new = checkpoint.config, config
    if differs := first_model_difference(old.model, new.model):
        key, before, now = differs
        raise UserError(f"model.{key}={now}: the checkpoint {checkpoint.storage} has {before}")
    for section in () if checkpoint.manifest.get("converted") else COMPARED_SECTIONS:
        before, now = (getattr(each, section).model_dump(mode="json") for each in (old, new))
        for key, was, is_now in _changed_keys(before, now, section):
            if key == "train.global_batch":
                raise UserError(
                    f"{key}={is_now}: the checkpoint counts samples in batches of {was}; nearest: {was}, or "
                    "checkpoint.weights_only=true"
                )
            if key not in ("train.steps", "train.micro_batch"):
                say(f"note: {key} was {was} when the checkpoint was written, and is {is_now}")
    if checkpoint.step > config.train.steps:
        raise UserError(f"train.steps={config.train.steps}: the checkpoint is of step {checkpoint.step} already")


def _changed_keys(before: dict[str, Any], now: dict[str, Any], path: str) -> list[tuple[str, Any, Any]]:
    keys = [*before, *(key for key in now if key not in before)]
    return [(f"{path}.{key}", before.get(key), now.get(key)) for key in keys if before.get(key) != now.get(key)]


def _open_verified(place: Storage, mesh: Mesh) -> tuple[Checkpoint | None, str]:
    """The checkpoint if all ranks find their share of its files whole, or a line that says what is wrong."""
    found: Checkpoint | None = None
    mine: UserError | None = None
    try:
        found = Checkpoint(place)
        found.verify(found.files[mesh.layout_rank :: mesh.layout.world_size])
    except UserError as error:
        mine = error
    troubles = [each for each in mesh.all_gather_object(mine) if each]
    if not troubles:
        return found, ""
    if found:
        found.close()
    for each in troubles:
        if isinstance(each, StorageUnavailable):
            raise each  # it may be whole: no reason to go on from an older one
    return None, str(troubles[0])
