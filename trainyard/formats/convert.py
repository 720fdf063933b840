"""Converts a checkpoint of any known format to any format that has a writer, one tensor at a time."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from trainyard.checkpoint.checkpoint import Checkpoint
from trainyard.checkpoint.weights import TrainingState, WeightSource, unfused_tensors
from trainyard.config.load import parse
from trainyard.config.schema import Config
from trainyard.core.atomic_files import atomic_directory
from trainyard.core.errors import UserError
from trainyard.formats.compare import first_difference
from trainyard.formats.format import LayoutKeys, ProgressCallback, WriteOptions
from trainyard.formats.hf import ModelFiles, write_model_files
from trainyard.formats.native_writer import checkpoint_bytes, weights_only_state, write_checkpoint
from trainyard.formats.registry import FORMATS, OpenedCheckpoint, find_tokenizer_files, read_model_files
from trainyard.formats.transfer import check_link
from trainyard.parallel.layout import Layout
from trainyard.remote.storage import resolve_new_directory

WRITERS = {each.name: each.writer for each in FORMATS if each.writer}
"""The formats that a conversion writes, besides the native one."""
KEEP_ADAPTERS = ("native", "peft")
"""Formats that hold adapters next to the weights, or alone."""
if TYPE_CHECKING:
    TargetFormat = str
else:
    TargetFormat = Literal[(*WRITERS, "native")]  # the choices of --to, which the type checker does not know
DTYPE_CHOICES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
NATIVE_LAYOUT_KEYS: LayoutKeys = dict.fromkeys(("tp", "pp", "vpp", "cp", "dp"), int) | {"pipeline_cuts": tuple}


@dataclass(frozen=True)
class ConversionTarget:
    """The format and options of the checkpoint to write."""

    format: TargetFormat
    layout: Mapping[str, Any]
    """Values by the keys of the format, as parse_layout returns them."""
    dtype: torch.dtype | None = None
    xser: bool = False
    weights_only: bool = False
    """For native: omit the optimizer state."""


def parse_layout(target_format: TargetFormat, text: str, flag: str = "--layout") -> dict[str, Any]:
    """Parse text such as `tp=8,pp=4,pipeline_cuts=3:7` to checked values by key."""
    writer = WRITERS.get(target_format)
    keys = writer.layout_keys if writer else NATIVE_LAYOUT_KEYS
    out: dict[str, Any] = {}
    for item in filter(None, text.split(",")):
        key, equals, value = item.partition("=")
        if not equals or key not in keys:
            example = writer.layout_example if writer else "tp=8,pp=4"
            allowed = f"takes {', '.join(keys)}, such as {example}" if keys else "takes no layout"
            raise UserError(f"{flag} {item}: {target_format} {allowed}")
        out[key] = _parse_value(f"{flag} {key}", keys[key], value)
    return out


def total_bytes(opened: OpenedCheckpoint, target: ConversionTarget) -> int:
    """Bytes that the conversion writes, without file headers. Refuses what cannot be written."""
    weights = opened.weights
    if weights.model.linear.wrappers() and target.format not in KEEP_ADAPTERS:
        raise UserError(f"--to {target.format}: has no place for adapters; nearest: --merge, or --to peft")
    if target.format == "native":
        Layout.from_config(*_target_config(weights, target.layout))
        return checkpoint_bytes(_source_state(opened, target))
    tensors = WRITERS[target.format].tensors(weights.model, target.layout)
    sizes = ((stored.slices[0].name, prod(stored.shape)) for stored in tensors)
    return sum(numel * (target.dtype or weights.dtype(name)).itemsize for name, numel in sizes)


def convert_checkpoint(
    opened: OpenedCheckpoint,
    source: Path,
    directory: Path,
    target: ConversionTarget,
    progress: ProgressCallback,
    config: Path | None = None,
) -> None:
    """Convert `opened`, whose path is `source`. `directory` must be new; it appears under its name when complete. If
    the source has no tokenizer, the one next to `config`, the user's config.json, is copied."""
    directory = resolve_new_directory(directory)
    weights = opened.weights
    for file in find_tokenizer_files(source, config):
        check_link(file, file.parent)
    model_files = read_model_files(weights, source, config)
    if target.format == "native":
        _write_native(directory, opened, target, model_files, progress)
        return
    dtype = target.dtype or weights.dtype(next(iter(unfused_tensors(weights.model))))
    write_extra_files = partial(write_model_files, model=weights.model, dtype=dtype, model_files=model_files)
    options = WriteOptions(target.layout, target.dtype, target.xser, model_files, write_extra_files, progress)
    WRITERS[target.format].write(directory, weights, options)


