"""Detects the format of a checkpoint and opens it."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal

from trainyard import models
from trainyard.checkpoint.formats import hf
from trainyard.checkpoint.formats.dcp.files import find_dcp, open_dcp
from trainyard.checkpoint.formats.megatron.files import find_megatron
from trainyard.checkpoint.formats.megatron.weights import open_megatron
from trainyard.checkpoint.formats.nxd.files import find_nxd, open_nxd
from trainyard.checkpoint.formats.nxd.optimizer import open_nxd_state
from trainyard.checkpoint.formats.nxd.optimizer_files import find_optimizer
from trainyard.checkpoint.formats.optimum import find_optimum, open_optimum
from trainyard.checkpoint.formats.tensor_map import TrainingState, WeightSource, ZeroRouterBias
from trainyard.checkpoint.io.torch_file import named_tensors, open_torch_file
from trainyard.checkpoint.native import checkpoint as native_checkpoint
from trainyard.checkpoint.native.checkpoint import Checkpoint
from trainyard.checkpoint.native.file_names import COMMIT_FILE, step_directory
from trainyard.core.errors import UserError
from trainyard.families.hf_config import from_hf, read_hf, to_hf
from trainyard.remote.local_copies import is_remote_model, local_weights
from trainyard.remote.storage import LocalStorage, Storage, open_storage

TRAINING_KEYS = ("init_std", "scaled_init", "balance_loss", "z_loss", "capacity_factor", "bias_update_rate")
"""Keys of the model section that matter to training only, besides dropout and fused matrices."""
CheckpointFormat = Literal["native", "hf", "optimum", "megatron", "dcp", "nxd", "full"]
WEIGHT_FILE_SUFFIXES = (".pt", ".bin", ".pth", ".ckpt")
FORMAT_DESCRIPTIONS: dict[CheckpointFormat, str] = {
    "native": "a trainyard checkpoint",
    "hf": "a Hugging Face directory",
    "optimum": "optimum-neuron shards",
    "megatron": "a Megatron-LM checkpoint",
    "dcp": "a checkpoint of torch.distributed.checkpoint",
    "nxd": "an NxD checkpoint",
    "full": "a single file of Hugging Face weights",
}


@dataclass(frozen=True)
class OpenedCheckpoint:
    format: CheckpointFormat
    weights: WeightSource
    notes: tuple[str, ...] = ()
    """Assumptions made to read it, for the user."""
    open_state: Callable[[], TrainingState] | None = None
    """Opens the weights together with the optimizer state, if there is one."""


def detect_format(path: Path) -> CheckpointFormat | None:
    """The format of the checkpoint at `path`, judged by file names."""
    if latest_checkpoint(open_storage(path)):
        return "native"
    finders: dict[CheckpointFormat, Callable[[Path], Any]] = {
        "hf": hf.is_hf,
        "optimum": find_optimum,
        "megatron": find_megatron,
        "dcp": find_dcp,
        "nxd": find_nxd,
        "full": lambda path: path.is_file() and path.suffix in WEIGHT_FILE_SUFFIXES,
    }
    return next((name for name, find in finders.items() if find(path)), None)


def open_weights(
    location: str | Path, model: models.ModelConfig | None = None, hints: Mapping[str, Any] | None = None
) -> OpenedCheckpoint:
    """Open the weights at `location`: a path, a URL, or a model on the Hub (OWNER/NAME, hf://OWNER/NAME@REVISION).
    Native checkpoints at URLs are read in place, other formats from a copy in a cache.

    `model` is for formats that do not store the model's configuration. It takes precedence over the config.json of a
    Hugging Face directory, and must agree with a native checkpoint; only its routers may have a bias that the weights
    lack, which is then 0. `hints` are fields of NxdLayout that the user knows.
    """
    location = local_weights(location) if is_remote_model(location) else location
    storage = open_storage(location)
    if latest := latest_checkpoint(storage):
        checkpoint = Checkpoint(latest)
        has_bias = checkpoint.model.without_router_bias is not checkpoint.model
        stored_model = model if model is None or has_bias else model.without_router_bias
        if stored_model and (difference := first_model_difference(checkpoint.model, stored_model)):
            key, stored, expected = difference
            raise UserError(f"model.{key}={expected}: {location} has {stored}")
        if model and stored_model is not model:
            return OpenedCheckpoint("native", ZeroRouterBias(checkpoint, model))
        has_state = len(checkpoint.dtypes) > 1 or checkpoint.step > 0  # a user's update rule may have no state
        return OpenedCheckpoint("native", checkpoint, open_state=(lambda: checkpoint.state) if has_state else None)
    if model and model.without_router_bias is not model:
        opened = open_weights(location, model.without_router_bias, hints)
        return replace(opened, weights=ZeroRouterBias(opened.weights, model), open_state=None)
    path = local_weights(location)
    format_name = detect_format(path)
    open_format = {"hf": hf.open_hf, "optimum": open_optimum, "megatron": open_megatron}.get(format_name or "")
    if format_name and open_format:
        weights = open_format(path, model)
        return OpenedCheckpoint(format_name, weights, weights.notes)
    if format_name == "dcp":
        dcp = open_dcp(path, model or _model_from_nearby_config(path))
        return OpenedCheckpoint(format_name, dcp, dcp.notes)
    if format_name == "nxd":
        model = model or _model_from_nearby_config(path)
        nxd = open_nxd(path, model, hints)
        open_state = cache(partial(open_nxd_state, path, model, hints)) if find_optimizer(path) else None
        return OpenedCheckpoint(format_name, nxd, nxd.notes, open_state)
    if format_name == "full":
        return OpenedCheckpoint(format_name, _open_full_file(path, model or _model_from_nearby_config(path)))
    if not path.exists():
        raise UserError(f"{path}: no such file or directory")
    raise UserError(f"{path}: not a known checkpoint format; known: {', '.join(FORMAT_DESCRIPTIONS.values())}")


def verify_checksums(location: str | Path) -> bool:
    """Compare all files of a checkpoint with their checksums. Returns False if it has none: native checkpoints and
    exported models have them."""
    storage = open_storage(location)
    if latest := latest_checkpoint(storage):
        with Checkpoint(latest) as checkpoint:
            checkpoint.verify(checkpoint.files)
            checkpoint.read_model_files()
        return True
    return isinstance(storage, LocalStorage) and hf.verify_export(storage.path)


def latest_checkpoint(storage: Storage) -> Storage | None:
    """The native checkpoint at `storage`, or the latest committed one in it or in its subdirectory checkpoints/."""
    if storage.file_size(COMMIT_FILE) is not None:
        return storage
    for directory in (storage, storage / "checkpoints"):
        for step in native_checkpoint.list_steps(directory):
            if native_checkpoint.is_committed(directory, step):
                return directory / step_directory(step)
    return None


def find_tokenizer_files(source: str | Path, config: Path | None = None) -> list[Path]:
    """The tokenizer files of a checkpoint of another format: in its directory, in the one above its weights, or next to
    the config.json that describes it."""
    source = local_weights(source)
    directories = [source, source.parent] if source.is_file() or source.name == "model" else [source]
    directories += [config.parent] if config else []
    return next(filter(None, map(hf.tokenizer_files, directories)), [])


def read_model_files(weights: WeightSource, source: str | Path, config: Path | None = None) -> dict[str, bytes]:
    """The files of the tokenizer, and others that belong to the model, of the checkpoint `weights` at `source`, or next
    to `config`."""
    if isinstance(weights, Checkpoint):
        return weights.read_model_files()
    files = find_tokenizer_files(source, config)
    return hf.read_model_files(files[0].parent) if files else {}


def first_model_difference(model_a: models.ModelConfig, model_b: models.ModelConfig) -> tuple[str, Any, Any] | None:
    """The first key that makes two models differ in weights or logits, and its two values.

    Defaults are resolved first. Keys that matter to training only (dropout, initialization, fused matrices, balance of
    experts), or to text only (special tokens), do not count.
    """
    a, b = (
        {"family": model.family, **model.model_dump(mode="json"), "ffn": model.ffn_size}
        | {"kv_heads": model.num_kv_heads, "head_dim": model.head_size}
        for model in (model_a, model_b)
    )
    for key in a | b:
        ignored = key.endswith(("dropout", "_token_id")) or key.startswith("fuse") or key in TRAINING_KEYS
        if not ignored and a.get(key) != b.get(key):
            return key, a.get(key), b.get(key)
    return None


def check_hf_export(model: models.ModelConfig) -> None:
    """Raise UserError if a Hugging Face directory cannot hold the model: a tensor has no name there, or its config.json
    does not read back as the same model."""
    if model.without_router_bias is not model:
        raise UserError("Hugging Face's format has no place for model.router_bias")
    hf.stored_tensors(model)
    read = read_hf(json.loads(json.dumps(to_hf(model))), models.family_of(model))
    if difference := first_model_difference(model, read.model_copy(update={"family": model.family})):
        key, value, found = difference
        raise UserError(f"its config.json would give model.{key}={found} instead of {value}")


def _open_full_file(path: Path, model: models.ModelConfig) -> WeightSource:
    state = open_torch_file(path)
    for key in ("model", "state_dict", "model"):  # both {"model": ...} and {"state_dict": {"model": ...}}
        if isinstance(state, dict) and isinstance(state.get(key), dict):
            state = state[key]
    tensors = named_tensors(state)
    if not tensors:
        raise UserError(f"{path}: holds no tensors by name")
    return hf.weights_from_tensors(model, tensors)


def _model_from_nearby_config(path: Path) -> models.ModelConfig:
    """The model of a config.json in `path` or up to three levels above it."""
    for directory in (path, *list(path.absolute().parents)[:3]):
        if (directory / "config.json").is_file():
            return from_hf(directory)
    raise UserError(f"{path}: does not store the model's configuration; pass --config config.json (Hugging Face's)")
