"""Writes the folder of a LoRA adapter as PEFT does."""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from trainyard import models
from trainyard.checkpoint.checkpoint import Checkpoint
from trainyard.checkpoint.safetensors_file import TensorSpec, encode_header, write_tensor
from trainyard.checkpoint.weights import WeightSource
from trainyard.core.atomic_files import atomic_directory, durable_file
from trainyard.core.errors import UserError
from trainyard.families.linear_wrappers.lora import EXPERTS
from trainyard.formats.format import FormatWriter, ProgressCallback
from trainyard.formats.peft.adapter import WEIGHTS_FILE, AdaptedWeights, AdapterTensors, adapter_tensors, lora_options
from trainyard.formats.peft.adapter_config import CONFIG_FILE, config_bytes, write_options
from trainyard.formats.peft.expert_tensors import TARGETS, columns_of_b
from trainyard.formats.tensor_map import StoredTensor, assemble

CARD = """---
base_model: {base}
library_name: peft
tags:
- base_model:adapter:{base}
- lora
- transformers
---

A LoRA adapter of {base}, trained with trainyard.
"""


def write_adapter(
    directory: Path,
    weights: WeightSource,
    base: str | None = None,
    dtype: torch.dtype | None = None,
    progress: ProgressCallback = lambda count: None,
    model_files: Mapping[str, bytes] = MappingProxyType({}),
    is_writer: bool = True,
) -> None:
    """Write the folder of the adapter in `weights`, as PEFT writes it. It appears under its name only when complete.

    `base` is the name or path of the model that it belongs to, `dtype` None keeps the dtypes of `weights`, and
    `model_files` are those of the tokenizer. If reading weights is a collective operation, all ranks call this, one of
    them with `is_writer`.
    """
    found = adapter_tensors(weights.model)
    config = _configuration(weights, found, base)
    by_name: dict[str, list[StoredTensor]] = {}
    for stored in found.stored:
        by_name.setdefault(stored.name, []).append(stored)
    kinds = {name: dtype or weights.dtype(copies[0].slices[0].name) for name, copies in by_name.items()}
    order = sorted(by_name, key=lambda name: (-kinds[name].itemsize, name))  # that of the safetensors library
    tensors = (_single_value(by_name[name], weights, kinds[name]) for name in order)
    if not is_writer:
        for _ in tensors:
            pass
        return
    specs = [TensorSpec(name, kinds[name], _file_shape(by_name[name][0])) for name in order]
    with atomic_directory(directory) as temporary:
        with durable_file(temporary / WEIGHTS_FILE) as file:
            file.write(encode_header(specs, {"format": "pt"}))
            for tensor in tensors:
                progress(write_tensor(file, tensor))
        name = config["base_model_name_or_path"] or "a model"
        card = CARD.format(base=name).encode()
        for file_name, data in {**model_files, CONFIG_FILE: config_bytes(config), "README.md": card}.items():
            with durable_file(temporary / file_name) as file:
                file.write(data)


def base_name(weights: WeightSource) -> str | None:
    """The model that an adapter in `weights` belongs to, for others to find: a name, or an absolute path."""
    if isinstance(weights, AdaptedWeights):
        return weights.adapter.base
    return absolute_base(weights.config.checkpoint.weights_from) if isinstance(weights, Checkpoint) else None


def absolute_base(location: str | None) -> str | None:
    """The same location from any directory."""
    path = Path(location or "").expanduser()
    return str(path.absolute()) if location and path.exists() else location


def _configuration(weights: WeightSource, found: AdapterTensors, base: str | None) -> dict[str, Any]:
    """The content of adapter_config.json: that of the folder it came from, or a new one."""
    if isinstance(weights, AdaptedWeights):
        return weights.adapter.config
    model = weights.model
    options = lora_options(model)
    assert options
    return write_options(
        options,
        found.modules,
        found.linear_modules,
        found.trained_modules,
        base,
        ensure_weight_tying=found.is_tied,
        fan_in_fan_out=found.is_transposed,
        target_parameters=TARGETS if EXPERTS in options.targets else None,
        task_type="SEQ_CLS" if model.score_head else "CAUSAL_LM" if models.family_of(model).is_causal else None,
    )


def _single_value(copies: list[StoredTensor], weights: WeightSource, dtype: torch.dtype) -> Tensor:
    """The value of a tensor that several of our layers have, of which a folder can hold only one."""
    first, *others = (assemble(stored, weights, dtype) for stored in copies)
    if not all(torch.equal(first, other) for other in others):
        raise UserError(
            f"{copies[0].name}: PEFT has one A here, but {', '.join(stored.slices[0].name for stored in copies)} were "
            "trained apart; nearest: convert --merge"
        )
    return first if copies[0].stacked is None else columns_of_b(first)


def _file_shape(stored: StoredTensor) -> tuple[int, ...]:
    if stored.stacked is None:
        return stored.shape
    experts, rows, rank = stored.shape
    return rows, rank * experts


WRITER = FormatWriter(
    lambda model, layout: {stored.name: stored for stored in adapter_tensors(model).stored}.values(),
    lambda directory, weights, options: write_adapter(
        directory, weights, base_name(weights), options.dtype, options.progress, options.model_files
    ),
    layout_keys={},
)
