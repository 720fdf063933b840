"""Qwen2 and Qwen2.5: Llama's block with biases on q, k and v."""

from collections.abc import Mapping
from typing import Any, ClassVar

from trainyard.families.blueprint import layers_text
from trainyard.families.decoder import (
    DECODER_MODULE,
    DecoderStyle,
    HfKeyGroup,
    decoder_blueprint,
    decoder_hf_format,
    decoder_hf_keys,
    read_default_head_dim,
)
from trainyard.families.decoder_keys import WindowedDecoderConfig, full_layers_of, write_layer_types
from trainyard.families.family import Family
from trainyard.families.rope import read_rope

WINDOW_KEYS = ("sliding_window", "max_window_layers", "layer_types")
"""Keys of config.json without effect unless use_sliding_window is true."""


class Qwen2Config(WindowedDecoderConfig):
    """Qwen2 and Qwen2.5: RMSNorm, RoPE, grouped-query attention with biases on q, k and v, SwiGLU."""

    window_period: ClassVar[int | None] = None

    @property
    def style(self) -> DecoderStyle:
        return DecoderStyle(biases=("qkv",))


def read_full_attention(data: Mapping[str, Any]) -> dict[str, Any]:
    """RoPE, and a check that all layers have full attention."""
    if kinds := {str(kind) for kind in data.get("layer_types") or ()} - {"full_attention"}:
        raise ValueError(f"layer_types={min(kinds)}: not supported; nearest: full_attention")
    return read_rope(data)


def read_windows(data: Mapping[str, Any]) -> dict[str, Any]:
    """Windows of the layers behind the first `max_window_layers`, or of those that `layer_types` names."""
    count, window = data["num_hidden_layers"], data.get("sliding_window", 4096)
    if not data.get("use_sliding_window", False) or window is None:
        read_full_attention(data)
        return {"sliding_window": None, "full_attention_layers": None}
    first = min(data.get("max_window_layers", 28), count)
    full = full_layers_of(data["layer_types"], count) if data.get("layer_types") else range(first)
    return {"sliding_window": window, "full_attention_layers": layers_text(full)}


def write_windows(c: WindowedDecoderConfig) -> dict[str, Any]:
    if c.sliding_window is None:
        return {"use_sliding_window": False}
    return {"use_sliding_window": True, "sliding_window": c.sliding_window, **write_layer_types(c)}


WINDOWS = HfKeyGroup(("use_sliding_window", *WINDOW_KEYS), read_windows, write_windows)
FAMILY = Family(
    name="qwen2",
    config_class=Qwen2Config,
    module=DECODER_MODULE,
    blueprint=decoder_blueprint,
    hf=decoder_hf_format(
        "qwen2",
        "Qwen2ForCausalLM",
        keys=decoder_hf_keys(kv_heads=32, max_positions=32768, rope_theta=10000.0, norm_eps=1e-6),
        groups=(WINDOWS,),
        read=read_default_head_dim,
    ),
)
