"""The formats of checkpoints: detects the format of a checkpoint and opens it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainyard import models
from trainyard.checkpoint.checkpoint import Checkpoint, latest_checkpoint
from trainyard.checkpoint.weights import BaseWeights, TrainingState, WeightSource, unfused_tensors
from trainyard.core.errors import UserError
from trainyard.core.tensor_slice import TensorSlice
from trainyard.families.blueprint import SCORE_HEAD
from trainyard.families.hf_config import from_hf
from trainyard.families.linear_wrappers.lora import LoraKeys
from trainyard.families.model_config import context_notes, first_model_difference, with_context_of
from trainyard.formats import hf, optimum, weights_file
from trainyard.formats.dcp import weights as dcp
from trainyard.formats.format import CheckpointFormat
from trainyard.formats.megatron import weights as megatron
from trainyard.formats.nxd import conversion as nxd
from trainyard.formats.peft.adapter import (
    AdaptedWeights,
    adapter_tensors,
    find_adapter,
    lora_options,
    read_adapter,
    with_lora,
)
from trainyard.formats.peft.merge import MergedWeights
from trainyard.formats.peft.write_adapter import WRITER
from trainyard.models.init import initial_slice
from trainyard.remote.local_copies import is_remote_model, local_weights
from trainyard.remote.storage import LocalStorage, open_storage


def _open_adapter(
    path: Path, model: models.ModelConfig | None, hints: Mapping[str, Any]
) -> AdaptedWeights | MergedWeights:
    """An adapter and the weights that it belongs to; merged if those of `model` are asked for, which has no adapter."""
    adapter = read_adapter(path)
    base = hints.get("base") or adapter.base
    if not base:
        raise UserError(f"{path}: does not name its base model; nearest: --base MODEL")
    try:
        opened = open_weights(base, model)
    except UserError as error:
        raise UserError(f"{path}: its base model {base} cannot be opened: {error}; nearest: --base MODEL") from None
    weights = AdaptedWeights(adapter, opened.weights.model, opened.weights, base)
    weights.notes = opened.notes
    return weights if model is None else MergedWeights(weights)


PEFT = CheckpointFormat("peft", "a PEFT adapter", find_adapter, _open_adapter, writer=WRITER)
FORMATS = (hf.FORMAT, PEFT, optimum.FORMAT, megatron.FORMAT, dcp.FORMAT, nxd.FORMAT, weights_file.FORMAT)
"""The formats of other systems. The first one that finds a checkpoint opens it: optimum-neuron's shards are NxD files
too, and Megatron Core's torch_dist is a directory of DCP."""
FORMAT_DESCRIPTIONS = {"native": "a trainyard checkpoint"} | {each.name: each.description for each in FORMATS}


NEW_HEAD_NOTE = f"{SCORE_HEAD} is new, with random values: the weights are those of a model that predicts tokens"
NEW_MTP_NOTE = "the blocks of model.mtp_layers are new, with random values: the weights have none"
MEAN_ROWS = 8192
"""Rows of an embedding that are summed at a time."""


class InitialWeights:
    """The initial values of a model."""

    def __init__(self, model: models.ModelConfig, seed: int) -> None:
        self.model, self.seed, self.blueprint = model, seed, models.blueprint_of(model)
        names = self.blueprint.parameter_names()
        self.parameters = {piece.name: name for name in names for piece in self.blueprint.local_slices(name)}
        """The (fused) parameter of each unfused tensor."""

    def dtype(self, name: str) -> torch.dtype:
        return torch.float32

    def read(self, piece: TensorSlice, read: Callable[[TensorSlice], Tensor] | None = None) -> Tensor:
        """`read` is that of `initial_slice`."""
        out = torch.empty(piece.sizes)
        initial_slice(self.blueprint, self.parameters[piece.name], piece, self.seed, "cpu", out, read)
        return out


