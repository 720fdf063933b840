"""Qwen3-Next: a gated delta net, which is a linear attention, in most layers, and gated attention in every fourth."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pydantic import Field

from trainyard.core.section import PositiveInt
from trainyard.families.blueprint import Blueprint, ParamSpec, for_layers, layers_text
from trainyard.families.decoder import (
    DecoderStyle,
    decoder_hf_format,
    decoder_hf_keys,
    decoder_hf_names,
    write_decoder,
)
from trainyard.families.family import Family, HfNameMap
from trainyard.families.gated_delta import GatedDeltaConfig, delta_hf_names, delta_specs
from trainyard.families.moe import MoeConfig, MoeStyle, moe_blueprint, moe_hf_names, sparse_layer_keys
from trainyard.families.rope import ROPE_HF_KEYS, read_rope

ATTENTION = "layers.*.attention."
MIXER_KEYS = ("layer_types", "full_attention_interval")
"""Keys that `read` reads."""
LAYER_TYPES = ("linear_attention", "full_attention")


class Qwen3NextConfig(GatedDeltaConfig, MoeConfig):
    """Qwen3-Next: gated delta nets and gated attention, norms of 1 + weight, RoPE of a part of each head, many small
    experts and a shared one with a gate."""

    experts: PositiveInt = 512
    """Number of experts in each layer."""
    top_k: PositiveInt = 10
    """Experts that a token goes to."""
    shared_ffn: PositiveInt | None = Field(...)
    """Intermediate size of the shared expert, an MLP that every token goes through as well."""
    head_dim: PositiveInt | None = 256
    """Width of a head, an even number; null: hidden / heads."""
    norm_eps: float = Field(1e-6, gt=0)
    """Epsilon added to the mean square in RMSNorm."""
    partial_rotary_factor: float = Field(0.25, gt=0, le=1)
    """Share of a head that RoPE rotates, its first dims."""

    @property
    def style(self) -> DecoderStyle:
        return DecoderStyle(norm="rms_plus_one", qk_norm="heads")

    @property
    def moe_style(self) -> MoeStyle:
        return MoeStyle(shared_gate=True)


def blueprint(c: Qwen3NextConfig) -> Blueprint:
    table = moe_blueprint(c)
    first = next(index for index, spec in enumerate(table.specs) if spec.name.startswith(ATTENTION))
    attention = [_with_gate(spec) for spec in table.specs if spec.name.startswith(ATTENTION)]
    others = [spec for spec in table.specs if not spec.name.startswith(ATTENTION)]
    delta_layers = set(range(c.layers)).difference(c.full_attention_layers)
    mixers = [*for_layers(c.full_attention_layers, attention), *for_layers(delta_layers, delta_specs(c))]
    return replace(table, specs=(*others[:first], *mixers, *others[first:]))


def _with_gate(spec: ParamSpec) -> ParamSpec:
    """Attention with a gate: the rows of each head of q are those of its query and as many of its gate."""
    parts = tuple(replace(part, size=2 * part.size) if ".q." in part.name else part for part in spec.fused_parts)
    return replace(spec, shape=(sum(p.size for p in parts), *spec.shape[1:]), fused_parts=parts) if parts else spec


def hf_names(c: Qwen3NextConfig) -> HfNameMap:
    names = decoder_hf_names(c, moe_hf_names(c))
    return replace(names, table={**names.table, **delta_hf_names()})


def read(data: Mapping[str, Any]) -> dict[str, Any]:
    layers, types = data["num_hidden_layers"], data.get("layer_types")
    every = data.get("full_attention_interval", 4)
    if not types and every < 1:
        raise ValueError(f"full_attention_interval={every}: must be 1 or more; nearest: 1")
    types = types or [LAYER_TYPES[(layer + 1) % every == 0] for layer in range(layers)]
    if len(types) != layers or not set(types) <= set(LAYER_TYPES):
        raise ValueError(f"layer_types={str(types)[:60]}: not {layers} of {', '.join(LAYER_TYPES)}")
    attention = [layer for layer, kind in enumerate(types) if kind == LAYER_TYPES[1]]
    text = None if attention == [*range(3, layers, 4)] else layers_text(attention) or ""
    return {"attention_layers": text, **read_rope(data, 0.25)}


def write(c: Qwen3NextConfig) -> dict[str, Any]:
    types = [LAYER_TYPES[layer in c.full_attention_layers] for layer in range(c.layers)]
    return {**write_decoder(c), "layer_types": types}


FAMILY = Family(
    name="qwen3_next",
    config_class=Qwen3NextConfig,
    module="trainyard.models.qwen3_next:Qwen3Next",
    blueprint=blueprint,
    hf=decoder_hf_format(
        "qwen3_next",
        "Qwen3NextForCausalLM",
        keys={
            **decoder_hf_keys(kv_heads=2, head_dim=256, max_positions=32768, rope_theta=10000.0, norm_eps=1e-6),
            "balance_loss": ("router_aux_loss_coef", 0.001),
            "ffn": ("moe_intermediate_size", 512),
            "experts": ("num_experts", 512),
            "top_k": ("num_experts_per_tok", 10),
            "normalize_top_k": ("norm_topk_prob", True),
            "shared_ffn": ("shared_expert_intermediate_size", 512),
            "delta_key_heads": ("linear_num_key_heads", 16),
            "delta_value_heads": ("linear_num_value_heads", 32),
            "delta_key_dim": ("linear_key_head_dim", 128),
            "delta_value_dim": ("linear_value_head_dim", 128),
            "conv_width": ("linear_conv_kernel_dim", 4),
        },
        names=hf_names,
        fixed={"hidden_act": "silu", "attention_bias": False, "attention_dropout": 0.0},
        groups=(sparse_layer_keys(5632),),
        ignored=(*ROPE_HF_KEYS, *MIXER_KEYS),
        unread=r"mtp\.",
        read=read,
        write=write,
    ),
)
