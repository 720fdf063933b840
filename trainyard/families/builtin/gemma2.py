"""Gemma 2: norms around attention and MLP, a GELU gate, capped scores and logits, windows in every second layer."""

from typing import Any

from pydantic import Field

from trainyard.core.section import PositiveInt
from trainyard.families.decoder import (
    DECODER_MODULE,
    Activation,
    DecoderStyle,
    decoder_blueprint,
    decoder_hf_format,
    decoder_hf_keys,
)
from trainyard.families.decoder_keys import WindowedDecoderConfig, activation_keys, layer_type_keys
from trainyard.families.family import Family, HfKeys
from trainyard.families.rope import ROPE_HF_KEYS

NORMS = {
    "attention_norm": "input_layernorm",
    "attention_output_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_output_norm": "post_feedforward_layernorm",
}


class Gemma2Config(WindowedDecoderConfig):
    """Gemma 2: RMSNorm of inputs and outputs, RoPE, windows in every second layer, GeGLU, capped scores and logits."""

    tie_embeddings: bool = True
    """Share one matrix between the input embedding and the output head."""
    norm_eps: float = Field(1e-6, gt=0)
    """Epsilon added to the mean square in RMSNorm."""
    attention_bias: bool = False
    """Biases in the four linear layers of attention."""
    activation: Activation = "gelu_tanh"
    """Activation of the MLP's gate."""
    query_scalar: PositiveInt = 256
    """Attention scores are divided by its square root (query_pre_attn_scalar of transformers)."""
    attention_soft_cap: float | None = Field(50.0, gt=0)
    """Bound c of the attention scores x, which become c tanh(x / c); null: none."""
    logit_soft_cap: float | None = Field(30.0, gt=0)
    """Bound of the logits; null: none."""

    @property
    def style(self) -> DecoderStyle:
        return DecoderStyle(
            norms=NORMS,
            norm="rms_plus_one",
            biases=("qkv", "output") if self.attention_bias else (),
            activation=self.activation,
            embedding_scale=self.hidden**0.5,
            logit_soft_cap=self.logit_soft_cap,
            attention_scale=self.query_scalar**-0.5,
            attention_soft_cap=self.attention_soft_cap,
        )


def gemma_hf_keys(**defaults: Any) -> HfKeys:
    """Of Gemma 2 and 3."""
    tokens: dict[str, Any] = {"bos_token_id": 2, "eos_token_id": 1, "pad_token_id": 0}
    return {
        **decoder_hf_keys(kv_heads=4, head_dim=256, tie_embeddings=True, norm_eps=1e-6, **tokens, **defaults),
        "sliding_window": ("sliding_window", 4096),
        "attention_bias": ("attention_bias", False),
        "query_scalar": ("query_pre_attn_scalar", 256),
    }


FAMILY = Family(
    name="gemma2",
    config_class=Gemma2Config,
    module=DECODER_MODULE,
    blueprint=decoder_blueprint,
    hf=decoder_hf_format(
        "gemma2",
        "Gemma2ForCausalLM",
        keys={
            **gemma_hf_keys(max_positions=8192, rope_theta=10000.0),
            "attention_soft_cap": ("attn_logit_softcapping", 50.0),
            "logit_soft_cap": ("final_logit_softcapping", 30.0),
        },
        groups=(activation_keys("hidden_activation", "gelu_pytorch_tanh"), layer_type_keys(Gemma2Config.window_period)),
        ignored=(*ROPE_HF_KEYS, "hidden_act"),
    ),
)
