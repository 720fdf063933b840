"""Qwen2-MoE (Qwen1.5-MoE, Qwen2-57B-A14B): Qwen2's attention, many small experts, and a shared one with a gate."""

from pydantic import Field

from trainyard.core.section import PositiveInt
from trainyard.families.builtin.qwen2 import WINDOW_KEYS, read_full_attention
from trainyard.families.decoder import (
    DECODER_MODULE,
    DecoderStyle,
    decoder_hf_format,
    decoder_hf_keys,
    decoder_hf_names,
    read_default_head_dim,
)
from trainyard.families.family import Family
from trainyard.families.moe import MoeConfig, MoeStyle, moe_blueprint, moe_hf_names, sparse_layer_keys
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
            "experts": ("num_experts", 60),
            "normalize_top_k": ("norm_topk_prob", False),
            "balance_loss": ("router_aux_loss_coef", 0.001),
            "ffn": ("moe_intermediate_size", 1408),
            "top_k": ("num_experts_per_tok", 4),
            "shared_ffn": ("shared_expert_intermediate_size", 5632),
            "qkv_bias": ("qkv_bias", True),
        },
        names=lambda c: decoder_hf_names(c, moe_hf_names(c)),
        fixed={"hidden_act": "silu", "attention_dropout": 0.0, "use_sliding_window": False},
        groups=(sparse_layer_keys(5632),),
        ignored=(*ROPE_HF_KEYS, *WINDOW_KEYS),
        read=lambda data: {**read_full_attention(data), **read_default_head_dim(data)},
    ),
)
