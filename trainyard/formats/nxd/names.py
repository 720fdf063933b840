"""Tensor names of NxD's two Llama implementations: the one derived from Hugging Face's, and NxDT's Megatron model.

The two differ in nothing else, so each is a table. A stored tensor may hold several matrices, in the given order.
Models with a mixture of experts have the names of the first style, with other ones for the MLP.
"""

from dataclasses import dataclass
from typing import Literal

QkvKind = Literal["separate", "coalesced", "qkv_linear", "fused"]
NameStyle = Literal["hf", "megatron"]


@dataclass(frozen=True)
class NameTable:
    """Tensor names of one style. Names inside a layer follow `layer_prefix` and the layer number."""

    embedding: str
    norm: str
    output: str
    layer_prefix: str
    attention_output: str
    down: str
    qkv: dict[QkvKind, tuple[tuple[str, str], ...]]
    """The tensors of each kind, with the letters of the matrices (q, k, v) in each."""
    gate_up: dict[bool, tuple[tuple[str, tuple[str, ...]], ...]]
    """The tensors and their matrices, fused (True) or separate."""


NAME_TABLES: dict[NameStyle, NameTable] = {
    "hf": NameTable(
        "model.embed_tokens.weight",
        "model.norm.weight",
        "lm_head.weight",
        "model.layers.",
        "self_attn.o_proj.weight",
        "mlp.down_proj.weight",
        {
            "separate": tuple((f"self_attn.{x}_proj.weight", x) for x in "qkv"),
            "coalesced": (("self_attn.qkv_proj.weight", "qkv"),),
            "qkv_linear": tuple((f"self_attn.qkv_proj.weight_{x}", x) for x in "qkv"),
            "fused": (("self_attn.qkv_proj.weight_qkv", "qkv"),),
        },
        {
            True: (("mlp.gate_up_proj.weight", ("gate", "up")),),
            False: (("mlp.gate_proj.weight", ("gate",)), ("mlp.up_proj.weight", ("up",))),
        },
    ),
    "megatron": NameTable(
        "language_model.embedding.word_embeddings.weight",
        "language_model.encoder.final_layernorm.weight",
        "language_model.output_layer.weight",
        "language_model.encoder.layers.",
        "self_attention.dense.weight",
        "mlp.dense_4h_to_h.weight",
        {
            "coalesced": (("self_attention.query_key_value.weight", "qkv"),),
            "qkv_linear": (("self_attention.query.weight", "q"), ("self_attention.key_value.weight", "kv")),
        },
        {True: (("mlp.dense_h_to_4h.weight", ("gate", "up")),)},
    ),
}
ROUTER_NAME = "mlp.router.linear_router.weight"
EXPERT_PREFIX = "mlp.expert_mlps."
EXPERT_NAMES: dict[str, tuple[str, ...]] = {
    f"{EXPERT_PREFIX}mlp_op.gate_up_proj.weight": ("gate", "up"),
    f"{EXPERT_PREFIX}mlp_op.down_proj.weight": ("down",),
}
"""The tensors of a layer's experts, and the matrices of each expert in them."""
NORM_NAMES = {"input_layernorm.weight": "attention_norm", "post_attention_layernorm.weight": "mlp_norm"}


def is_expert_tensor(name: str) -> bool:
    """True for the tensors that differ between expert-parallel ranks."""
    return f".{EXPERT_PREFIX}" in name
