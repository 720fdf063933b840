"""Ministral: Mistral's block with a window in each layer, or in some."""

from typing import ClassVar

from trainyard.families.decoder import DECODER_MODULE, decoder_blueprint, decoder_hf_format, decoder_hf_keys
from trainyard.families.decoder_keys import WindowedDecoderConfig, layer_type_keys
from trainyard.families.family import Family


class MinistralConfig(WindowedDecoderConfig):
    """Ministral: RMSNorm, RoPE, grouped-query attention with sliding windows, SwiGLU, no biases."""

    window_period: ClassVar[int | None] = None


FAMILY = Family(
    name="ministral",
    config_class=MinistralConfig,
    module=DECODER_MODULE,
    blueprint=decoder_blueprint,
    hf=decoder_hf_format(
        "ministral",
        "MinistralForCausalLM",
        keys={
            **decoder_hf_keys(
                kv_heads=8, max_positions=4096 * 32, rope_theta=10000.0, norm_eps=1e-6, bos_token_id=1, eos_token_id=2
            ),
            "sliding_window": ("sliding_window", 4096),
        },
        groups=(layer_type_keys(None),),
    ),
)
