"""Gemma 3 (text): Gemma 2 with norms of q and k; five layers of six have a window and a RoPE of their own."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from pydantic import Field

from trainyard.families.builtin.gemma2 import Gemma2Config, gemma_hf_keys
from trainyard.families.decoder import DECODER_MODULE, DecoderStyle, decoder_blueprint, decoder_hf_format, write_decoder
from trainyard.families.decoder_keys import activation_keys, layer_type_keys
from trainyard.families.family import Family
from trainyard.families.rope import ROPE_HF_KEYS, Rope, read_rope_scaling, write_rope_scaling


class Gemma3TextConfig(Gemma2Config):
    """Gemma 3: RMSNorm of inputs, outputs, q and k, windows with their own RoPE in most layers, GeGLU."""

    window_period: ClassVar[int | None] = 6
    rope_theta: float = Field(1000000.0, gt=1)
    """Base of the RoPE frequencies in layers without a window."""
    local_rope_theta: float = Field(10000.0, gt=1)
    """Base of the RoPE frequencies in layers with a window, whose positions are never scaled."""
    attention_soft_cap: None = None
    """Always null: Gemma 3 does not bound attention scores."""
    logit_soft_cap: float | None = Field(None, gt=0)
    """Bound of the logits; null: none."""

    @property
    def style(self) -> DecoderStyle:
        return replace(super().style, qk_norm="heads")

    def rope_of(self, layer: int) -> Rope | None:
        if layer in self.full_layers:
            return super().rope_of(layer)
        return Rope(self.local_rope_theta, self.rotary_size, self.max_positions)


def read(data: Mapping[str, Any]) -> dict[str, Any]:
    """transformers 5 has RoPE by kind of layer; before, `rope_scaling` was that of layers without a window."""
    by_kind = data.get("rope_parameters") or {}
    if unknown := set(by_kind) - {"full_attention", "sliding_attention"}:
        raise ValueError(f"rope_parameters: {min(unknown)} is no kind of layer; nearest: full_attention")
    full = {**(by_kind.get("full_attention") or {}), **(data.get("rope_scaling") or {})}
    local = by_kind.get("sliding_attention") or {}
    if read_rope_scaling(local, data):
        raise ValueError(f"rope_parameters.sliding_attention={local}: not supported; nearest: rope_type=default")
    return {
        "rope_theta": full.get("rope_theta", data.get("rope_theta", 1000000.0)),
        "local_rope_theta": local.get("rope_theta", data.get("rope_local_base_freq", 10000.0)),
        "rope_scaling": read_rope_scaling(full, data),
    }


def write(c: Gemma3TextConfig) -> dict[str, Any]:
    full = {"rope_theta": c.rope_theta, **write_rope_scaling(c.rope_scaling)}
    local = {"rope_theta": c.local_rope_theta, "rope_type": "default"}
    by_kind = {"full_attention": full, "sliding_attention": local}
    return {**write_decoder(c), "rope_parameters": by_kind, "rope_local_base_freq": c.local_rope_theta}


FAMILY = Family(
    name="gemma3_text",
    config_class=Gemma3TextConfig,
    module=DECODER_MODULE,
    blueprint=decoder_blueprint,
    hf=decoder_hf_format(
        "gemma3_text",
        "Gemma3ForCausalLM",
        keys={
            **gemma_hf_keys(max_positions=131072, rope_theta=1000000.0),
            "logit_soft_cap": ("final_logit_softcapping", None),
        },
        fixed={"attention_dropout": 0.0, "attn_logit_softcapping": None},
        groups=(
            activation_keys("hidden_activation", "gelu_pytorch_tanh"),
            layer_type_keys(Gemma3TextConfig.window_period, "sliding_window_pattern"),
        ),
        ignored=(*ROPE_HF_KEYS, "hidden_act", "rope_local_base_freq"),
        read=read,
        write=write,
    ),
)
