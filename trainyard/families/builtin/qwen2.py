"""Qwen2 and Qwen2.5: Llama's block with biases on q, k and v."""

from collections.abc import Mapping
from typing import Any

from trainyard.families.decoder import (
    DECODER_MODULE,
    DecoderConfig,
    DecoderStyle,
    decoder_blueprint,
    decoder_hf_format,
    decoder_hf_keys,
    read_default_head_dim,
)
from trainyard.families.family import Family
from trainyard.families.rope import ROPE_HF_KEYS, read_rope

WINDOW_KEYS = ("sliding_window", "max_window_layers", "layer_types")
"""Keys of config.json without effect unless use_sliding_window is true."""


class Qwen2Config(DecoderConfig):
    """Qwen2 and Qwen2.5: RMSNorm, RoPE, grouped-query attention with biases on q, k and v, SwiGLU."""

    @property
    def style(self) -> DecoderStyle:
        return DecoderStyle(biases=("qkv",))


def read_full_attention(data: Mapping[str, Any]) -> dict[str, Any]:
    """RoPE, and a check that all layers have full attention."""
    if kinds := {str(kind) for kind in data.get("layer_types") or ()} - {"full_attention"}:
        raise ValueError(f"layer_types={min(kinds)}: not supported; nearest: full_attention")
    return read_rope(data)


FAMILY = Family(
    name="qwen2",
    config_class=Qwen2Config,
    module=DECODER_MODULE,
    blueprint=decoder_blueprint,
    hf=decoder_hf_format(
        "qwen2",
        "Qwen2ForCausalLM",
        keys=decoder_hf_keys(kv_heads=32, max_positions=32768, rope_theta=10000.0, norm_eps=1e-6),
        fixed={"hidden_act": "silu", "attention_dropout": 0.0, "use_sliding_window": False},
        ignored=(*ROPE_HF_KEYS, *WINDOW_KEYS),
        read=lambda data: {**read_full_attention(data), **read_default_head_dim(data)},
    ),
)
