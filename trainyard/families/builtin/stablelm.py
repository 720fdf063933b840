"""StableLM: Llama's block with LayerNorm, RoPE on a part of each head, and attention and MLP in parallel if asked."""

from functools import partial

from pydantic import Field

from trainyard.families.decoder import (
    DECODER_MODULE,
    PRE_NORMS,
    DecoderConfig,
    DecoderStyle,
    decoder_blueprint,
    decoder_hf_format,
    decoder_hf_keys,
    read_default_head_dim,
)
from trainyard.families.family import Family


class StableLmConfig(DecoderConfig):
    """StableLM: LayerNorm, RoPE on a part of each head, grouped-query attention, SwiGLU."""

    partial_rotary_factor: float = Field(0.25, gt=0, le=1)
    """Part of each head that RoPE rotates."""
    qkv_bias: bool = False
    """Biases on q, k and v."""
    parallel_residual: bool = False
    """Attention and MLP read the same residual, behind one norm."""

    @property
    def style(self) -> DecoderStyle:
        norms = {"attention_norm": "input_layernorm"} if self.parallel_residual else PRE_NORMS
        biases = ("qkv",) if self.qkv_bias else ()
        return DecoderStyle(norms=norms, norm="layer_bias", parallel=self.parallel_residual, biases=biases)


FAMILY = Family(
    name="stablelm",
    config_class=StableLmConfig,
    module=DECODER_MODULE,
    blueprint=decoder_blueprint,
    hf=decoder_hf_format(
        "stablelm",
        "StableLmForCausalLM",
        keys={
            **decoder_hf_keys(kv_heads=32, max_positions=4096, rope_theta=10000.0, bos_token_id=0, eos_token_id=0),
            "norm_eps": ("layer_norm_eps", 1e-5),
            "qkv_bias": ("use_qkv_bias", False),
            "parallel_residual": ("use_parallel_residual", False),
        },
        fixed={"hidden_act": "silu", "attention_dropout": 0.0, "hidden_dropout": 0.0, "qk_layernorm": False},
        read=partial(read_default_head_dim, rotary_factor=0.25),
    ),
)
