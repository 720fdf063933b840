"""Llama 2, 3, 3.1 and DeepSeek-Coder."""

from trainyard.families.decoder import (
    DECODER_MODULE,
    Activation,
    DecoderStyle,
    decoder_blueprint,
    decoder_hf_format,
    decoder_hf_keys,
    read_megatron_decoder,
)
from trainyard.families.decoder_keys import BiasedDecoderConfig, activation_keys
from trainyard.families.family import Family, MegatronFormat

TORCHTITAN_NAMES = {
    "embedding": "tok_embeddings",
    "layers.*.attention_norm": "layers.*.attention_norm",
    **{f"layers.*.attention.{x}": f"layers.*.attention.qkv_linear.w{x}" for x in "qkv"},
    "layers.*.attention.output": "layers.*.attention.wo",
    "layers.*.mlp_norm": "layers.*.ffn_norm",
    "layers.*.mlp.gate": "layers.*.feed_forward.w1",
    "layers.*.mlp.down": "layers.*.feed_forward.w2",
    "layers.*.mlp.up": "layers.*.feed_forward.w3",
    "norm": "norm",
    "output": "lm_head",
}
"""Names of torchtitan 0.3."""


class LlamaConfig(BiasedDecoderConfig):
    """Llama 2, 3, 3.1 and DeepSeek-Coder: RMSNorm, RoPE, grouped-query attention, SwiGLU."""

    activation: Activation = "silu"
    """Activation of the MLP's gate."""

    @property
    def style(self) -> DecoderStyle:
        return DecoderStyle(biases=self.biases, activation=self.activation)


FAMILY = Family(
    name="llama",
    config_class=LlamaConfig,
    module=DECODER_MODULE,
    blueprint=decoder_blueprint,
    hf=decoder_hf_format(
        "llama",
        "LlamaForCausalLM",
        keys={
            **decoder_hf_keys(
                kv_heads=None, max_positions=2048, rope_theta=10000.0, norm_eps=1e-6, bos_token_id=1, eos_token_id=2
            ),
            **{key: (key, False) for key in ("attention_bias", "mlp_bias")},
        },
        groups=(activation_keys(),),
    ),
    nxd_styles=("hf", "megatron"),
    megatron=MegatronFormat(
        {"swiglu": True, "normalization": "RMSNorm", "position_embedding_type": "rope", "add_bias_linear": False},
        read_megatron_decoder,
        gated_mlp=True,
    ),
    torchtitan_names=TORCHTITAN_NAMES,
)
