"""Gemma: norms of 1 + weight, a GELU gate, scaled embeddings."""

from collections.abc import Mapping
from typing import Any

from pydantic import Field

from trainyard.families.decoder import (
    DECODER_MODULE,
    DecoderConfig,
    DecoderStyle,
    decoder_blueprint,
    decoder_hf_format,
    decoder_hf_keys,
    write_decoder,
)
from trainyard.families.family import Family
from trainyard.families.rope import ROPE_HF_KEYS, read_rope

ACTIVATION = "gelu_pytorch_tanh"


class GemmaConfig(DecoderConfig):
    """Gemma: RMSNorm of 1 + weight, RoPE, grouped-query attention, GeGLU, embeddings times sqrt(hidden)."""

    tie_embeddings: bool = True
    """Share one matrix between the input embedding and the output head."""
    norm_eps: float = Field(1e-6, gt=0)
    """Epsilon added to the mean square in RMSNorm."""
    attention_bias: bool = False
    """Biases in the four linear layers of attention."""

    @property
    def style(self) -> DecoderStyle:
        return DecoderStyle(
            norm="rms_plus_one",
            biases=("qkv", "output") if self.attention_bias else (),
            activation="gelu_tanh",
            embedding_scale=self.hidden**0.5,
        )


def read(data: Mapping[str, Any]) -> dict[str, Any]:
    """transformers computes the tanh approximation under either name."""
    if (name := data.get("hidden_act", ACTIVATION)) not in ("gelu", ACTIVATION):
        raise ValueError(f"hidden_act={name}: not supported; nearest: {ACTIVATION}")
    return read_rope(data)


FAMILY = Family(
    name="gemma",
    config_class=GemmaConfig,
    module=DECODER_MODULE,
    blueprint=decoder_blueprint,
    hf=decoder_hf_format(
        "gemma",
        "GemmaForCausalLM",
        keys={
            **decoder_hf_keys(
                kv_heads=16,
                head_dim=256,
                max_positions=8192,
                rope_theta=10000.0,
                norm_eps=1e-6,
                tie_embeddings=True,
                bos_token_id=2,
                eos_token_id=1,
                pad_token_id=0,
            ),
            "attention_bias": ("attention_bias", False),
        },
        fixed={"attention_dropout": 0.0},
        ignored=(*ROPE_HF_KEYS, "hidden_act", "hidden_activation"),
        read=read,
        write=lambda c: {**write_decoder(c), "hidden_act": ACTIVATION},
    ),
)
