"""Reads the folder of a LoRA adapter of PEFT: adapter_config.json and adapter_model.safetensors.

PEFT names a tensor after the module of transformers that has the adapter. The names of those modules follow from the
family's Hugging Face names of weights, so that one description of the tensors serves every family, in both directions.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainyard import models
from trainyard.checkpoint.weights import WeightSource, unfused_tensors
from trainyard.core.errors import UserError
from trainyard.core.tensor_slice import TensorSlice
from trainyard.families.blueprint import name_pattern
from trainyard.families.linear_wrapper import LinearSection
from trainyard.families.linear_wrappers.lora import ALL_LINEAR, EXPERTS, LoraKeys, parameter_group, parts_of
from trainyard.families.registry import hf_names
from trainyard.formats.hf import stored_tensors
from trainyard.formats.io.lazy_tensor import LazyTensor
from trainyard.formats.io.safetensors_reader import open_safetensors
from trainyard.formats.peft.adapter_config import (
    CONFIG_FILE,
    read_config,
    read_options,
    targeted_modules,
)
from trainyard.formats.peft.expert_tensors import TARGETS, StackedB, expert_parameters, expert_tensors
from trainyard.formats.peft.optimum_shards import ADAPTER_FOLDER, SHARDS_FOLDER, read_shards
from trainyard.formats.tensor_map import StoredSlice, StoredTensor, check_tensors, read_slices, stored_slices

WEIGHTS_FILE = "adapter_model.safetensors"
RUN_FOLDER = "adapter"
"""Of a run directory."""
PREFIX = "base_model.model."
SUFFIXES = {"lora_A": ".lora_A.weight", "lora_B": ".lora_B.weight", "lora_magnitude": ".lora_magnitude_vector"}
"""What follows the name of a module, by the last part of our names."""


def lora_options(model: models.ModelConfig) -> LoraKeys | None:
    """The options of the adapters of a model; None: it has none."""
    options = (model.linear.model_extra or {}).get("lora")
    return options if isinstance(options, LoraKeys) else None


def with_lora(model: models.ModelConfig, options: Mapping[str, Any] | None) -> models.ModelConfig:
    """The model with adapters of these options, or without adapters."""
    sections = {name: section for name, section in (model.linear.model_extra or {}).items() if name != "lora"}
    linear = LinearSection.model_validate(sections | ({} if options is None else {"lora": options}))
    return model.model_copy(update={"linear": linear})


@dataclass(frozen=True)
class AdapterTensors:
    """The tensors in the folder of a model's adapter."""

    stored: tuple[StoredTensor, ...]
    """A module of several of our layers (GPT-2's c_attn) has one A. It is stored several times: as that of each."""
    modules: frozenset[str]
    """The modules of transformers that have an adapter."""
    linear_modules: frozenset[str]
    """The linear modules of its blocks."""
    trained_modules: frozenset[str]
    """The modules that are trained as they are."""
    shared_modules: tuple[str, ...]
    """The modules of several of our layers."""
    is_tied: bool
    """The embedding is trained, and the head shares its matrix."""
    is_transposed: bool
    """Modules hold their weights as [in, out] (GPT-2's Conv1D)."""


