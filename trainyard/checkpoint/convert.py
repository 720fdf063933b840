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
from trainyard.checkpoint.formats.nxd.names import Qkv, Style
from trainyard.checkpoint.formats.nxd.optimizer import NxdState
from trainyard.checkpoint.formats.tensor_map import Weights, shapes_of, stored_shape
from trainyard.checkpoint.io.storage import new_directory
from trainyard.checkpoint.native.checkpoint import Checkpoint
from trainyard.checkpoint.native.writer import State, WeightsAlone, bytes_of, write_native
from trainyard.checkpoint.registry import Opened
from trainyard.config.load import parse
from trainyard.config.model_schema import LlamaModel
from trainyard.config.schema import Config
from trainyard.core.atomic_files import whole_directory
from trainyard.core.errors import UserError

To = Literal["hf", "nxd", "native"]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
CHOICES: dict[str, tuple[str, ...]] = {
    "qkv": get_args(Qkv),
    "kv_order": get_args(KvOrder),
    "style": get_args(Style),
}
NATIVE = ("tp", "pp", "vpp", "cp", "dp", "cuts")
Progress = Callable[[int], None]


@dataclass(frozen=True)
class Target:
    """What to write."""

    form: To
    layout: Mapping[str, Any]
    """For nxd, fields of NxdLayout; for native, tp, pp, vpp, cp, dp and cuts."""
    dtype: torch.dtype | None = None
    xser: bool = False
    weights_only: bool = False
    """native: leave the optimizer's state behind."""


def parse_layout(form: To, words: str, flag: str = "--layout") -> dict[str, Any]:
    """`tp=8,pp=4,cuts=3:7` to values by name, each checked."""
    known = NATIVE if form == "native" else [field.name for field in fields(NxdLayout)] if form == "nxd" else []
    out: dict[str, Any] = {}
    for word in filter(None, words.split(",")):
        key, equals, value = word.partition("=")
        if not equals or key not in known:
            takes = f"takes {', '.join(known)}, such as tp=8,pp=4" if known else "takes no layout"
            raise UserError(f"{flag} {word}: {form} {takes}")
        out[key] = _value(flag, key, value)
    return out


def total_bytes(opened: Opened, target: Target) -> int:
    """What will be written, but for headers."""
    if target.form == "native":
        return bytes_of(_state(opened, target))
    shapes = shapes_of(opened.weights.model)

    def size(part: str, count: int) -> int:
        return count * (target.dtype or opened.weights.dtype(part)).itemsize

    if target.form == "hf":
        return sum(size(part, torch.Size(shape).numel()) for part, shape in shapes.items())
    model = _llama(opened.weights.model)
    held = nxd.stored(model, nxd_layout(model, target.layout))
    return sum(
        size(each.pieces[0].part, torch.Size(stored_shape(each, shapes)).numel())
        for tensors in held.values()
        for each in tensors
    )


def convert(opened: Opened, source: Path, directory: Path, target: Target, progress: Progress) -> None:
    """Write `opened`, which lies at `source`, to `directory`, which must be new. It appears whole or not at all."""
    directory = new_directory(directory)
    weights, source = opened.weights, source.expanduser()
    inside = source.is_file() or source.name == "model"  # then what belongs to it lies above
    beside = next((each for each in (source, *([source.parent] * inside)) if hf.tokenizer_files(each)), None)
    if target.form == "hf":
        hf.write_hf(directory, weights, target.dtype, beside=beside, progress=progress)
    elif target.form == "nxd":
        model = _llama(weights.model)

        def also(part: Path) -> None:
            """What NxD's files do not say themselves."""
            first = next(iter(shapes_of(model)))
            hf.write_config(part / "config.json", model, target.dtype or weights.dtype(first))
            if beside:
                hf.copy_tokenizer(beside, part)

        layout = nxd_layout(model, target.layout)
        write_nxd(directory, weights, layout, target.dtype, target.xser, progress, also)
    else:
        _write_native(directory, opened, target, progress)


def nxd_layout(model: LlamaModel, given: Mapping[str, Any]) -> NxdLayout:
    """What the user asked for; what was left open as NxD's own models of today have it."""
    layout = NxdLayout(**given)
    if "qkv" not in given:
        grouped: Qkv = "fused" if layout.style == "hf" else "qkv_linear"
        layout = replace(layout, qkv="coalesced" if model.kv == model.heads else grouped)
    if "kv_multiplier" not in given and layout.qkv in ("fused", "qkv_linear"):
        works = nxd.multipliers(model, layout)
        layout = replace(layout, kv_multiplier=works[0] if works else 1)
    return layout


def _state(opened: Opened, target: Target) -> State:
    if not opened.state or target.weights_only:
        return WeightsAlone(opened.weights, target.dtype)
    if target.dtype:
        raise UserError("--dtype: what goes with the optimizer's state keeps its dtype; nearest: --weights-only")
    return opened.state()


def _write_native(directory: Path, opened: Opened, target: Target, progress: Progress) -> None:
    state = _state(opened, target)
    sizes = {"tp": 1, "pp": 1, "vpp": 1, "cp": 1, **target.layout}
    ranks = sizes["tp"] * sizes["pp"] * sizes["cp"] * sizes.pop("dp", 1)
    passed: dict[str, Any] = {"step": 0, "updates": 0, "skipped": [0, 0], "consumed_samples": 0}
    if isinstance(state, Checkpoint):
        passed = {key: state.body.get(key, value) for key, value in passed.items()}
    elif isinstance(state, NxdState):
        passed |= {"step": state.step if state.step is not None else state.updates, "updates": state.updates}
    if not isinstance(opened.weights, Checkpoint) or opened.weights.body.get("converted"):
        passed["converted"] = True  # its configuration says nothing but what the model is
    config = _config(opened.weights, sizes, ranks)
    with whole_directory(directory) as part:
        write_native(part, state, config, ranks, passed, progress)


def _config(weights: Weights, sizes: Mapping[str, Any], ranks: int) -> Config:
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
            "data": {"source": "synthetic", "sequence": model.max_positions, "predictions": 1},
            "train": {"steps": 1, "global_batch": ranks},
        }
    return parse({**data, "layout": dict(sizes)})


def _value(flag: str, key: str, value: str) -> Any:
    if key in CHOICES:
        if value not in CHOICES[key]:
            raise UserError(f"{flag} {key}={value}: not one of {', '.join(CHOICES[key])}")
        return value
    if key in ("gate_up", "by_head"):
        return truth(f"{flag} {key}", value)
    if re.fullmatch(r"\d{1,9}(:\d{1,9})*" if key == "cuts" else r"0*[1-9]\d{0,8}", value):
        return tuple(int(each) for each in value.split(":")) if key == "cuts" else int(value)
    raise UserError(
        f"{flag} {key}={value}: wanted {'layer numbers such as 3:7' if key == 'cuts' else 'a number from 1 up'}"
    )


def truth(flag: str, value: str) -> bool:
    """What a boolean's text says; Python's bool("False") is True."""
    words = {"true": True, "1": True, "yes": True, "on": True, "false": False, "0": False, "no": False, "off": False}
    try:
        return words[value.lower()]
    except KeyError:
        raise UserError(f"{flag}={value}: wanted true or false") from None


def _llama(model: models.AnyModel) -> LlamaModel:
    if not isinstance(model, LlamaModel):
        raise UserError(f"model.family={model.family}: NxD's layouts are of Llama models; nearest: --to hf")
    return model
