"""Goes on from a checkpoint: finds the newest whole one, and gives every rank its pieces, at any layout."""

from pathlib import Path
from typing import Any, Protocol

import torch

from trainyard.checkpoint.io.storage import Place, Unreachable, open_place
from trainyard.checkpoint.native import checkpoint as native_checkpoint
from trainyard.checkpoint.native.checkpoint import Checkpoint
from trainyard.checkpoint.native.partition import boxes
from trainyard.checkpoint.registry import WORDS, find_form, unlike
from trainyard.config.schema import Config
from trainyard.core.errors import UserError
from trainyard.devices import Device
from trainyard.metrics.writers import newest_directory
from trainyard.models.blueprint import Blueprint
from trainyard.parallel.mesh import Mesh
from trainyard.train.optim.optimizer import Optimizer

COMPARED = ("data", "train", "optimizer", "schedule", "precision")
"""Sections whose differences are told."""


class Say(Protocol):
    def __call__(self, line: str, /) -> None: ...


def find(where: str | Path, mesh: Mesh, device: Device, say: Say) -> Checkpoint | None:
    """The newest whole checkpoint in a directory of them, or the one that `where` is itself. Broken ones are named and
    passed over; None where there is none at all. Every rank calls this; each checks some of the files."""
    place = open_place(where)
    if mesh.agree(lambda: place.size(native_checkpoint.MARKER) is not None, device):
        found, line = _open(place, mesh)
        if not found:
            raise UserError(line)
        return found
    steps = mesh.agree(lambda: native_checkpoint.steps_in(place), device)
    for step in steps:
        if not mesh.agree(lambda step=step: native_checkpoint.is_complete(place, step), device):  # type: ignore[misc]
            say(f"passing over {place / native_checkpoint.directory_name(step)}: it was never completed")
            continue
        found, line = _open(place / native_checkpoint.directory_name(step), mesh)
        if found:
            return found
        say(f"passing over {line}")
    return None


def continued(config: Config, mesh: Mesh, device: Device, say: Say) -> tuple[Path | None, Checkpoint | None]:
    """The run directory to go on in, if there is one, and the checkpoint to go on from."""
    section = config.checkpoint
    if section.resume == "none" or section.weights_only:
        return None, None
    if section.resume != "auto":
        found = find(section.resume, mesh, device, say)
        if not found or set(found.dtypes) != set(native_checkpoint.KINDS):
            form = None if "://" in section.resume else find_form(Path(section.resume).expanduser())
            if form == "native" and not found:  # a line has said what is wrong with it
                form = None
            what = f"{WORDS[form]}, without the optimizer's state" if form else "no whole checkpoint"
            near = "checkpoint.weights_only=true" if form else "auto, or none"
            raise UserError(f"checkpoint.resume={section.resume}: {what}; nearest: {near}")
        return None, found
    parent = Path(config.log.directory).expanduser()
    directory = mesh.agree(lambda: newest_directory(parent, config.log.name), device)
    where = section.directory or (directory / "checkpoints" if directory else None)
    found = find(where, mesh, device, say) if where else None
    if directory and found and mesh.rank == 0:
        native_checkpoint.clear(open_place(directory))
    return (directory if found else None), found


def load(checkpoint: Checkpoint, optimizer: Optimizer, blueprint: Blueprint, mesh: Mesh) -> None:
    """Weights and the optimizer's state, this rank's part of them, whatever layout they were saved at."""
    rows = {"weights": optimizer.master, "first": optimizer.first, "second": optimizer.second}
    for name in optimizer.names:
        held = optimizer.flat.rows(name, optimizer.number)
        for box in boxes(blueprint, name, mesh.tp.size, mesh.tp.rank, held, once=False):
            here = tuple(slice(at, at + size) for at, size in zip(box.at, box.sizes, strict=True))
            for kind, row in rows.items():
                optimizer.view(row, name)[here].copy_(checkpoint.tensor(kind, box))
    body = checkpoint.body
    optimizer.updates.fill_(body["updates"])
    optimizer.skipped.copy_(torch.tensor(body["skipped"], dtype=torch.int32))
    optimizer.spread()


def check_fits(checkpoint: Checkpoint, config: Config, say: Say) -> None:
    """The model must be the same; what else differs is said."""
    old, new = checkpoint.config, config
    if differs := unlike(old.model, new.model):
        key, before, now = differs
        raise UserError(f"model.{key}={now}: the checkpoint {checkpoint.place} has {before}")
    for section in () if checkpoint.body.get("converted") else COMPARED:
        before, now = (getattr(each, section).model_dump(mode="json") for each in (old, new))
        for key, was, is_now in _differences(before, now, section):
            if key == "train.global_batch":
                raise UserError(
                    f"{key}={is_now}: the checkpoint counts samples in batches of {was}; nearest: {was}, or "
                    "checkpoint.weights_only=true"
                )
            if key not in ("train.steps", "train.micro_batch"):
                say(f"note: {key} was {was} when the checkpoint was written, and is {is_now}")
    if checkpoint.step > config.train.steps:
        raise UserError(f"train.steps={config.train.steps}: the checkpoint is of step {checkpoint.step} already")


def _differences(before: dict[str, Any], now: dict[str, Any], path: str) -> list[tuple[str, Any, Any]]:
    keys = [*before, *(key for key in now if key not in before)]
    return [(f"{path}.{key}", before.get(key), now.get(key)) for key in keys if before.get(key) != now.get(key)]


def _open(place: Place, mesh: Mesh) -> tuple[Checkpoint | None, str]:
    """The checkpoint if all ranks find their share of its files whole, or a line that says what is wrong."""
    found: Checkpoint | None = None
    mine: UserError | None = None
    try:
        found = Checkpoint(place)
        found.check(found.files[mesh.rank :: mesh.layout.world])
    except UserError as error:
        mine = error
    troubles = [each for each in mesh.collect(mine) if each]
    if not troubles:
        return found, ""
    if found:
        found.close()
    for each in troubles:
        if isinstance(each, Unreachable):
            raise each  # it may be whole: no reason to go on from an older one
    return None, str(troubles[0])
