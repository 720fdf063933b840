"""GLM-4: norms around attention and MLP, RoPE on the first half of each head in pairs of neighbors."""

from dataclasses import replace
from functools import partial
from typing import ClassVar

from pydantic import Field

from trainyard.core.section import PositiveInt
from trainyard.families.builtin.phi3 import fused_gate_up_names
from trainyard.families.decoder import (
    DECODER_MODULE,
    DecoderConfig,
    DecoderStyle,
    decoder_blueprint,
    decoder_hf_format,
    decoder_hf_keys,
    decoder_hf_names,
)
from trainyard.families.family import Family, HfNameMap
from trainyard.families.rope import read_rope

NORMS = {
    "attention_norm": "input_layernorm",
    "attention_output_norm": "post_self_attn_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "mlp_output_norm": "post_mlp_layernorm",
}


class Glm4Config(DecoderConfig):
    """GLM-4: RMSNorm of inputs and outputs, RoPE on half of each head, grouped-query attention, SwiGLU."""

    rope_interleaved: ClassVar[bool] = True
    head_dim: PositiveInt | None = 128
    """Width of a head, an even number; null: hidden / heads."""
    partial_rotary_factor: float = Field(0.5, gt=0, le=1)
    """Part of each head that RoPE rotates."""
    attention_bias: bool = True
    """Biases on q, k and v."""

    @property
    def style(self) -> DecoderStyle:
        return DecoderStyle(norms=NORMS, biases=("qkv",) if self.attention_bias else ())


def hf_names(c: DecoderConfig) -> HfNameMap:
    names = decoder_hf_names(c)
    return replace(names, table={**names.table, **fused_gate_up_names()})


FAMILY = Family(
    name="glm4",
    config_class=Glm4Config,
    module=DECODER_MODULE,
    blueprint=decoder_blueprint,
    hf=decoder_hf_format(
        "glm4",
        "Glm4ForCausalLM",
        keys={
            **decoder_hf_keys(
                kv_heads=2,
                head_dim=128,
                max_positions=131072,
                rope_theta=10000.0,
                norm_eps=1.5625e-7,
                eos_token_id=(151329, 151336, 151338),
                pad_token_id=151329,
            ),
            "attention_bias": ("attention_bias", True),
        },
        names=hf_names,
        read=partial(read_rope, rotary_factor=0.5),
    ),
)