class AddedParameters:
    """The weights of a smaller model as those of `model`: what they lack, such as adapters or a bias of routers, has
    its initial values."""

    def __init__(self, weights: WeightSource, model: models.ModelConfig, seed: int) -> None:
        self.weights, self.model, self.initial = weights, model, InitialWeights(model, seed)

    def dtype(self, name: str) -> torch.dtype:
        return self.weights.dtype(name) if self._has(name) else torch.float32

    def read(self, piece: TensorSlice) -> Tensor:
        if self._has(piece.name):
            return self.weights.read(piece)
        return self.initial.read(piece, lambda rows: self.weights.read(rows).float())

    def _has(self, name: str) -> bool:
        return name in unfused_tensors(self.weights.model)


class GrownVocab:
    """The weights of a model with a smaller vocabulary than `model`, whose new rows are the mean of the stored ones; a
    new bias is 0."""

    def __init__(self, weights: WeightSource, model: models.ModelConfig) -> None:
        self.weights, self.model = weights, model
        self._means: dict[TensorSlice, Tensor] = {}

    def dtype(self, name: str) -> torch.dtype:
        return self.weights.dtype(name)

    def read(self, piece: TensorSlice) -> Tensor:
        full = unfused_tensors(self.weights.model)[piece.name]
        start, end, rows = piece.offsets[0], piece.offsets[0] + piece.sizes[0], full.sizes[0]
        if piece.global_shape == full.global_shape:
            return self.weights.read(piece)
        stored = replace(piece, global_shape=full.global_shape)
        parts = [self.weights.read(stored.narrow(0, start, min(end, rows)))] if start < rows else []
        if end > rows:
            new = end - max(start, rows)
            parts.append(self._mean(stored.narrow(0, 0, rows)).to(self.dtype(piece.name)).expand(new, *piece.sizes[1:]))
        return torch.cat(parts)

    def _mean(self, columns: TensorSlice) -> Tensor:
        """The mean of all stored rows, summed in fp64 some rows at a time."""
        if len(columns.sizes) == 1:
            return torch.zeros(1)
        if columns not in self._means:
            rows = columns.sizes[0]
            blocks = (columns.narrow(0, at, min(at + MEAN_ROWS, rows)) for at in range(0, rows, MEAN_ROWS))
            sums = sum(self.weights.read(block).sum(0, keepdim=True, dtype=torch.float64) for block in blocks)
            self._means[columns] = torch.as_tensor(sums) / rows
        return self._means[columns]


@dataclass(frozen=True)
class OpenedCheckpoint:
    format: str
    """The name of its format: native, or that of one of FORMATS."""
    weights: WeightSource
    notes: tuple[str, ...] = ()
    """Assumptions made to read it, for the user."""
    open_state: Callable[[], TrainingState] | None = None
    """Opens the weights together with the optimizer state, if there is one."""


def detect_format(path: Path) -> str | None:
    """The name of the format of the checkpoint at `path`, judged by file names."""
    if latest_checkpoint(open_storage(path)):
        return "native"
    return next((each.name for each in FORMATS if each.find(path)), None)


