"""Opens a checkpoint of any form that is known, whichever it is."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal

from trainyard import models
from trainyard.checkpoint.formats import hf
from trainyard.checkpoint.formats.megatron.files import find_megatron
from trainyard.checkpoint.formats.megatron.weights import open_megatron
from trainyard.checkpoint.formats.nxd.files import find_nxd, open_nxd
from trainyard.checkpoint.formats.nxd.optimizer import find_optimizer, open_nxd_state
from trainyard.checkpoint.formats.optimum import find_optimum, open_optimum
from trainyard.checkpoint.formats.tensor_map import WeightSource
from trainyard.checkpoint.io.storage import Storage, open_storage
from trainyard.checkpoint.io.torch_file import LazyTensor, open_torch_file
from trainyard.checkpoint.native import checkpoint as native_checkpoint
from trainyard.checkpoint.native.checkpoint import Checkpoint
from trainyard.checkpoint.native.writer import StateSource
from trainyard.config.hf_config import from_hf
from trainyard.core.errors import UserError

CheckpointFormat = Literal["native", "hf", "optimum", "megatron", "nxd", "full"]
WEIGHT_FILE_SUFFIXES = (".pt", ".bin", ".pth", ".ckpt")
FORMAT_DESCRIPTIONS: dict[CheckpointFormat, str] = {
    "native": "a checkpoint of trainyard",
    "hf": "a Hugging Face directory",
    "optimum": "shards of optimum-neuron",
    "megatron": "a Megatron-LM checkpoint",
    "nxd": "an NxD checkpoint",
    "full": "one file of Hugging Face weights",
}


@dataclass(frozen=True)
class OpenedCheckpoint:
    format: CheckpointFormat
    weights: WeightSource
    notes: tuple[str, ...] = ()
    """What was assumed, for the user to know."""
    open_state: Callable[[], StateSource] | None = None
    """Weights with the optimizer's state, where it has one."""


def detect_format(path: Path) -> CheckpointFormat | None:
    """What lies at `path`, by its files' names."""
    if latest_checkpoint(open_storage(path)):
        return "native"
    finders: dict[CheckpointFormat, Callable[[Path], Any]] = {
        "hf": hf.is_hf,
        "optimum": find_optimum,
        "megatron": find_megatron,
        "nxd": find_nxd,
        "full": lambda path: path.is_file() and path.suffix in WEIGHT_FILE_SUFFIXES,
    }
    return next((form for form, find in finders.items() if find(path)), None)


def open_weights(
    location: str | Path, model: models.AnyModelConfig | None = None, hints: Mapping[str, Any] | None = None
) -> OpenedCheckpoint:
    """The weights at `where`. `model` is for forms that do not say what model they hold, and goes before what a Hugging
    Face directory says; a checkpoint of ours must agree. `hints` are fields of NxdLayout that the user is sure of."""
    place = open_storage(location)
    if found := latest_checkpoint(place):
        checkpoint = Checkpoint(found)
        _check_same_model(location, checkpoint.model, model)
        state = (lambda: checkpoint) if set(checkpoint.dtypes) == set(native_checkpoint.STATE_KINDS) else None
        return OpenedCheckpoint("native", checkpoint, open_state=state)
    if "://" in str(location):
        raise UserError(f"{place}: no checkpoint of trainyard, nor a directory of them")
    path = Path(location).expanduser()
    form = detect_format(path)
    if form == "hf":
        return OpenedCheckpoint(form, hf.open_hf(path, model))
    if form == "optimum":
        return OpenedCheckpoint(form, open_optimum(path, model))
    if form == "megatron":
        megatron = open_megatron(path, model)
        return OpenedCheckpoint(form, megatron, tuple(megatron.notes))
    if form == "nxd":
        model = model or _model_from_nearby_config(path)
        weights = open_nxd(path, model, hints)
        files = find_nxd(path)
        notes = tuple(
            f"passing over {name}: it was never completed" for name in (files.unfinished_tags if files else ())
        )
        opens = cache(partial(open_nxd_state, path, model, hints)) if find_optimizer(path) else None
        return OpenedCheckpoint(form, weights, notes, opens)
    if form == "full":
        return OpenedCheckpoint(form, _open_full_file(path, model or _model_from_nearby_config(path)))
    if not path.exists():
        raise UserError(f"{path}: no such file or directory")
    raise UserError(f"{path}: no checkpoint that is known; known are {', '.join(FORMAT_DESCRIPTIONS.values())}")


def latest_checkpoint(storage: Storage) -> Storage | None:
    """The checkpoint that `place` is, or the newest complete one in it, or in the checkpoints/ of a run."""
    if storage.file_size(native_checkpoint.COMMIT_FILE) is not None:
        return storage
    for directory in (storage, storage / "checkpoints"):
        for step in native_checkpoint.list_steps(directory):
            if native_checkpoint.is_committed(directory, step):
                return directory / native_checkpoint.step_directory(step)
    return None


def first_model_difference(
    model_a: models.AnyModelConfig, model_b: models.AnyModelConfig
) -> tuple[str, Any, Any] | None:
    """The first key by which two models have other weights or give other logits, and what each has. A default is what
    it stands for; what matters to training alone (dropout, initial weights, fused matrices) does not count."""
    ones, twos = (
        {"family": each.family, **each.model_dump(mode="json"), "ffn": each.ffn_size}
        | ({"kv_heads": each.num_kv_heads, "head_dim": each.head_size} if each.family == "llama" else {})
        for each in (model_a, model_b)
    )
    for key in ones | twos:
        training = key.endswith("dropout") or key.startswith("fuse") or key in ("init_std", "scaled_init")
        if not training and ones.get(key) != twos.get(key):
            return key, ones.get(key), twos.get(key)
    return None


def _open_full_file(path: Path, model: models.AnyModelConfig) -> WeightSource:
    found = open_torch_file(path)
    for key in ("model", "state_dict", "model"):  # {"model": ...} and {"state_dict": {"model": ...}} alike
        if isinstance(found, dict) and isinstance(found.get(key), dict):
            found = found[key]
    if not isinstance(found, dict):
        raise UserError(f"{path}: holds no weights by name")
    tensors = {name: value for name, value in found.items() if isinstance(name, str) and isinstance(value, LazyTensor)}
    if not tensors:
        raise UserError(f"{path}: holds no weights by name")
    return hf.weights_from_tensors(model, tensors)


def _model_from_nearby_config(path: Path) -> models.AnyModelConfig:
    """The model of a config.json in, beside or above the files."""
    for directory in (path, *list(path.absolute().parents)[:3]):
        if (directory / "config.json").is_file():
            return from_hf(directory)
    raise UserError(f"{path}: does not say what model it holds; give --config config.json (Hugging Face's)")


def _check_same_model(path: str | Path, stored: models.AnyModelConfig, expected: models.AnyModelConfig | None) -> None:
    if expected and (other := first_model_difference(stored, expected)):
        key, has, wanted = other
        raise UserError(f"model.{key}={wanted}: {path} has {has}")
