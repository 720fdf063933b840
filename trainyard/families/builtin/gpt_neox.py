"""GPT-NeoX and Pythia: RoPE on a part of each head, attention and MLP in parallel, each behind a LayerNorm."""

from collections.abc import Collection, Mapping
from typing import Any

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
    renamed_hf,
)
from trainyard.families.decoder_keys import activation_keys
from trainyard.families.family import Family, HfNameMap
from trainyard.families.rope import read_rope, write_rope

BLOCK_NAMES = {"o_proj": "dense", "up_proj": "dense_h_to_4h", "down_proj": "dense_4h_to_h"}
"""Of Falcon, too."""
HF_NAMES = {
    **BLOCK_NAMES,
    "self_attn": "attention",
    "model.norm": "gpt_neox.final_layer_norm",
    "model.embed_tokens": "gpt_neox.embed_in",
    "model.layers": "gpt_neox.layers",
    "lm_head": "embed_out",
}
PARTIAL = "partial_rotary_factor"


class GptNeoxConfig(DecoderConfig):
    """GPT-NeoX and Pythia: LayerNorm, RoPE on a part of each head, attention and MLP in parallel, biases."""

    partial_rotary_factor: float = Field(0.25, gt=0, le=1)
    """Part of each head that RoPE rotates."""
    parallel_residual: bool = True
    """Attention and MLP read the same residual."""
    attention_bias: bool = True
    """Biases in the four linear layers of attention."""
    activation: Activation = "gelu"
    """Activation of the MLP."""

    @property
    def style(self) -> DecoderStyle:
        return DecoderStyle(
            norm="layer_bias",
            parallel=self.parallel_residual,
            biases=("mlp", *(("qkv", "output") if self.attention_bias else ())),
            gated=False,
            activation=self.activation,
        )


def hf_names(c: GptNeoxConfig) -> HfNameMap:
    return renamed_hf(decoder_hf_names(c), HF_NAMES, "query_key_value", c.num_kv_heads)


def current_name(name: str, names: Collection[str]) -> str:
    """Files have `embed_out`, which the module of transformers 5 calls `lm_head`."""
    return name.replace("lm_head.", "embed_out.")


def read(data: Mapping[str, Any]) -> dict[str, Any]:
    return read_rope({**data, PARTIAL: data.get("rotary_pct")}, 0.25)


def write(c: GptNeoxConfig) -> dict[str, Any]:
    keys = write_rope(c)
    return {"rotary_pct": keys.pop(PARTIAL), **keys}


FAMILY = Family(
    name="gpt_neox",
    config_class=GptNeoxConfig,
    module=DECODER_MODULE,
    blueprint=decoder_blueprint,
    hf=decoder_hf_format(
        "gpt_neox",
        "GPTNeoXForCausalLM",
        keys={
            **decoder_hf_keys(absent=("kv_heads", "head_dim"), max_positions=2048, bos_token_id=0, eos_token_id=2),
            "rope_theta": ("rotary_emb_base", 10000.0),
            "norm_eps": ("layer_norm_eps", 1e-5),
            "parallel_residual": ("use_parallel_residual", True),
            "attention_bias": ("attention_bias", True),
        },
        groups=(activation_keys(default="gelu"),),
        names=hf_names,
        current_name=current_name,
        fixed={"attention_dropout": 0.0, "hidden_dropout": 0.0},
        ignored=("rope_scaling", "rope_parameters", "rotary_pct", "classifier_dropout"),
        read=read,
        write=write,
    ),
)