def open_weights(
    location: str | Path,
    model: models.ModelConfig | None = None,
    hints: Mapping[str, Any] | None = None,
    seed: int = 0,
) -> OpenedCheckpoint:
    """Open the weights at `location`: a path, a URL, or a model on the Hub (OWNER/NAME, hf://OWNER/NAME@REVISION).
    Native checkpoints at URLs are read in place, other formats from a copy in a cache.

    `model` is for formats that do not store the model's configuration. It takes precedence over the config.json of a
    Hugging Face directory, and must agree with a native checkpoint. The weights may lack what is put around its linear
    layers and a bias of its routers: these then have the initial values of `seed`. They may also have a smaller
    vocabulary, if the model has `new_tokens`. `hints` are fields of NxdLayout that the user knows.
    """
    location = local_weights(location) if is_remote_model(location) else location
    if model and model.new_tokens:
        return _open_grown(location, model, hints, seed)
    if latest := latest_checkpoint(open_storage(location)):
        return _open_native(Checkpoint(latest), location, model, seed)
    path = local_weights(location)
    if model and (stored := _stored_part(path, model)) != model:
        opened = open_weights(location, stored, hints)
        notes = (*opened.notes, *(NEW_HEAD_NOTE for _ in range(model.score_head - stored.score_head)))
        return replace(opened, weights=AddedParameters(opened.weights, model, seed), notes=notes, open_state=None)
    found = next((each for each in FORMATS if each.find(path)), None)
    if found is None:
        if not path.exists():
            raise UserError(f"{path}: no such file or directory")
        raise UserError(f"{path}: not a known checkpoint format; known: {', '.join(FORMAT_DESCRIPTIONS.values())}")
    if model is None and not found.stores_model:
        model = _model_from_nearby_config(path)
    weights = found.open(path, model, hints or {})
    if model and model.mtp_blocks != weights.model.mtp_blocks:
        return OpenedCheckpoint(found.name, AddedParameters(weights, model, seed), (*weights.notes, NEW_MTP_NOTE))
    return OpenedCheckpoint(found.name, weights, weights.notes, found.open_state(path, weights.model, hints or {}))


def _stored_part(path: Path, model: models.ModelConfig) -> models.ModelConfig:
    """The part of a model that a checkpoint of another format may have. Only Hugging Face's directories have scores."""
    has_scores = model.score_head and (path / "config.json").is_file() and from_hf(path).score_head
    return model.without_additions.model_copy(update={"score_head": has_scores})


def open_base(base: BaseWeights, model: models.ModelConfig) -> WeightSource:
    """Open the weights that a run of `model` does not train."""
    if base.location:
        return open_weights(base.location, model, seed=base.seed).weights
    return InitialWeights(model, base.seed)


def _open_grown(
    location: str | Path, model: models.ModelConfig, hints: Mapping[str, Any] | None, seed: int
) -> OpenedCheckpoint:
    """Weights whose vocabulary may be too small. The checkpoint, or a config.json next to it, tells how large it is."""
    try:
        return open_weights(location, model.model_copy(update={"new_tokens": ()}), hints, seed)
    except UserError:
        stored = open_weights(location, None, hints).weights.model.vocab
        if stored >= model.vocab:
            raise
    opened = open_weights(location, model.model_copy(update={"vocab": stored, "new_tokens": ()}), hints, seed)
    note = f"model.vocab={model.vocab}: rows {stored} and up, for model.new_tokens, start as the mean of the others"
    return replace(opened, weights=GrownVocab(opened.weights, model), notes=(*opened.notes, note), open_state=None)


def _open_native(
    checkpoint: Checkpoint, location: str | Path, model: models.ModelConfig | None, seed: int
) -> OpenedCheckpoint:
    checkpoint.open_base = open_base
    stored_model = model
    if model and checkpoint.model.without_router_bias is checkpoint.model:
        stored_model = model.without_router_bias
    if stored_model and not checkpoint.model.linear.wrappers():
        stored_model = stored_model.without_wrappers
    if stored_model and not checkpoint.model.score_head:
        stored_model = stored_model.without_score_head
    if stored_model and not checkpoint.model.mtp_blocks:
        stored_model = stored_model.without_mtp
    notes: tuple[str, ...] = ()
    if stored_model:
        notes = context_notes(checkpoint.model, stored_model)
        stored_model = with_context_of(stored_model, checkpoint.model)
    if stored_model and (difference := first_model_difference(checkpoint.model, stored_model)):
        key, stored, expected = difference
        raise UserError(f"model.{key}={expected}: {location} has {stored}")
    if model and stored_model is not model:
        new = {NEW_HEAD_NOTE: model.score_head and not checkpoint.model.score_head}
        new[NEW_MTP_NOTE] = bool(model.mtp_blocks and not checkpoint.model.mtp_blocks)
        notes += tuple(note for note, is_new in new.items() if is_new)
        return OpenedCheckpoint("native", AddedParameters(checkpoint, model, seed), notes)
    has_state = len(checkpoint.dtypes) > 1 or checkpoint.step > 0  # a user's update rule may have no state
    return OpenedCheckpoint("native", checkpoint, open_state=(lambda: checkpoint.state) if has_state else None)


