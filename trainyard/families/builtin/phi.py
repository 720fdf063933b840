"""Phi-1 and Phi-2: attention and an MLP without a gate in parallel behind one LayerNorm, with biases everywhere."""

from functools import partial
from typing import Literal

from pydantic import Field

from trainyard.families.decoder import (
    DECODER_MODULE,
    Activation,
    DecoderConfig,
    DecoderStyle,
    decoder_blueprint,
    decoder_hf_format,
    decoder_hf_keys,
    decoder_hf_names,
    read_default_head_dim,
    renamed_hf,
)
from trainyard.families.decoder_keys import activation_keys
from trainyard.families.family import Family

HF_NAMES = {
    "self_attn.o_proj": "self_attn.dense",
    "mlp.up_proj": "mlp.fc1",
    "mlp.down_proj": "mlp.fc2",
    "model.norm": "model.final_layernorm",
}


class PhiConfig(DecoderConfig):
    """Phi-1 and Phi-2: LayerNorm, RoPE on a part of each head, attention and MLP in parallel, biases everywhere."""

    partial_rotary_factor: float = Field(0.5, gt=0, le=1)
    """Part of each head that RoPE rotates."""
    tie_embeddings: Literal[False] = False
    """The output head has its own matrix."""
    activation: Activation = "gelu_tanh"
    """Activation of the MLP."""

    @property
    def style(self) -> DecoderStyle:
        return DecoderStyle(
            norms={"attention_norm": "input_layernorm"},
            norm="layer_bias",
            parallel=True,
            biases=("qkv", "output", "mlp", "head"),
            gated=False,
            activation=self.activation,
        )


FAMILY = Family(
    name="phi",
    config_class=PhiConfig,
    module=DECODER_MODULE,
    blueprint=decoder_blueprint,
    hf=decoder_hf_format(
        "phi",
        "PhiForCausalLM",
        keys={
            **decoder_hf_keys(
                absent=("tie_embeddings",),
                kv_heads=None,
                max_positions=2048,
                rope_theta=10000.0,
                bos_token_id=1,
                eos_token_id=2,
            ),
            "norm_eps": ("layer_norm_eps", 1e-5),
        },
        groups=(activation_keys(default="gelu_new"),),
        names=lambda c: renamed_hf(decoder_hf_names(c), HF_NAMES),
        fixed={
            **dict.fromkeys(("attention_dropout", "resid_pdrop", "embd_pdrop"), 0.0),
            **dict.fromkeys(("qk_layernorm", "tie_word_embeddings"), False),
        },
        read=partial(read_default_head_dim, rotary_factor=0.5),
    ),
)
