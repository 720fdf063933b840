"""Converts a checkpoint of any known format to the native, Hugging Face, NxD or DCP format, one tensor at a time."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import chain
from math import prod
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from trainyard.checkpoint.compare_bits import first_difference
from trainyard.checkpoint.formats import hf
from trainyard.checkpoint.formats.dcp.files import write_dcp
from trainyard.checkpoint.formats.dcp.names import DcpNames, dcp_tensors
from trainyard.checkpoint.formats.nxd import layout as nxd
from trainyard.checkpoint.formats.nxd.files import ProgressCallback, write_nxd
from trainyard.checkpoint.formats.nxd.layout import KvOrder, NxdLayout, require_nxd_model
from trainyard.checkpoint.formats.nxd.names import NameStyle, QkvKind
from trainyard.checkpoint.formats.tensor_map import TrainingState, WeightSource, unfused_tensors
from trainyard.checkpoint.native.checkpoint import Checkpoint
from trainyard.checkpoint.native.writer import checkpoint_bytes, weights_only_state, write_checkpoint
from trainyard.checkpoint.registry import OpenedCheckpoint, check_hf_export, find_tokenizer_files, read_model_files
from trainyard.checkpoint.transfer import check_link
from trainyard.config.load import parse
from trainyard.config.schema import Config
from trainyard.core.atomic_files import atomic_directory
from trainyard.core.errors import UserError
from trainyard.families.decoder import DecoderConfig
from trainyard.families.moe import MoeConfig
from trainyard.parallel.layout import Layout
from trainyard.remote.storage import resolve_new_directory

TargetFormat = Literal["hf", "nxd", "native", "dcp"]
DTYPE_CHOICES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
LAYOUT_CHOICES: dict[str, tuple[str, ...]] = {
    "qkv": get_args(QkvKind),
    "kv_order": get_args(KvOrder),
    "style": get_args(NameStyle),
    "names": get_args(DcpNames),
}
NATIVE_LAYOUT_KEYS = ("tp", "pp", "vpp", "cp", "dp", "pipeline_cuts")


@dataclass(frozen=True)
class ConversionTarget:
    """The format and options of the checkpoint to write."""

    format: TargetFormat
    layout: Mapping[str, Any]
    """Fields of NxdLayout for nxd; NATIVE_LAYOUT_KEYS for native; names for dcp."""
    dtype: torch.dtype | None = None
    xser: bool = False
    weights_only: bool = False
    """For native: omit the optimizer state."""


def parse_layout(target_format: TargetFormat, text: str, flag: str = "--layout") -> dict[str, Any]:
    """Parse text such as `tp=8,pp=4,pipeline_cuts=3:7` to checked values by key."""
    nxd_keys = tuple(field.name for field in fields(NxdLayout))
    keys = {"native": NATIVE_LAYOUT_KEYS, "nxd": nxd_keys, "hf": (), "dcp": ("names",)}[target_format]
    out: dict[str, Any] = {}
    for item in filter(None, text.split(",")):
        key, equals, value = item.partition("=")
        if not equals or key not in keys:
            example = "names=torchtitan" if target_format == "dcp" else "tp=8,pp=4"
            allowed = f"takes {', '.join(keys)}, such as {example}" if keys else "takes no layout"
            raise UserError(f"{flag} {item}: {target_format} {allowed}")
        out[key] = _parse_value(flag, key, value)
    return out


def total_bytes(opened: OpenedCheckpoint, target: ConversionTarget) -> int:
    """Bytes that the conversion writes, without file headers. Refuses what cannot be written."""
    weights = opened.weights
    if target.format == "native":
        Layout.from_config(*_target_config(weights, target.layout))
        return checkpoint_bytes(_source_state(opened, target))
    if target.format == "hf":
        check_hf_export(weights.model)
        tensors = hf.stored_tensors(weights.model)
    elif target.format == "dcp":
        tensors = dcp_tensors(weights.model, target.layout.get("names", "hf"))
    else:
        model = require_nxd_model(weights.model, "--to hf")
        layout = complete_nxd_layout(model, target.layout)
        nxd.check_layout(model, layout)
        tensors = tuple(chain.from_iterable(nxd.rank_tensors(model, layout).values()))
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
    dtype = target.dtype or weights.dtype(next(iter(unfused_tensors(weights.model))))
    write_extra_files = partial(hf.write_model_files, model=weights.model, dtype=dtype, model_files=model_files)
    if target.format == "hf":
        hf.write_hf(directory, weights, target.dtype, model_files=model_files, progress=progress)
    elif target.format == "nxd":
        model = require_nxd_model(weights.model, "--to hf")
        layout = complete_nxd_layout(model, target.layout)
        write_nxd(directory, weights, layout, target.dtype, target.xser, progress, write_extra_files)
    elif target.format == "dcp":
        names = target.layout.get("names", "hf")
        write_dcp(directory, weights, names, target.dtype, progress, write_extra_files)
    else:
        _write_native(directory, opened, target, model_files, progress)


def complete_nxd_layout(model: DecoderConfig, options: Mapping[str, Any]) -> NxdLayout:
    """The layout with the user's options. What they leave open is as in NxD's current models."""
    layout = NxdLayout(**options)
    if "qkv" not in options:
        # NxD's models with experts have no fused matrix.
        can_fuse = layout.style == "hf" and not isinstance(model, MoeConfig)
        grouped: QkvKind = "fused" if can_fuse else "qkv_linear"
        layout = replace(layout, qkv="coalesced" if model.num_kv_heads == model.heads else grouped)
    if "kv_multiplier" not in options and layout.qkv in ("fused", "qkv_linear"):
        valid = nxd.valid_kv_multipliers(model, layout)
        layout = replace(layout, kv_multiplier=valid[0] if valid else 1)
    return layout


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
    model_files: hf.ModelFiles,
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


def _parse_value(flag: str, key: str, value: str) -> Any:
    if key in LAYOUT_CHOICES:
        if value not in LAYOUT_CHOICES[key]:
            raise UserError(f"{flag} {key}={value}: not one of {', '.join(LAYOUT_CHOICES[key])}")
        return value
    if key in ("gate_up", "by_head"):
        return parse_bool(f"{flag} {key}", value)
    is_list = key == "pipeline_cuts"
    if re.fullmatch(r"\d{1,9}(:\d{1,9})*" if is_list else r"0*[1-9]\d{0,8}", value):
        return tuple(int(layer) for layer in value.split(":")) if is_list else int(value)
    expected = "layer numbers such as 3:7" if is_list else "a positive whole number"
    raise UserError(f"{flag} {key}={value}: expected {expected}")


def parse_bool(flag: str, value: str) -> bool:
    """Parse a boolean by its meaning (Python's bool("False") is True)."""
    values = {"true": True, "1": True, "yes": True, "on": True, "false": False, "0": False, "no": False, "off": False}
    try:
        return values[value.lower()]
    except KeyError:
        raise UserError(f"{flag}={value}: expected true or false") from None