def adapter_tensors(model: models.ModelConfig) -> AdapterTensors:
    """What the folder of an adapter of `model` holds."""
    if lora_options(model) is None:
        raise UserError("--to peft: the model has no LoRA adapter; nearest: --to hf")
    blueprint = models.blueprint_of(model)
    hf_of = {piece.name: stored for stored in stored_tensors(with_lora(model, None)) for piece in stored.slices}
    trained = {
        piece.name
        for name in blueprint.parameter_names()
        for piece in blueprint.local_slices(name)
        if blueprint.spec(name).trained
    }
    linear = {part.name for spec in blueprint.specs if spec.is_linear for part in parts_of(spec)}
    experts = [replace(stored, name=PREFIX + stored.name) for stored in expert_tensors(model)]
    by_name: dict[str, list[StoredTensor]] = {stored.name: [stored] for stored in experts}
    of_experts = {piece.name for stored in experts for piece in stored.slices}
    modules, trained_modules = set(), set()
    for name, piece in unfused_tensors(model).items():
        layer, _, kind = name.rpartition(".")
        if name in of_experts:
            continue
        if kind in SUFFIXES:
            weight = hf_of[f"{layer}.weight"]
            module = weight.name.removesuffix(".weight")
            modules.add(module)
            stored_name = f"{PREFIX}{module}{SUFFIXES[kind]}"
            group = by_name.setdefault(stored_name, [])
            before = group.pop().slices if group and kind != "lora_A" else ()
            row_groups = 1 if kind == "lora_A" else weight.groups
            group.append(StoredTensor(stored_name, 0, (*before, piece), groups=row_groups))
        elif name in trained:
            trained_modules.add(hf_of[name].name.rpartition(".")[0])
            by_name[PREFIX + hf_of[name].name] = [StoredTensor(PREFIX + hf_of[name].name, 0, (piece,))]
    is_tied = False
    for copy, original in hf_names(model).tied.items():
        if PREFIX + original in by_name:
            (stored_original,) = by_name[PREFIX + original]
            by_name[PREFIX + copy] = [StoredTensor(PREFIX + copy, 0, stored_original.slices)]
            is_tied = True
    groups = by_name.values()
    is_linear = {name: name_pattern(name) in linear for name in hf_of}
    return AdapterTensors(
        tuple(stored for group in groups for stored in group),
        frozenset(modules),
        frozenset(hf_of[name].name.removesuffix(".weight") for name in hf_of if is_linear[name]),
        frozenset(trained_modules),
        tuple(
            group[0].name.removeprefix(PREFIX).removesuffix(SUFFIXES["lora_A"]) for group in groups if len(group) > 1
        ),
        is_tied,
        any(hf_of[name].transposed for name in hf_of if is_linear[name]),
    )


@dataclass(frozen=True)
class Adapter:
    """The folder of an adapter. Nothing of its tensors is read before it is used."""

    directory: Path
    config: dict[str, Any]
    """The content of adapter_config.json."""
    tensors: Mapping[str, LazyTensor]
    """By PEFT's names."""

    @property
    def base(self) -> str | None:
        """The model that it was trained with: a path, or a name on the Hub."""
        return self.config.get("base_model_name_or_path") or None

    @cached_property
    def modules(self) -> frozenset[str]:
        """The linear modules of transformers that have an adapter, by their tensors."""
        suffix = SUFFIXES["lora_A"]
        names = {name.removeprefix(PREFIX).removesuffix(suffix) for name in self.tensors if name.endswith(suffix)}
        return frozenset(name for name in names if not name.removesuffix(".base_layer").endswith(".experts"))

    def model_of(self, base: models.ModelConfig) -> models.ModelConfig:
        """The model `base` with this adapter. Refuses an adapter that this model cannot have."""
        where = str(self.directory)
        if lora_options(base):
            raise UserError(f"{where}: its base model has an adapter already; merge that first")
        layers, groups = self._names_of(base)
        experts, adapted = expert_parameters(base), self.config.get("target_parameters") or []
        parameters = targeted_modules({"target_modules": adapted}, experts)
        if adapted and (not parameters or parameters != experts):
            nearest = json.dumps(TARGETS if experts else None)
            raise UserError(f"{where}/{CONFIG_FILE}: target_parameters={adapted}: not supported; nearest: {nearest}")
        options = read_options(self.config, self.modules | parameters, f"{where}/{CONFIG_FILE}")
        linear = adapter_tensors(with_lora(base, options)).linear_modules
        for module in sorted(self.modules ^ targeted_modules(self.config, linear)):
            problem = "has no adapter" if module in linear - self.modules else "is no target_module that can have one"
            raise UserError(f"{where}: {module} {problem} in {WEIGHTS_FILE}; not supported")
        targets = [ALL_LINEAR] if self.modules == linear else layers
        targets += [EXPERTS] * bool(parameters)
        model = with_lora(base, {**options, "targets": targets, "train": groups})
        self._check_tied_head(model)
        expected = {stored.name: stored for stored in adapter_tensors(model).stored}
        found = {name: self.tensor(each) for name, each in expected.items() if name in self.tensors}
        check_tensors(where, expected, {**self.tensors, **found})
        return model

    def tensor(self, stored: StoredTensor) -> LazyTensor:
        """The data of a stored tensor."""
        tensor = self.tensors[stored.name]
        return tensor if stored.stacked is None else StackedB(tensor, stored.stacked)

    def _names_of(self, base: models.ModelConfig) -> tuple[list[str], list[str]]:
        """What this adapter's tensors are in `lora.targets` and `lora.train`."""
        blueprint = models.blueprint_of(base)
        spec_of = {
            piece.name: blueprint.spec(name)
            for name in blueprint.parameter_names()
            for piece in blueprint.local_slices(name)
        }
        layers: dict[str, None] = {}
        groups: dict[str, None] = {}
        for stored in stored_tensors(base):
            for piece in stored.slices:
                if stored.name.removesuffix(".weight") in self.modules:
                    layers[piece.name.split(".")[-2]] = None
                elif PREFIX + stored.name in self.tensors and (group := parameter_group(spec_of[piece.name])):
                    groups[group] = None
        return list(layers), list(groups)

    def _check_tied_head(self, model: models.ModelConfig) -> None:
        """Refuse a head and an embedding of different values where the model has one matrix for both."""
        for copy, original in hf_names(model).tied.items():
            pair = [self.tensors.get(PREFIX + name) for name in (copy, original)]
            if pair == [None, None]:
                continue
            values = [None if tensor is None else tensor.read() for tensor in pair]
            if values[0] is None or values[1] is None or not torch.equal(values[0], values[1]):
                raise UserError(
                    f"{self.directory}: trains {original if values[0] is None else copy} apart from the other one, but "
                    f"the model has one matrix for both; nearest: PEFT's ensure_weight_tying=True"
                )


