"""From any form of checkpoint that is known to ours, Hugging Face's or NxD's, tensor by tensor."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from trainyard import models
from trainyard.checkpoint.formats import hf
from trainyard.checkpoint.formats.nxd import layout as nxd
from trainyard.checkpoint.formats.nxd.files import write_nxd
from trainyard.checkpoint.formats.nxd.layout import KvOrder, NxdLayout
from trainyard.checkpoint.formats.nxd.names import NameStyle, QkvKind
from trainyard.checkpoint.formats.nxd.optimizer import NxdTrainingState
from trainyard.checkpoint.formats.tensor_map import WeightSource, stored_shape, unfused_shapes
from trainyard.checkpoint.io.storage import resolve_new_directory
from trainyard.checkpoint.native.checkpoint import Checkpoint
from trainyard.checkpoint.native.writer import StateSource, WeightsOnlyState, checkpoint_bytes, write_checkpoint
from trainyard.checkpoint.registry import OpenedCheckpoint
from trainyard.config.load import parse
from trainyard.config.model_schema import LlamaConfig
from trainyard.config.schema import Config
from trainyard.core.atomic_files import atomic_directory
from trainyard.core.errors import UserError

TargetFormat = Literal["hf", "nxd", "native"]
DTYPE_CHOICES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
LAYOUT_CHOICES: dict[str, tuple[str, ...]] = {
    "qkv": get_args(QkvKind),
    "kv_order": get_args(KvOrder),
    "style": get_args(NameStyle),
}
NATIVE_LAYOUT_KEYS = ("tp", "pp", "vpp", "cp", "dp", "pipeline_cuts")
ProgressCallback = Callable[[int], None]


@dataclass(frozen=True)
class ConversionTarget:
    """What to write."""

    format: TargetFormat
    layout: Mapping[str, Any]
    """For nxd, fields of NxdLayout; for native, tp, pp, vpp, cp, dp and cuts."""
    dtype: torch.dtype | None = None
    xser: bool = False
    weights_only: bool = False
    """native: leave the optimizer's state behind."""


def parse_layout(target_format: TargetFormat, text: str, flag: str = "--layout") -> dict[str, Any]:
    """`tp=8,pp=4,pipeline_cuts=3:7` to values by name, each checked."""
    known = (
        NATIVE_LAYOUT_KEYS
        if target_format == "native"
        else [field.name for field in fields(NxdLayout)]
        if target_format == "nxd"
        else []
    )
    out: dict[str, Any] = {}
    for word in filter(None, text.split(",")):
        key, equals, value = word.partition("=")
        if not equals or key not in known:
            takes = f"takes {', '.join(known)}, such as tp=8,pp=4" if known else "takes no layout"
            raise UserError(f"{flag} {word}: {target_format} {takes}")
        out[key] = _parse_value(flag, key, value)
    return out


def total_bytes(opened: OpenedCheckpoint, target: ConversionTarget) -> int:
    """What will be written, but for headers."""
    if target.format == "native":
        return checkpoint_bytes(_source_state(opened, target))
    shapes = unfused_shapes(opened.weights.model)

    def size(part: str, count: int) -> int:
        return count * (target.dtype or opened.weights.dtype(part)).itemsize

    if target.format == "hf":
        return sum(size(part, torch.Size(shape).numel()) for part, shape in shapes.items())
    model = _require_llama(opened.weights.model)
    held = nxd.rank_tensors(model, complete_nxd_layout(model, target.layout))
    return sum(
        size(each.ranges[0].name, torch.Size(stored_shape(each, shapes)).numel())
        for tensors in held.values()
        for each in tensors
    )


def convert_checkpoint(
    opened: OpenedCheckpoint, source: Path, directory: Path, target: ConversionTarget, progress: ProgressCallback
) -> None:
    """Write `opened`, which lies at `source`, to `directory`, which must be new. It appears whole or not at all."""
    directory = resolve_new_directory(directory)
    weights, source = opened.weights, source.expanduser()
    inside = source.is_file() or source.name == "model"  # then what belongs to it lies above
    beside = next((each for each in (source, *([source.parent] * inside)) if hf.tokenizer_files(each)), None)
    if target.format == "hf":
        hf.write_hf(directory, weights, target.dtype, tokenizer_source=beside, progress=progress)
    elif target.format == "nxd":
        model = _require_llama(weights.model)

        def also(part: Path) -> None:
            """What NxD's files do not say themselves."""
            first = next(iter(unfused_shapes(model)))
            hf.write_config(part / "config.json", model, target.dtype or weights.dtype(first))
            if beside:
                hf.copy_tokenizer(beside, part)

        layout = complete_nxd_layout(model, target.layout)
        write_nxd(directory, weights, layout, target.dtype, target.xser, progress, also)
    else:
        _write_native(directory, opened, target, progress)


