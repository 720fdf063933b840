"""Reads optimum-neuron's shards: NxD files, with a metadata file per pipeline rank that says what was fused.

    OUT/config.json
    OUT/shards/mp_metadata_pp_rank_0.json      or .pt, in older versions
    OUT/shards/model/dp_rank_00_tp_rank_00_pp_rank_00.pt ...

Its Llama model names and shards tensors as NxD's does, with key and value heads replicated in trn1's order, so NxD's
reader does the work. The metadata serve as a check: the layout they state must be the one inferred from the files.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainyard.core.errors import UserError, one_line
from trainyard.families.hf_config import from_hf
from trainyard.formats.format import CheckpointFormat
from trainyard.formats.io.torch_file import open_torch_file
from trainyard.formats.nxd.rank_files import NxdWeights, open_nxd
from trainyard.models import ModelConfig

SHARDS_DIRECTORY = "shards"
FUSED_LAYERS: dict[tuple[str, ...], tuple[str, object]] = {
    ("gate_up_proj", "gate_proj", "up_proj"): ("gate_up", True),
    ("qkv_proj", "q_proj", "k_proj", "v_proj"): ("qkv", "coalesced"),
}
"""A fused layer and the layers in it, and the field of NxdLayout that describes this."""


@dataclass(frozen=True)
class OptimumFiles:
    shards: Path
    metadata: tuple[Path, ...]
    """One file per pipeline rank."""
    config: Path | None


def find_optimum(path: str | Path) -> OptimumFiles | None:
    """Find the checkpoint of an output directory, its shards or one of their files. None: not optimum-neuron's."""
    path = Path(path).expanduser()
    path = path.parent if path.is_file() else path
    path = path.parent if path.name == "model" else path
    for shards in (path / SHARDS_DIRECTORY, path):
        metadata = tuple(sorted(shards.glob("mp_metadata_pp_rank_*"))) if (shards / "model").is_dir() else ()
        if metadata:
            configs = (directory / "config.json" for directory in (shards, *shards.absolute().parents[:2]))
            return OptimumFiles(shards, metadata, next((config for config in configs if config.is_file()), None))
    return None


def open_optimum(path: str | Path, model: ModelConfig | None = None) -> NxdWeights:
    """Open the weights at `path`. The model is `model` if given, else that of the config.json near the shards."""
    files = find_optimum(path)
    if files is None:
        raise UserError(f"{path}: no optimum-neuron checkpoint; expected {SHARDS_DIRECTORY}/mp_metadata_pp_rank_0.json")
    if model is None:
        if files.config is None:
            raise UserError(f"{files.shards}: no config.json in it or above it; pass the model's configuration")
        model = from_hf(files.config)
    facts = [(file, fact) for file in files.metadata for fact in _layout_facts(file, model)]
    weights = open_nxd(files.shards, model, {"kv_order": "trn1"})
    for file, (key, value) in facts:
        if (inferred := getattr(weights.layout, key)) != value:
            raise UserError(f"{file}: states {key}={value}, but the files in {files.shards / 'model'} have {inferred}")
    return weights


def _layout_facts(path: Path, model: ModelConfig) -> Iterator[tuple[str, object]]:
    """The fields of NxdLayout that a metadata file states."""
    try:
        for module in read_metadata(path).get("model_weight_transformation_specs", ()):
            for kind, spec in module["specs"]:
                context = f"{path}: {kind} of {module['module_fully_qualified_name']}"
                if spec.get("peft_type") is not None:
                    raise UserError(f"{context}: has {spec['peft_type']} adapters; merge them into the model first")
                if spec["bias"]:
                    raise UserError(f"{context}: has biases, which Llama models here do not support")
                yield "tp", spec["tp_size"]
                if kind == "FusedLinearsSpec":
                    yield _fused_fact(context, spec)
                elif kind == "GQAQKVColumnParallelLinearSpec":
                    yield from _attention_facts(context, spec, model)
                else:
                    raise UserError(
                        f"{context}: unknown; supported: FusedLinearsSpec and GQAQKVColumnParallelLinearSpec"
                    )
    except (AttributeError, KeyError, TypeError) as error:
        raise UserError(f"{path}: not optimum-neuron metadata: {type(error).__name__} {one_line(error)}") from None


def _fused_fact(context: str, spec: Mapping[str, Any]) -> tuple[str, object]:
    names = (spec["fused_linear_name"], *spec["linear_names"])
    if names not in FUSED_LAYERS or spec["fuse_axis"] not in (0, "column"):
        raise UserError(f"{context}: fuses {', '.join(names[1:])} to {names[0]}, which no NxD Llama model does")
    return FUSED_LAYERS[names]


def _attention_facts(context: str, spec: Mapping[str, Any], model: ModelConfig) -> Iterator[tuple[str, object]]:
    for key, expected in (("num_attention_heads", model.heads), ("num_key_value_heads", model.num_kv_heads)):
        if spec[key] != expected:
            raise UserError(f"{context}: {key}={spec[key]}, but the model has {expected}")
    yield "kv_multiplier", spec["kv_size_multiplier"]
    yield "qkv", "fused" if spec["fuse_qkv"] else "qkv_linear"


def read_metadata(path: Path) -> Mapping[str, Any]:
    """The content of a metadata file. The .pt files of older versions are read if possible, else ignored."""
    try:
        return json.loads(path.read_text(encoding="utf-8")) if path.suffix == ".json" else open_torch_file(path)
    except (OSError, ValueError) as error:
        if path.suffix != ".json":
            return {}
        raise UserError(f"{path}: not readable JSON: {one_line(error)}") from None


FORMAT = CheckpointFormat(
    "optimum", "optimum-neuron shards", find_optimum, lambda path, model, hints: open_optimum(path, model)
)
