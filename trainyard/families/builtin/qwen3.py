"""Qwen3: Llama's block with an RMSNorm of each head of q and k, and a head size of its own."""

from pydantic import Field

from trainyard.core.section import PositiveInt
from trainyard.families.builtin.qwen2 import WINDOW_KEYS, read_full_attention
from trainyard.families.decoder import (
    DECODER_MODULE,
    DecoderConfig,
    DecoderStyle,
    decoder_blueprint,
    decoder_hf_format,
    decoder_hf_keys,
)
from trainyard.families.family import Family
from trainyard.families.rope import ROPE_HF_KEYS


class Qwen3Config(DecoderConfig):
    """Qwen3: RMSNorm, RoPE, grouped-query attention with a norm of each head of q and k, SwiGLU, no biases."""

    head_dim: PositiveInt | None = 128
    """Width of a head, an even number; null: hidden / heads."""
    norm_eps: float = Field(1e-6, gt=0)
    """Epsilon added to the mean square in RMSNorm."""

    @property
    def style(self) -> DecoderStyle:
        return DecoderStyle(qk_norm="heads")


FAMILY = Family(
    name="qwen3",
    config_class=Qwen3Config,
    module=DECODER_MODULE,
    blueprint=decoder_blueprint,
    hf=decoder_hf_format(
        "qwen3",
        "Qwen3ForCausalLM",
        keys=decoder_hf_keys(kv_heads=32, head_dim=128, max_positions=32768, rope_theta=10000.0, norm_eps=1e-6),
        fixed={"hidden_act": "silu", "attention_bias": False, "attention_dropout": 0.0, "use_sliding_window": False},
        ignored=(*ROPE_HF_KEYS, *WINDOW_KEYS),
        read=read_full_attention,
    ),
)