def start_from_adapter(weights: WeightSource) -> WeightSource:
    """The weights that a run begins with: those of the adapter that `lora.init_from` names instead of `weights`, where
    it has them."""
    options = lora_options(weights.model)
    if options is None or options.init_from is None:
        return weights
    adapter = AdaptedWeights(read_adapter(local_weights(options.init_from)), with_lora(weights.model, None), weights)
    found = lora_options(adapter.model)
    assert found
    for key in ("rank", "alpha", "rank_stabilized", "dora"):
        if (value := getattr(options, key)) != getattr(found, key):
            raise UserError(f"lora.{key}={value}: {options.init_from} has {getattr(found, key)}")
    if not set(found.train) <= set(options.train):  # a checkpoint names the base for all that is not trained
        raise UserError(
            f"lora.train={list(options.train)}: {options.init_from} has changed {', '.join(found.train)}, too"
        )
    names = [{name for name in unfused_tensors(model) if ".lora_" in name} for model in (weights.model, adapter.model)]
    if different := min(names[0] ^ names[1], default=None):
        raise UserError(
            f"lora.targets={format_targets(options)}: {options.init_from} has adapters of other layers, such as "
            f"{different.rpartition('.')[0]}; nearest: {format_targets(found)}"
        )
    adapter.model = weights.model  # with the run's own dropout and learning rates
    return adapter


def open_adapter(location: str, base: WeightSource, base_location: str) -> WeightSource:
    """The weights `base`, which are those at `base_location`, with the adapter at `location`: the folder of PEFT, or a
    run or checkpoint of LoRA, which need not have been trained with this copy of the base."""
    if base.model.linear.wrappers():
        raise UserError(f"{location}: its base model {base_location} has adapters already; nearest: convert --merge")
    location = str(local_weights(location) if is_remote_model(location) else location)
    latest = latest_checkpoint(open_storage(location))
    if latest is None:
        return AdaptedWeights(read_adapter(local_weights(location)), base.model, base, base_location)
    checkpoint = Checkpoint(latest)
    if lora_options(checkpoint.model) is None:
        raise UserError(f"{location}: no adapter; a run without lora has a whole model")
    if difference := first_model_difference(base.model, with_lora(checkpoint.model, None)):
        key, has, expected = difference
        raise UserError(f"{location}: its base model has model.{key}={expected}; {base_location} has {has}")
    checkpoint.open_base = lambda *_: base
    return checkpoint


def format_targets(options: LoraKeys) -> str:
    return f"[{', '.join(options.targets)}]"


def check_export(model: models.ModelConfig) -> None:
    """Raise UserError if a run cannot export its weights, or the adapter that it trains."""
    if model.linear.wrappers():
        found = adapter_tensors(model)
        if found.shared_modules:
            raise UserError(
                f"PEFT has one adapter for all layers of {found.shared_modules[0]}, which are trained apart"
            )
    else:
        hf.check_hf_export(model)


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
    if isinstance(weights, MergedWeights):
        return read_model_files(weights.adapted, source, config)
    if isinstance(weights, Checkpoint):
        return weights.read_model_files()
    files = find_tokenizer_files(source, config)
    if isinstance(weights, AdaptedWeights) and not files and weights.base:
        return read_model_files(weights.base, weights.base_location, config)
    return hf.read_model_files(files[0].parent) if files else {}


def _model_from_nearby_config(path: Path) -> models.ModelConfig:
    """The model of a config.json in `path` or up to three levels above it."""
    for directory in (path, *list(path.absolute().parents)[:3]):
        if (directory / "config.json").is_file():
            return from_hf(directory)
    raise UserError(f"{path}: does not store the model's configuration; pass --config config.json (Hugging Face's)")
