"""Falcon 7B and those after it: attention and an MLP without a gate in parallel, one or few key and value heads."""

from collections.abc import Mapping
from typing import Any

from trainyard.families.builtin.gpt_neox import BLOCK_NAMES
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
from trainyard.families.family import Family
from trainyard.families.rope import ROPE_HF_KEYS, read_rope, write_rope

HF_NAMES = {
    **BLOCK_NAMES,
    "self_attn": "self_attention",
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
        parallel, biases = self.parallel_residual, ("qkv", "output", "mlp") if self.bias else ()
        beside = {"attention_norm": "ln_attn", "mlp_norm": "ln_mlp"}
        norms = beside if self.mlp_norm else {"attention_norm": "input_layernorm"} if parallel else PRE_NORMS
        return DecoderStyle(norms, "layer_bias", "", parallel, biases, gated=False, activation=self.activation)


def read(data: Mapping[str, Any]) -> dict[str, Any]:
    is_new, parallel = bool(data.get("new_decoder_architecture")), bool(data.get("parallel_attn", True))
    norms = data.get("num_ln_in_parallel_attn") or 1 + is_new
    if norms > 1 + is_new:
        raise ValueError(f"num_ln_in_parallel_attn={norms}: not supported; nearest: {1 + is_new}")
    if is_new and not parallel:
        raise ValueError("parallel_attn=False: not in the new decoder architecture; nearest: True")
    kv_heads = data.get("num_kv_heads") if is_new else data.get("multi_query", True) or None
    sizes = {"ffn": data.get("ffn_hidden_size") or 4 * data["hidden_size"]}
    sizes["kv_heads"] = int(kv_heads or data["num_attention_heads"])
    return {**sizes, "parallel_residual": parallel, "mlp_norm": norms == 2, **read_rope(data)}


def write(c: FalconConfig) -> dict[str, Any]:
    """transformers has groups of heads, and two norms, in the new architecture only."""
    is_new = c.parallel_residual and (c.mlp_norm or c.num_kv_heads not in (1, c.heads))
    values = (is_new, c.num_kv_heads == 1, c.parallel_residual, 1 + c.mlp_norm if is_new else None, c.num_kv_heads)
    return {**dict(zip(KEYS, values, strict=True)), **write_rope(c)}


FAMILY = Family(
    name="falcon",
    config_class=FalconConfig,
    module=DECODER_MODULE,
    blueprint=decoder_blueprint,
    hf=decoder_hf_format(
        "falcon",
        "FalconForCausalLM",
        keys={
            **decoder_hf_keys(("kv_heads", "head_dim"), max_positions=2048, rope_theta=10000.0),
            **{key: (key, 11) for key in ("bos_token_id", "eos_token_id")},
            "tie_embeddings": ("tie_word_embeddings", True),
            "ffn": ("ffn_hidden_size", None),
            "norm_eps": ("layer_norm_epsilon", 1e-5),
            "bias": ("bias", False),
        },
        groups=(activation_keys("activation", "gelu"),),
        names=lambda c: renamed_hf(decoder_hf_names(c), HF_NAMES, "query_key_value", c.num_kv_heads),
        fixed={"alibi": False, "attention_dropout": 0.0, "hidden_dropout": 0.0},
        ignored=(*ROPE_HF_KEYS, *KEYS),
        read=read,
        write=write,
    ),
)
