"""Granite: Llama's block with a factor for embeddings, attention scores, residual sums and logits each."""

from pydantic import Field

from trainyard.families.decoder import (
    DECODER_MODULE,
    DecoderStyle,
    decoder_blueprint,
    decoder_hf_format,
    decoder_hf_keys,
    read_default_head_dim,
)
from trainyard.families.decoder_keys import BiasedDecoderConfig
from trainyard.families.family import Family

FACTORS = ("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling")


class GraniteConfig(BiasedDecoderConfig):
    """Granite: Llama with factors of embeddings, attention scores, residual sums and logits."""

    embedding_multiplier: float = Field(1.0, gt=0)
    """Factor of the embedded tokens."""
    attention_multiplier: float = Field(1.0, gt=0)
    """Factor of the attention scores, in the place of 1 / sqrt(head size)."""
    residual_multiplier: float = Field(1.0, gt=0)
    """Factor of the outputs of attention and MLP."""
    logits_scaling: float = Field(1.0, gt=0)
    """Divisor of the logits."""

    @property
    def style(self) -> DecoderStyle:
        return DecoderStyle(
            biases=self.biases,
            embedding_scale=self.embedding_multiplier,
            attention_scale=self.attention_multiplier,
            residual_scale=self.residual_multiplier,
            logit_scale=1 / self.logits_scaling,
        )


FAMILY = Family(
    name="granite",
    config_class=GraniteConfig,
    module=DECODER_MODULE,
    blueprint=decoder_blueprint,
    hf=decoder_hf_format(
        "granite",
        "GraniteForCausalLM",
        keys={
            **decoder_hf_keys(
                kv_heads=None, max_positions=2048, rope_theta=10000.0, norm_eps=1e-6, bos_token_id=1, eos_token_id=2
            ),
            **{key: (key, False) for key in ("attention_bias", "mlp_bias")},
            **{key: (key, 1.0) for key in FACTORS},
        },
        read=read_default_head_dim,
    ),
)
