"""Cohere's Command R: attention and MLP in parallel behind one LayerNorm, a factor of the logits."""

from typing import ClassVar

from pydantic import Field

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


class CohereConfig(DecoderConfig):
    """Command R: LayerNorm without bias, attention and SwiGLU in parallel, RoPE on pairs, scaled logits."""

    rope_interleaved: ClassVar[bool] = True
    tie_embeddings: bool = True
    """Share one matrix between the input embedding and the output head."""
    attention_bias: bool = False
    """Biases in the four linear layers of attention."""
    logit_scale: float = Field(0.0625, gt=0)
    """Factor of the logits."""

    @property
    def style(self) -> DecoderStyle:
        return DecoderStyle(
            norms={"attention_norm": "input_layernorm"},
            norm="layer",
            parallel=True,
            biases=("qkv", "output") if self.attention_bias else (),
            logit_scale=self.logit_scale,
        )


FAMILY = Family(
    name="cohere",
    config_class=CohereConfig,
    module=DECODER_MODULE,
    blueprint=decoder_blueprint,
    hf=decoder_hf_format(
        "cohere",
        "CohereForCausalLM",
        keys={
            **decoder_hf_keys(
                kv_heads=None,
                max_positions=8192,
                rope_theta=500000.0,
                tie_embeddings=True,
                bos_token_id=5,
                eos_token_id=255001,
                pad_token_id=0,
            ),
            "norm_eps": ("layer_norm_eps", 1e-5),
            "attention_bias": ("attention_bias", False),
            "logit_scale": ("logit_scale", 0.0625),
        },
        read=read_default_head_dim,
        fixed={"hidden_act": "silu", "attention_dropout": 0.0, "use_qk_norm": False},
    ),
)
