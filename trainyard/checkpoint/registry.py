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
from trainyard.checkpoint.formats.tensor_map import Weights
from trainyard.checkpoint.io.storage import Place, open_place
from trainyard.checkpoint.io.torch_file import Lazy, open_pickle
from trainyard.checkpoint.native import checkpoint as native_checkpoint
from trainyard.checkpoint.native.checkpoint import Checkpoint
from trainyard.checkpoint.native.writer import State
from trainyard.config.hf_config import from_hf
from trainyard.core.errors import UserError

Form = Literal["native", "hf", "optimum", "megatron", "nxd", "full"]
SUFFIXES = (".pt", ".bin", ".pth", ".ckpt")
WORDS: dict[Form, str] = {
    "native": "a checkpoint of trainyard",
    "hf": "a Hugging Face directory",
    "optimum": "shards of optimum-neuron",
    "megatron": "a Megatron-LM checkpoint",
    "nxd": "an NxD checkpoint",
    "full": "one file of Hugging Face weights",
}


@dataclass(frozen=True)
class Opened:
    form: Form
    weights: Weights
    notes: tuple[str, ...] = ()
    """What was assumed, for the user to know."""
    state: Callable[[], State] | None = None
    """Weights with the optimizer's state, where it has one."""


def find_form(path: Path) -> Form | None:
    """What lies at `path`, by its files' names."""
    if newest(open_place(path)):
        return "native"
    finders: dict[Form, Callable[[Path], Any]] = {
        "hf": hf.is_hf,
        "optimum": find_optimum,
        "megatron": find_megatron,
        "nxd": find_nxd,
        "full": lambda path: path.is_file() and path.suffix in SUFFIXES,
    }
    return next((form for form, find in finders.items() if find(path)), None)


def open_weights(
    where: str | Path, model: models.AnyModel | None = None, hints: Mapping[str, Any] | None = None
) -> Opened:
    """The weights at `where`. `model` is for forms that do not say what model they hold, and goes before what a Hugging
    Face directory says; a checkpoint of ours must agree. `hints` are fields of NxdLayout that the user is sure of."""
    place = open_place(where)
    if found := newest(place):
        checkpoint = Checkpoint(found)
        _agrees(where, checkpoint.model, model)
        state = (lambda: checkpoint) if set(checkpoint.dtypes) == set(native_checkpoint.KINDS) else None
        return Opened("native", checkpoint, state=state)
    if "://" in str(where):
        raise UserError(f"{place}: no checkpoint of trainyard, nor a directory of them")
    path = Path(where).expanduser()
    form = find_form(path)
    if form == "hf":
        return Opened(form, hf.open_hf(path, model))
    if form == "optimum":
        return Opened(form, open_optimum(path, model))
    if form == "megatron":
        megatron = open_megatron(path, model)
        return Opened(form, megatron, tuple(megatron.notes))
    if form == "nxd":
        model = model or _beside(path)
        weights = open_nxd(path, model, hints)
        files = find_nxd(path)
        notes = tuple(f"passing over {name}: it was never completed" for name in (files.skipped if files else ()))
        opens = cache(partial(open_nxd_state, path, model, hints)) if find_optimizer(path) else None
        return Opened(form, weights, notes, opens)
    if form == "full":
        return Opened(form, _full(path, model or _beside(path)))
    if not path.exists():
        raise UserError(f"{path}: no such file or directory")
    raise UserError(f"{path}: no checkpoint that is known; known are {', '.join(WORDS.values())}")


def newest(place: Place) -> Place | None:
    """The checkpoint that `place` is, or the newest complete one in it, or in the checkpoints/ of a run."""
    if place.size(native_checkpoint.MARKER) is not None:
        return place
    for directory in (place, place / "checkpoints"):
        for step in native_checkpoint.steps_in(directory):
            if native_checkpoint.is_complete(directory, step):
                return directory / native_checkpoint.directory_name(step)
    return None


def unlike(one: models.AnyModel, two: models.AnyModel) -> tuple[str, Any, Any] | None:
    """The first key by which two models have other weights or give other logits, and what each has. A default is what
    it stands for; what matters to training alone (dropout, initial weights, fused matrices) does not count."""
    ones, twos = (
        {"family": each.family, **each.model_dump(mode="json"), "ffn": each.inner}
        | ({"kv_heads": each.kv, "head_dim": each.head_size} if each.family == "llama" else {})
        for each in (one, two)
    )
    for key in ones | twos:
        training = key.endswith("dropout") or key.startswith("fuse") or key in ("init_std", "scaled_init")
        if not training and ones.get(key) != twos.get(key):
            return key, ones.get(key), twos.get(key)
    return None


def _full(path: Path, model: models.AnyModel) -> Weights:
    found = open_pickle(path)
    for key in ("model", "state_dict", "model"):  # {"model": ...} and {"state_dict": {"model": ...}} alike
        if isinstance(found, dict) and isinstance(found.get(key), dict):
            found = found[key]
    if not isinstance(found, dict):
        raise UserError(f"{path}: holds no weights by name")
    tensors = {name: value for name, value in found.items() if isinstance(name, str) and isinstance(value, Lazy)}
    if not tensors:
        raise UserError(f"{path}: holds no weights by name")
    return hf.of_tensors(model, tensors)


def _beside(path: Path) -> models.AnyModel:
    """The model of a config.json in, beside or above the files."""
    for directory in (path, *list(path.absolute().parents)[:3]):
        if (directory / "config.json").is_file():
            return from_hf(directory)
    raise UserError(f"{path}: does not say what model it holds; give --config config.json (Hugging Face's)")


def _agrees(path: str | Path, found: models.AnyModel, given: models.AnyModel | None) -> None:
    if given and (other := unlike(found, given)):
        key, has, wanted = other
        raise UserError(f"model.{key}={wanted}: {path} has {has}")
