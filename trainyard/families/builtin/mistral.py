"""Mistral: Llama's block with a sliding window, in its first version."""

from trainyard.core.section import PositiveInt
from trainyard.families.decoder import (
    DECODER_MODULE,
    DecoderConfig,
    decoder_blueprint,
    decoder_hf_format,
    decoder_hf_keys,
)
from trainyard.families.family import Family


class MistralConfig(DecoderConfig):
    """Mistral: RMSNorm, RoPE, grouped-query attention with an optional sliding window, SwiGLU, no biases."""

    sliding_window: PositiveInt | None = None
    """Number of tokens, its own included, that a token attends to at most. Default: all tokens before it."""

    def attention_window(self, layer: int) -> int | None:
        return self.sliding_window


FAMILY = Family(
    name="mistral",
    config_class=MistralConfig,
    module=DECODER_MODULE,
    blueprint=decoder_blueprint,
    hf=decoder_hf_format(
        "mistral",
        "MistralForCausalLM",
        keys={
            **decoder_hf_keys(
                kv_heads=8, max_positions=4096 * 32, rope_theta=10000.0, norm_eps=1e-6, bos_token_id=1, eos_token_id=2
            ),
            "sliding_window": ("sliding_window", 4096),
        },
    ),
    nxd_styles=("hf", "megatron"),
)
