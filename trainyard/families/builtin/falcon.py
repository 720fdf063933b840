"""Falcon 7B and those after it: attention and an MLP without a gate in parallel, one or few key and value heads."""

from collections.abc import Mapping
from typing import Any

from trainyard.families.decoder import (
    DECODER_MODULE,
    PRE_NORMS,
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
from trainyard.families.rope import ROPE_HF_KEYS, read_rope, write_rope

HF_NAMES = {
    "self_attn.o_proj": "self_attention.dense",
    "self_attn": "self_attention",
    "mlp.up_proj": "mlp.dense_h_to_4h",
    "mlp.down_proj": "mlp.dense_4h_to_h",
    "model.norm": "transformer.ln_f",
    "model.embed_tokens": "transformer.word_embeddings",
    "model.layers": "transformer.h",
}
KEYS = ("new_decoder_architecture", "multi_query", "parallel_attn", "num_ln_in_parallel_attn", "num_kv_heads")


class FalconConfig(DecoderConfig):
    """Falcon: LayerNorm, RoPE, attention with one or few key and value heads, in parallel with the MLP."""

    tie_embeddings: bool = True
    """Share one matrix between the input embedding and the output head."""
    bias: bool = False
    """Biases in the linear layers of attention and MLP."""
    parallel_residual: bool = True
    """Attention and MLP read the same residual."""
    mlp_norm: bool = False
    """The MLP in parallel with attention has its own norm, as in Falcon 40B."""
    activation: Activation = "gelu"
    """Activation of the MLP."""

    @property
    def style(self) -> DecoderStyle:
        norms = {"attention_norm": "input_layernorm"}
        if self.mlp_norm:
            norms = {"attention_norm": "ln_attn", "mlp_norm": "ln_mlp"}
        return DecoderStyle(
            norms=norms if self.parallel_residual else PRE_NORMS,
            norm="layer_bias",
            parallel=self.parallel_residual,
            biases=("qkv", "output", "mlp") if self.bias else (),
            gated=False,
            activation=self.activation,
        )

    @property
    def is_new(self) -> bool:
        """transformers calls models with several groups of heads, or with two norms, the new architecture."""
        return self.parallel_residual and (self.mlp_norm or self.num_kv_heads not in (1, self.heads))


def hf_names(c: FalconConfig) -> HfNameMap:
    return renamed_hf(decoder_hf_names(c), HF_NAMES, "query_key_value", c.num_kv_heads)


def read(data: Mapping[str, Any]) -> dict[str, Any]:
    heads, parallel = data["num_attention_heads"], data.get("parallel_attn", True)
    is_new, norms = bool(data.get("new_decoder_architecture")), data.get("num_ln_in_parallel_attn")
    if is_new and not parallel:
        raise ValueError("parallel_attn=False: not in the new decoder architecture; nearest: True")
    if norms not in ((None, 1, 2) if is_new else (None, 1)):
        raise ValueError(f"num_ln_in_parallel_attn={norms}: not supported; nearest: 1")
    kv_heads = data.get("num_kv_heads") if is_new else 1 if data.get("multi_query", True) else None
    return {
        "ffn": data.get("ffn_hidden_size") or 4 * data["hidden_size"],
        "kv_heads": kv_heads or heads,
        "parallel_residual": bool(parallel),
        "mlp_norm": is_new and norms != 1,
        **read_rope(data),
    }


def write(c: FalconConfig) -> dict[str, Any]:
    return {
        "num_kv_heads": c.num_kv_heads,
        "multi_query": c.num_kv_heads == 1,
        "parallel_attn": c.parallel_residual,
        "new_decoder_architecture": c.is_new,
        "num_ln_in_parallel_attn": 1 + c.mlp_norm if c.is_new else None,
        **write_rope(c),
    }


FAMILY = Family(
    name="falcon",
    config_class=FalconConfig,
    module=DECODER_MODULE,
    blueprint=decoder_blueprint,
    hf=decoder_hf_format(
        "falcon",
        "FalconForCausalLM",
        keys={
            **decoder_hf_keys(
                absent=("kv_heads", "head_dim"),
                max_positions=2048,
                rope_theta=10000.0,
                tie_embeddings=True,
                bos_token_id=11,
                eos_token_id=11,
            ),
            "ffn": ("ffn_hidden_size", None),
            "norm_eps": ("layer_norm_epsilon", 1e-5),
            "bias": ("bias", False),
        },
        groups=(activation_keys("activation", "gelu"),),
        names=hf_names,
        fixed={"alibi": False, "attention_dropout": 0.0, "hidden_dropout": 0.0},
        ignored=(*ROPE_HF_KEYS, *KEYS),
        read=read,
        write=write,
    ),
)
