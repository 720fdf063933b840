"""Qwen3: Llama's block with an RMSNorm of each head of q and k, and a head size of its own."""

from typing import ClassVar

from pydantic import Field

from trainyard.core.section import PositiveInt
from trainyard.families.builtin.qwen2 import WINDOWS
from trainyard.families.decoder import (
    DECODER_MODULE,
    DecoderStyle,
    decoder_blueprint,
    decoder_hf_format,
    decoder_hf_keys,
)
from trainyard.families.decoder_keys import WindowedDecoderConfig
from trainyard.families.family import Family


class Qwen3Config(WindowedDecoderConfig):
    """Qwen3: RMSNorm, RoPE, grouped-query attention with a norm of each head of q and k, SwiGLU."""

    window_period: ClassVar[int | None] = None
    attention_bias: bool = False
    """Biases in the four linear layers of attention."""

    head_dim: PositiveInt | None = 128
    """Width of a head, an even number; null: hidden / heads."""
    norm_eps: float = Field(1e-6, gt=0)
    """Epsilon added to the mean square in RMSNorm."""

    @property
    def style(self) -> DecoderStyle:
        return DecoderStyle(qk_norm="heads", biases=("qkv", "output") if self.attention_bias else ())


FAMILY = Family(
    name="qwen3",
    config_class=Qwen3Config,
    module=DECODER_MODULE,
    blueprint=decoder_blueprint,
    hf=decoder_hf_format(
        "qwen3",
        "Qwen3ForCausalLM",
        keys={
            **decoder_hf_keys(kv_heads=32, head_dim=128, max_positions=32768, rope_theta=10000.0, norm_eps=1e-6),
            "attention_bias": ("attention_bias", False),
        },
        groups=(WINDOWS,),
    ),
)