def find_adapter(path: Path) -> Path | None:
    """The folder of the adapter at `path`: itself, or that in a run. None: there is none."""
    path = path.parent if path.name == SHARDS_FOLDER else path
    folders = (path, path / RUN_FOLDER, path / ADAPTER_FOLDER)
    return next((each for each in folders if (each / CONFIG_FILE).is_file()), None)


def read_adapter(directory: str | Path) -> Adapter:
    """Open the folder of an adapter, or that of a run. Refuses adapters of kinds that cannot be computed here."""
    root = find_adapter(Path(directory).expanduser())
    if root is None:
        raise UserError(f"{directory}: no adapter; expected PEFT's {CONFIG_FILE} in it")
    config = read_config(root)
    if not (root / WEIGHTS_FILE).is_file() and (root / SHARDS_FOLDER).is_dir():
        return Adapter(root, config, read_shards(root))
    if not (root / WEIGHTS_FILE).is_file():
        raise UserError(f"{root / WEIGHTS_FILE}: no such file; adapters are read from safetensors only")
    return Adapter(root, config, open_safetensors(root / WEIGHTS_FILE))


class AdaptedWeights:
    """The weights of a model with an adapter as a WeightSource: those of the base, and those of the adapter's folder
    instead where it has them. Without `base`, the weights of the adapter alone."""

    notes: tuple[str, ...] = ()

    def __init__(
        self, adapter: Adapter, model: models.ModelConfig, base: WeightSource | None, base_location: str | Path = ""
    ) -> None:
        """`base_location` is where the weights `base`, of the configuration `model`, were read from."""
        self.adapter, self.base, self.base_location = adapter, base, base_location
        self.model = adapter.model_of(model)
        pairs = ((stored, adapter.tensor(stored)) for stored in adapter_tensors(self.model).stored)
        self._stored: dict[str, list[StoredSlice]] = {}
        for each in stored_slices(pairs):
            self._stored.setdefault(each.piece.name, []).append(each)

    def __contains__(self, name: str) -> bool:
        """True if the adapter's folder has this tensor."""
        return name in self._stored

    def dtype(self, name: str) -> torch.dtype:
        if name in self._stored:
            return self._stored[name][0].tensor.dtype
        assert self.base
        return self.base.dtype(name)

    def read(self, piece: TensorSlice) -> Tensor:
        if piece.name not in self._stored:
            assert self.base
            return self.base.read(piece)
        return read_slices(self._stored[piece.name], piece)
