"""OLMoE: a norm of all heads of q and k together, and small experts in each layer."""

from trainyard.core.section import PositiveInt
from trainyard.families.decoder import (
    DECODER_MODULE,
    DecoderStyle,
    decoder_hf_format,
    decoder_hf_keys,
    decoder_hf_names,
    read_default_head_dim,
)
from trainyard.families.family import Family
from trainyard.families.moe import MoeConfig, moe_blueprint, moe_hf_names


class OlmoeConfig(MoeConfig):
    """OLMoE: RMSNorm, RoPE, attention with norms of q and k over all heads, SwiGLU experts, no biases."""

    experts: PositiveInt = 64
    """Number of experts in each layer."""
    top_k: PositiveInt = 8
    """Experts that a token goes to."""

    @property
    def style(self) -> DecoderStyle:
        return DecoderStyle(qk_norm="all")


FAMILY = Family(
    name="olmoe",
    config_class=OlmoeConfig,
    module=DECODER_MODULE,
    blueprint=moe_blueprint,
    hf=decoder_hf_format(
        "olmoe",
        "OlmoeForCausalLM",
        keys={
            **decoder_hf_keys(
                kv_heads=None, max_positions=4096, rope_theta=10000.0, norm_eps=1e-5, pad_token_id=1, eos_token_id=50279
            ),
            "ffn": ("intermediate_size", 2048),
            "experts": ("num_experts", 64),
            "top_k": ("num_experts_per_tok", 8),
            "normalize_top_k": ("norm_topk_prob", False),
            "balance_loss": ("router_aux_loss_coef", 0.01),
        },
        names=lambda c: decoder_hf_names(c, moe_hf_names(c)),
        fixed={"hidden_act": "silu", "attention_bias": False, "attention_dropout": 0.0, "clip_qkv": None},
        read=read_default_head_dim,
    ),
)
