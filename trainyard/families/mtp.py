"""Multi-token prediction (DeepSeek-V3): blocks after the last layer that predict further tokens, in training only.

Block k combines the hidden state of a token with the embedding of the token k places later, and predicts the one after
that. Embedding and output head are those of the model.
"""

import re
from collections.abc import Iterable
from dataclasses import replace

from trainyard.families.blueprint import Blueprint, FusedPart, ParamSpec
from trainyard.families.family import HfNameMap, HfTensor
from trainyard.families.model_config import ModelConfig


def with_mtp(c: ModelConfig, blueprint: Blueprint) -> Blueprint:
    """The blueprint with the rows of `c.mtp_blocks`, each of which has a block like that of the last layer."""
    if not c.mtp_blocks:
        return blueprint
    D, uses, block = c.hidden, 1 + len(c.mtp_blocks), blueprint.block_specs(c.layers - 1)
    specs = [_shared(spec, uses) for spec in blueprint.specs]
    for name in c.mtp_blocks:
        norms = (f"{name}.{norm}_norm.weight" for norm in ("embedding", "hidden", "output"))
        projection = ParamSpec(f"{name}.projection.weight", (D, 2 * D), init_std=c.init_std, flops_tokens="tokens")
        own = (*(ParamSpec(norm, (D,), init_value=1.0) for norm in norms), projection)
        specs += [replace(spec, pipeline_stage="last") for spec in (*own, *(_renamed(spec, name) for spec in block))]
    tied = blueprint.tied_head and (uses * blueprint.tied_head[0], *blueprint.tied_head[1:])
    return Blueprint(tuple(specs), blueprint.layers, tied)


def with_mtp_names(c: ModelConfig, names: HfNameMap) -> HfNameMap:
    """The names with those of `c.mtp_blocks`, which files store as layers after the last one, with copies of what they
    share with the model."""
    table, copies = dict(names.table), dict(names.copies)
    for index, name in enumerate(c.mtp_blocks, c.layers):
        layer = f"model.layers.{index}."
        own = {"embedding_norm": "enorm", "hidden_norm": "hnorm", "output_norm": "shared_head.norm"}
        table |= {
            f"{name}.{ours}.weight": HfTensor(f"{layer}{theirs}.weight")
            for ours, theirs in (*own.items(), ("projection", "eh_proj"))
        }
        table |= {
            ours.replace("layers.*.", f"{name}.block."): replace(hf, name=hf.name.replace("model.layers.*.", layer))
            for ours, hf in names.table.items()
            if ours.startswith("layers.*.")
        }
        copies[f"{layer}embed_tokens.weight"] = names.table["embedding.weight"].name
        copies[f"{layer}shared_head.head.weight"] = names.table.get(
            "output.weight", names.table["embedding.weight"]
        ).name
    return HfNameMap(table, names.tied, copies)


def stored_mtp(model: ModelConfig, names: Iterable[str]) -> ModelConfig:
    """The model as a file with these tensors has it. A file may do without blocks of further tokens, whatever its
    config.json says; transformers writes such files."""
    return model if any(is_later_layer(model.without_mtp, name) for name in names) else model.without_mtp


def is_later_layer(model: ModelConfig, name: str) -> bool:
    """True for a tensor of a file after the model's last block: it predicts further tokens, which a model need not."""
    layer = re.match(r"model\.layers\.(\d+)\.", name)
    is_later = layer is not None and int(layer[1]) >= model.layers + len(model.mtp_blocks)
    return is_later and "mtp_layers" in type(model).model_fields


def _shared(spec: ParamSpec, uses: int) -> ParamSpec:
    """A row of the model. The embedding is on the last pipeline stage too, and the head multiplies several times."""
    if spec.pipeline_stage == "first" and spec.padded:
        return replace(spec, pipeline_stage="both")
    return replace(spec, uses=uses) if spec.pipeline_stage == "last" and spec.padded else spec


def _renamed(spec: ParamSpec, name: str) -> ParamSpec:
    def rename(text: str) -> str:
        return text.replace("layers.*.", f"{name}.block.")

    parts = tuple(FusedPart(rename(part.name), part.size, part.units) for part in spec.fused_parts)
    return replace(spec, name=rename(spec.name), fused_parts=parts, layers=None)
