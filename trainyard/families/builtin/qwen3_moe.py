"""Qwen3 with a mixture of experts: Qwen3's attention, many small experts."""

from collections.abc import Mapping
from typing import Any

from pydantic import Field

from trainyard.core.section import PositiveInt
from trainyard.families.builtin.qwen2 import WINDOW_KEYS, read_full_attention
from trainyard.families.decoder import (
    DECODER_MODULE,
    DecoderStyle,
    decoder_hf_format,
    decoder_hf_keys,
    decoder_hf_names,
)
from trainyard.families.family import Family
from trainyard.families.moe import MoeConfig, moe_blueprint, moe_hf_names, sparse_layer_keys
from trainyard.families.rope import ROPE_HF_KEYS


class Qwen3MoeConfig(MoeConfig):
    """Qwen3-MoE: RMSNorm, RoPE, grouped-query attention with a norm of each head of q and k, many SwiGLU experts."""

    experts: PositiveInt = 128
    """Number of experts in each layer."""
    top_k: PositiveInt = 8
    """Experts that a token goes to."""
    head_dim: PositiveInt | None = 128
    """Width of a head, an even number; null: hidden / heads."""
    norm_eps: float = Field(1e-6, gt=0)
    """Epsilon added to the mean square in RMSNorm."""

    @property
    def style(self) -> DecoderStyle:
        return DecoderStyle(qk_norm="heads")


def read(data: Mapping[str, Any]) -> dict[str, Any]:
    """transformers 5 writes num_experts as num_local_experts."""
    experts = data.get("num_experts", data.get("num_local_experts", 128))
    return {"experts": experts, **read_full_attention(data)}


FAMILY = Family(
    name="qwen3_moe",
    config_class=Qwen3MoeConfig,
    module=DECODER_MODULE,
    blueprint=moe_blueprint,
    hf=decoder_hf_format(
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        keys={
            **decoder_hf_keys(kv_heads=4, max_positions=32768, rope_theta=10000.0, norm_eps=1e-6),
            "normalize_top_k": ("norm_topk_prob", False),
            "balance_loss": ("router_aux_loss_coef", 0.001),
            "experts": ("num_experts", 128),
            "ffn": ("moe_intermediate_size", 768),
            "top_k": ("num_experts_per_tok", 8),
        },
        names=lambda c: decoder_hf_names(c, moe_hf_names(c)),
        fixed={
            "hidden_act": "silu",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "use_sliding_window": False,
        },
        groups=(sparse_layer_keys(6144),),
        ignored=(*ROPE_HF_KEYS, *WINDOW_KEYS, "num_local_experts"),
        read=read,
    ),
)
