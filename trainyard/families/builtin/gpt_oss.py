"""gpt-oss: sinks and windows in attention, YaRN, and experts with biases and a clamped activation."""

from collections.abc import Mapping
from typing import Any

from pydantic import Field

from trainyard.core.section import PositiveInt
from trainyard.families.decoder import (
    DECODER_MODULE,
    DecoderStyle,
    decoder_hf_format,
    decoder_hf_keys,
    decoder_hf_names,
)
from trainyard.families.decoder_keys import WindowedDecoderConfig, layer_type_keys
from trainyard.families.family import Family, HfNameMap, HfTensor
from trainyard.families.moe import LAYER, MoeConfig, MoeStyle, moe_blueprint, stacked_hf_names
from trainyard.families.rope import ROPE_HF_KEYS, read_rope

DEFAULT_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
"""What transformers takes if a config.json says nothing of RoPE."""


class GptOssConfig(WindowedDecoderConfig, MoeConfig):
    """gpt-oss: RMSNorm, RoPE, attention with sinks and a window in every second layer, clamped SwiGLU experts, biases
    everywhere."""

    experts: PositiveInt = 128
    """Number of experts in each layer."""
    top_k: PositiveInt = 4
    """Experts that a token goes to."""
    head_dim: PositiveInt | None = 64
    """Width of a head, an even number; null: hidden / heads."""
    attention_bias: bool = True
    """Biases in the four linear layers of attention."""
    swiglu_alpha: float = 1.702
    """Factor of the gate in the sigmoid of the experts' activation."""
    swiglu_limit: float = Field(7.0, gt=0)
    """The gate is at most this in an expert's activation, and the other half between minus this and this."""

    @property
    def style(self) -> DecoderStyle:
        return DecoderStyle(biases=("qkv", "output") if self.attention_bias else (), sinks=True)

    @property
    def moe_style(self) -> MoeStyle:
        clamp = self.swiglu_alpha, self.swiglu_limit
        return MoeStyle(clamped_swiglu=clamp, logit_bias=True, expert_biases=True)


def hf_names(c: GptOssConfig) -> HfNameMap:
    router = {"weight": "weight", "logit_bias": "bias"}
    names = {f"{LAYER}router.{ours}": HfTensor(f"model.layers.*.mlp.router.{name}") for ours, name in router.items()}
    return decoder_hf_names(c, {**names, **stacked_hf_names(c, interleaved=True)})


def read(data: Mapping[str, Any]) -> dict[str, Any]:
    has_rope = any(data.get(key) is not None for key in ("rope_scaling", "rope_parameters"))
    return read_rope(data if has_rope else {**data, "rope_parameters": DEFAULT_ROPE})


FAMILY = Family(
    name="gpt_oss",
    config_class=GptOssConfig,
    module=DECODER_MODULE,
    blueprint=moe_blueprint,
    hf=decoder_hf_format(
        "gpt_oss",
        "GptOssForCausalLM",
        keys={
            **decoder_hf_keys(kv_heads=8, head_dim=64, max_positions=131072, rope_theta=150000.0, norm_eps=1e-5),
            "ffn": ("intermediate_size", 2880),
            "experts": ("num_local_experts", 128),
            "top_k": ("num_experts_per_tok", 4),
            "sliding_window": ("sliding_window", 128),
            "attention_bias": ("attention_bias", True),
            "swiglu_alpha": ("swiglu_alpha", 1.702),
            "swiglu_limit": ("swiglu_limit", 7.0),
            "balance_loss": ("router_aux_loss_coef", 0.001),
        },
        groups=(layer_type_keys(GptOssConfig.window_period),),
        names=hf_names,
        ignored=(*ROPE_HF_KEYS, "experts_per_token", "initial_context_length"),
        read=read,
    ),
)
