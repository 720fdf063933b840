"""OLMo 2: Llama's block with norms of the outputs of attention and MLP, and of all heads of q and k."""

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

NORMS = {"attention_output_norm": "post_attention_layernorm", "mlp_output_norm": "post_feedforward_layernorm"}


class Olmo2Config(DecoderConfig):
    """OLMo 2: RMSNorm of outputs and of all heads of q and k, RoPE, grouped-query attention, SwiGLU."""

    attention_bias: bool = False
    """Biases in the four linear layers of attention."""

    @property
    def style(self) -> DecoderStyle:
        return DecoderStyle(norms=NORMS, qk_norm="all", biases=("qkv", "output") if self.attention_bias else ())


FAMILY = Family(
    name="olmo2",
    config_class=Olmo2Config,
    module=DECODER_MODULE,
    blueprint=decoder_blueprint,
    hf=decoder_hf_format(
        "olmo2",
        "Olmo2ForCausalLM",
        keys={
            **decoder_hf_keys(
                kv_heads=None, max_positions=2048, rope_theta=10000.0, norm_eps=1e-5, eos_token_id=50279, pad_token_id=1
            ),
            "attention_bias": ("attention_bias", False),
        },
        read=read_default_head_dim,
    ),
)
