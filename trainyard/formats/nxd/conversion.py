"""NxD as a format of `trainyard convert`: its layout keys, and what they default to."""

from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from functools import cache, partial
from itertools import chain
from pathlib import Path
from typing import Any, get_args

from trainyard.checkpoint.weights import WeightSource
from trainyard.families.decoder import DecoderConfig
from trainyard.families.moe import MoeConfig
from trainyard.formats.format import CheckpointFormat, FormatWriter, LayoutKeys, WriteOptions
from trainyard.formats.nxd import layout as nxd
from trainyard.formats.nxd.layout import KvOrder, NxdLayout, require_nxd_model
from trainyard.formats.nxd.names import NameStyle, QkvKind
from trainyard.formats.nxd.optimizer import find_optimizer, open_nxd_state
from trainyard.formats.nxd.rank_files import find_nxd, open_nxd, write_nxd
from trainyard.formats.tensor_map import StoredTensor
from trainyard.models import ModelConfig

LAYOUT_KEYS: LayoutKeys = {field.name: int for field in fields(NxdLayout)} | {
    "pipeline_cuts": tuple,
    "qkv": get_args(QkvKind),
    "kv_order": get_args(KvOrder),
    "style": get_args(NameStyle),
    **dict.fromkeys(("gate_up", "by_head"), bool),
}


def complete_layout(model: DecoderConfig, options: Mapping[str, Any]) -> NxdLayout:
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


def _tensors(model: ModelConfig, options: Mapping[str, Any]) -> Iterator[StoredTensor]:
    decoder = require_nxd_model(model, "--to hf")
    layout = complete_layout(decoder, options)
    nxd.check_layout(decoder, layout)
    return chain.from_iterable(nxd.rank_tensors(decoder, layout).values())


def _write(directory: Path, weights: WeightSource, options: WriteOptions) -> None:
    layout = complete_layout(require_nxd_model(weights.model, "--to hf"), options.layout)
    write_nxd(directory, weights, layout, options.dtype, options.xser, options.progress, options.write_extra_files)


FORMAT = CheckpointFormat(
    "nxd",
    "an NxD checkpoint",
    find_nxd,
    open_nxd,
    stores_model=False,
    open_state=lambda path, *options: cache(partial(open_nxd_state, path, *options)) if find_optimizer(path) else None,
    writer=FormatWriter(_tensors, _write, LAYOUT_KEYS, layout_example="tp=8,pp=4"),
)
