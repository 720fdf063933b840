"""Phi-3 and Phi-4: Llama's block with RoPE on a part of each head, and fused matrices in Hugging Face's files."""

from dataclasses import replace
from functools import partial

from pydantic import Field

from trainyard.core.section import PositiveInt
from trainyard.families.decoder import (
    DECODER_MODULE,
    DecoderConfig,
    decoder_blueprint,
    decoder_hf_format,
    decoder_hf_keys,
    decoder_hf_names,
    read_default_head_dim,
)
from trainyard.families.family import Family, HfNameMap, HfTensor


class Phi3Config(DecoderConfig):
    """Phi-3 and Phi-4: RMSNorm, RoPE on a part of each head, grouped-query attention, SwiGLU."""

    partial_rotary_factor: float = Field(1.0, gt=0, le=1)
    """Part of each head that RoPE rotates."""
    sliding_window: PositiveInt | None = None
    """Number of tokens, its own included, that a token attends to at most. Default: all tokens before it."""

    def attention_window(self, layer: int) -> int | None:
        return self.sliding_window


def hf_names(c: DecoderConfig) -> HfNameMap:
    """q, k and v, and gate and up, are one tensor each."""
    names, layer = decoder_hf_names(c), "model.layers.*."
    qkv = {f"layers.*.attention.{x}.weight": HfTensor(f"{layer}self_attn.qkv_proj.weight") for x in "qkv"}
    return replace(names, table={**names.table, **qkv, **fused_gate_up_names()})


def fused_gate_up_names() -> dict[str, HfTensor]:
    return {f"layers.*.mlp.{x}.weight": HfTensor("model.layers.*.mlp.gate_up_proj.weight") for x in ("gate", "up")}


FAMILY = Family(
    name="phi3",
    config_class=Phi3Config,
    module=DECODER_MODULE,
    blueprint=decoder_blueprint,
    hf=decoder_hf_format(
        "phi3",
        "Phi3ForCausalLM",
        keys={
            **decoder_hf_keys(
                kv_heads=None,
                max_positions=4096,
                rope_theta=10000.0,
                norm_eps=1e-5,
                bos_token_id=1,
                eos_token_id=32000,
                pad_token_id=32000,
            ),
            "sliding_window": ("sliding_window", None),
        },
        names=hf_names,
        fixed={"hidden_act": "silu", "attention_dropout": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0},
        read=partial(read_default_head_dim, rotary_factor=1.0),
    ),
)