def _source_state(opened: OpenedCheckpoint, target: ConversionTarget) -> TrainingState:
    if not opened.open_state or target.weights_only:
        return weights_only_state(opened.weights, target.dtype)
    if target.dtype:
        raise UserError("--dtype: cannot change the dtype of weights with optimizer state; nearest: --weights-only")
    return opened.open_state()


def _write_native(
    directory: Path,
    opened: OpenedCheckpoint,
    target: ConversionTarget,
    model_files: ModelFiles,
    progress: ProgressCallback,
) -> None:
    state = _source_state(opened, target)
    updates = state.counters.get("updates", 0)
    counters = {"step": updates, "updates": updates, "skipped": [0, 0], "consumed_samples": 0, **state.counters}
    if not isinstance(opened.weights, Checkpoint) or opened.weights.manifest.get("converted"):
        counters["converted"] = True  # only the model section of its configuration is meaningful
    config, ranks = _target_config(opened.weights, target.layout)
    with atomic_directory(directory) as temporary:
        write_checkpoint(temporary, state, config, ranks, counters, model_files, progress)


def _target_config(weights: WeightSource, layout: Mapping[str, Any]) -> tuple[Config, int]:
    """The configuration of the run, or a minimal one with the model, at the requested layout; the number of ranks."""
    sizes = {"tp": 1, "pp": 1, "vpp": 1, "cp": 1, **layout}
    dp = sizes.pop("dp", 1)
    ranks = sizes["tp"] * sizes["pp"] * sizes["cp"] * dp
    model = weights.model
    if isinstance(weights, Checkpoint):
        data = weights.config.model_dump(mode="json")
        if data["train"]["global_batch"] % (data["train"]["micro_batch"] * dp):
            data["train"]["micro_batch"] = 1  # a resumed run may use any micro batch size
    else:
        data = {
            "model": model.model_dump(mode="json"),
            "data": {"source": "synthetic", "seq_len": model.max_positions, "max_predictions": 1},
            "train": {"steps": 1, "global_batch": ranks},
        }
    return parse({**data, "layout": sizes}), ranks


def first_different_tensor(
    opened: OpenedCheckpoint, converted: OpenedCheckpoint, target: ConversionTarget
) -> str | None:
    """The name of the first tensor that a conversion changed by more than its rounding to `target.dtype`."""
    if target.format == "native" and opened.open_state and not target.weights_only:
        assert converted.open_state
        return first_difference(opened.open_state(), converted.open_state(), None)
    source, written = (weights_only_state(each.weights) for each in (opened, converted))
    return first_difference(source, written, target.dtype)


def _parse_value(name: str, kind: type | tuple[str, ...], value: str) -> Any:
    if isinstance(kind, tuple):
        if value not in kind:
            raise UserError(f"{name}={value}: not one of {', '.join(kind)}")
        return value
    if kind is bool:
        return parse_bool(name, value)
    is_list = kind is tuple
    if re.fullmatch(r"\d{1,9}(:\d{1,9})*" if is_list else r"0*[1-9]\d{0,8}", value):
        return tuple(int(layer) for layer in value.split(":")) if is_list else int(value)
    expected = "layer numbers such as 3:7" if is_list else "a positive whole number"
    raise UserError(f"{name}={value}: expected {expected}")


def parse_bool(flag: str, value: str) -> bool:
    """Parse a boolean by its meaning (Python's bool("False") is True)."""
    values = {"true": True, "1": True, "yes": True, "on": True, "false": False, "0": False, "no": False, "off": False}
    try:
        return values[value.lower()]
    except KeyError:
        raise UserError(f"{flag}={value}: expected true or false") from None