def complete_nxd_layout(model: LlamaConfig, options: Mapping[str, Any]) -> NxdLayout:
    """What the user asked for; what was left open as NxD's own models of today have it."""
    layout = NxdLayout(**options)
    if "qkv" not in options:
        grouped: QkvKind = "fused" if layout.style == "hf" else "qkv_linear"
        layout = replace(layout, qkv="coalesced" if model.num_kv_heads == model.heads else grouped)
    if "kv_multiplier" not in options and layout.qkv in ("fused", "qkv_linear"):
        works = nxd.valid_kv_multipliers(model, layout)
        layout = replace(layout, kv_multiplier=works[0] if works else 1)
    return layout


def _source_state(opened: OpenedCheckpoint, target: ConversionTarget) -> StateSource:
    if not opened.open_state or target.weights_only:
        return WeightsOnlyState(opened.weights, target.dtype)
    if target.dtype:
        raise UserError("--dtype: what goes with the optimizer's state keeps its dtype; nearest: --weights-only")
    return opened.open_state()


def _write_native(
    directory: Path, opened: OpenedCheckpoint, target: ConversionTarget, progress: ProgressCallback
) -> None:
    state = _source_state(opened, target)
    sizes = {"tp": 1, "pp": 1, "vpp": 1, "cp": 1, **target.layout}
    ranks = sizes["tp"] * sizes["pp"] * sizes["cp"] * sizes.pop("dp", 1)
    passed: dict[str, Any] = {"step": 0, "updates": 0, "skipped": [0, 0], "consumed_samples": 0}
    if isinstance(state, Checkpoint):
        passed = {key: state.manifest.get(key, value) for key, value in passed.items()}
    elif isinstance(state, NxdTrainingState):
        passed |= {"step": state.step if state.step is not None else state.updates, "updates": state.updates}
    if not isinstance(opened.weights, Checkpoint) or opened.weights.manifest.get("converted"):
        passed["converted"] = True  # its configuration says nothing but what the model is
    config = _target_config(opened.weights, sizes, ranks)
    with atomic_directory(directory) as part:
        write_checkpoint(part, state, config, ranks, passed, progress)


def _target_config(weights: WeightSource, sizes: Mapping[str, Any], ranks: int) -> Config:
    """The run's own, or one that says no more than what the model is, at the layout asked for."""
    model = weights.model
    if isinstance(weights, Checkpoint):
        data = weights.config.model_dump(mode="json")
        dp = ranks // (sizes["tp"] * sizes["pp"] * sizes["cp"])
        if data["train"]["global_batch"] % (data["train"]["micro_batch"] * dp):
            data["train"]["micro_batch"] = 1  # any will do for a run that goes on
    else:
        data = {
            "model": model.model_dump(mode="json"),
            "data": {"source": "synthetic", "seq_len": model.max_positions, "max_predictions": 1},
            "train": {"steps": 1, "global_batch": ranks},
        }
    return parse({**data, "layout": dict(sizes)})


def _parse_value(flag: str, key: str, value: str) -> Any:
    if key in LAYOUT_CHOICES:
        if value not in LAYOUT_CHOICES[key]:
            raise UserError(f"{flag} {key}={value}: not one of {', '.join(LAYOUT_CHOICES[key])}")
        return value
    if key in ("gate_up", "by_head"):
        return parse_bool(f"{flag} {key}", value)
    if re.fullmatch(r"\d{1,9}(:\d{1,9})*" if key == "pipeline_cuts" else r"0*[1-9]\d{0,8}", value):
        return tuple(int(each) for each in value.split(":")) if key == "pipeline_cuts" else int(value)
    raise UserError(
        f"{flag} {key}={value}: wanted {'layer numbers such as 3:7' if key == 'pipeline_cuts' else 'a number from 1 up'}"
    )


def parse_bool(flag: str, value: str) -> bool:
    """What a boolean's text says; Python's bool("False") is True."""
    words = {"true": True, "1": True, "yes": True, "on": True, "false": False, "0": False, "no": False, "off": False}
    try:
        return words[value.lower()]
    except KeyError:
        raise UserError(f"{flag}={value}: wanted true or false") from None


def _require_llama(model: models.AnyModelConfig) -> LlamaConfig:
    if not isinstance(model, LlamaConfig):
        raise UserError(f"model.family={model.family}: NxD's layouts are of Llama models; nearest: --to hf")
    return model
