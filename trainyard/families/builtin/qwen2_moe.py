"""Qwen2-MoE (Qwen1.5-MoE, Qwen2-57B-A14B): Qwen2's attention, many small experts, and a shared one with a gate."""

from collections.abc import Mapping
from typing import Any

from pydantic import Field

from trainyard.core.section import PositiveInt
from trainyard.families.blueprint import layers_text
from trainyard.families.builtin.qwen2 import WINDOW_KEYS, read_full_attention
from trainyard.families.decoder import (
    DECODER_MODULE,
    DecoderStyle,
    decoder_hf_format,
    decoder_hf_keys,
    decoder_hf_names,
    read_default_head_dim,
    write_decoder,
)
from trainyard.families.family import Family
from trainyard.families.moe import MoeConfig, MoeStyle, moe_blueprint, moe_hf_names
from trainyard.families.rope import ROPE_HF_KEYS


class Qwen2MoeConfig(MoeConfig):
    """Qwen2-MoE: RMSNorm, RoPE, grouped-query attention with biases on q, k and v, SwiGLU experts, one shared."""

    experts: PositiveInt = 60
    """Number of experts in each layer."""
    top_k: PositiveInt = 4
    """Experts that a token goes to."""
    shared_ffn: PositiveInt | None = Field(...)
    """Intermediate size of the shared expert, an MLP that every token goes through as well."""
    qkv_bias: bool = True
    """Biases on q, k and v."""
    norm_eps: float = Field(1e-6, gt=0)
    """Epsilon added to the mean square in RMSNorm."""

    @property
    def style(self) -> DecoderStyle:
        return DecoderStyle(biases=("qkv",) if self.qkv_bias else ())

    @property
    def moe_style(self) -> MoeStyle:
        return MoeStyle(shared_gate=True)


def read_dense_layers(data: Mapping[str, Any], default_ffn: int) -> dict[str, Any]:
    """The layers without experts, as the families of Qwen write them."""
    step, named = data.get("decoder_sparse_step", 1), data.get("mlp_only_layers") or ()
    if step < 1:
        raise ValueError(f"decoder_sparse_step={step}: must be 1 or more; nearest: 1")
    layers = range(data["num_hidden_layers"])
    dense = layers_text(layer for layer in layers if layer in named or (layer + 1) % step)
    return {"dense_layers": dense, "dense_ffn": data.get("intermediate_size", default_ffn) if dense else None}


def write_dense_layers(c: MoeConfig) -> dict[str, Any]:
    dense = sorted(set(range(c.layers)).difference(c.expert_layers))
    size = {"intermediate_size": c.dense_ffn or c.ffn} if dense else {}
    return {**write_decoder(c), "mlp_only_layers": dense, "decoder_sparse_step": 1, **size}


QWEN_MOE_HF_KEYS = {
    "experts": ("num_experts", 60),
    "normalize_top_k": ("norm_topk_prob", False),
    "balance_loss": ("router_aux_loss_coef", 0.001),
}
QWEN_MOE_IGNORED = (*ROPE_HF_KEYS, *WINDOW_KEYS, "intermediate_size", "mlp_only_layers", "decoder_sparse_step")

FAMILY = Family(
    name="qwen2_moe",
    config_class=Qwen2MoeConfig,
    module=DECODER_MODULE,
    blueprint=moe_blueprint,
    hf=decoder_hf_format(
        "qwen2_moe",
        "Qwen2MoeForCausalLM",
        keys={
            **decoder_hf_keys(kv_heads=16, max_positions=32768, rope_theta=10000.0, norm_eps=1e-6),
            **QWEN_MOE_HF_KEYS,
            "ffn": ("moe_intermediate_size", 1408),
            "top_k": ("num_experts_per_tok", 4),
            "shared_ffn": ("shared_expert_intermediate_size", 5632),
            "qkv_bias": ("qkv_bias", True),
        },
        names=lambda c: decoder_hf_names(c, moe_hf_names(c)),
        fixed={"hidden_act": "silu", "attention_dropout": 0.0, "use_sliding_window": False},
        ignored=QWEN_MOE_IGNORED,
        read=lambda data: {**read_full_attention(data), **read_default_head_dim(data), **read_dense_layers(data, 5632)},
        write=write_dense_layers,
    ),
)
