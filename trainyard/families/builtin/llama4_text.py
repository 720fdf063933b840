"""Llama 4 (text): layers without RoPE, norms of q and k without weights, and a shared expert beside large ones.

Layers with RoPE attend within chunks of 8,192 tokens. Here `max_positions` is at most a chunk, in which they attend to
all tokens before.
"""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field

from trainyard.core.section import PositiveInt
from trainyard.families.blueprint import layers_text
from trainyard.families.decoder import (
    DECODER_MODULE,
    DecoderStyle,
    decoder_hf_format,
    decoder_hf_keys,
    decoder_hf_names,
    write_decoder,
)
from trainyard.families.decoder_keys import (
    PartlyRotaryConfig,
    no_rope_layers_of,
    read_layers_without_rope,
    write_no_rope_layers,
)
from trainyard.families.family import Family, HfNameMap, HfTensor
from trainyard.families.moe import LAYER, MoeConfig, MoeStyle, moe_blueprint, stacked_hf_names
from trainyard.families.rope import ROPE_HF_KEYS, QueryScale, Rope, read_rope

IGNORED = """interleave_moe_layer_step no_rope_layer_interval no_rope_layers moe_layers intermediate_size_mlp
    attention_chunk_size layer_types attn_temperature_tuning attn_scale"""
"""Keys that `read` reads."""
FULL, CHUNKED = "full_attention", "chunked_attention"


class Llama4TextConfig(PartlyRotaryConfig, MoeConfig):
    """Llama 4: RMSNorm, RoPE in three layers of four, grouped-query attention, SwiGLU experts with weighted inputs, one
    of them shared."""

    rope_interleaved: ClassVar[bool] = True
    router_scores: Literal["softmax", "sigmoid"] = "sigmoid"
    """How the logits of the router become the scores by which experts are chosen and weighted."""
    normalize_top_k: bool = False
    """Scale the weights of a token's experts to the sum 1."""
    attention_bias: bool = False
    """Biases in the four linear layers of attention."""
    qk_norm: bool = True
    """Norms of the heads of q and k, without weights, in layers with RoPE."""
    query_scale_weight: float = Field(0.1, ge=0)
    """In layers without RoPE, the query at position p is multiplied by 1 + this x ln(1 + floor((p + 1) / interval));
    0: it is not."""
    query_scale_interval: PositiveInt = 8192
    """The interval of query_scale_weight, in tokens."""

    @property
    def style(self) -> DecoderStyle:
        biases = ("qkv", "output") if self.attention_bias else ()
        return DecoderStyle(biases=biases, qk_norm="unit" if self.qk_norm else "")

    @property
    def moe_style(self) -> MoeStyle:
        return MoeStyle(scales_inputs=True)

    def rope_of(self, layer: int) -> Rope | None:
        if layer not in self.layers_without_rope or not self.query_scale_weight:
            return super().rope_of(layer)
        scale = QueryScale(self.query_scale_interval, self.query_scale_weight)
        return Rope(self.rope_theta, 0, self.max_positions, query_scale=scale)


def hf_names(c: Llama4TextConfig) -> HfNameMap:
    hf, matrices = "model.layers.*.feed_forward.", ("gate", "up", "down")
    names = {x: f"{x}_proj" for x in matrices} | {f"shared.{x}": f"shared_expert.{x}_proj" for x in matrices}
    names["router"] = "router"
    table = {f"{LAYER}{ours}.weight": HfTensor(f"{hf}{name}.weight") for ours, name in names.items()}
    return decoder_hf_names(c, {**table, **stacked_hf_names(c, f"{hf}experts.")})


def read(data: Mapping[str, Any]) -> dict[str, Any]:
    rope, count = read_rope(data), data["num_hidden_layers"]
    if (kind := (rope["rope_scaling"] or {}).get("kind")) in ("dynamic", "longrope"):
        raise ValueError(f"rope_type={kind}: not supported; nearest: llama3")
    without, with_experts = read_layers_without_rope(data), data.get("moe_layers")
    if with_experts is None:
        step = data.get("interleave_moe_layer_step", 1)
        with_experts = range(step - 1, count, step)
    dense = layers_text(layer for layer in range(count) if layer not in with_experts)
    kinds = data.get("layer_types") or [FULL if layer in without else CHUNKED for layer in range(count)]
    if unknown := {str(kind) for kind in kinds} - {FULL, CHUNKED}:
        raise ValueError(f"layer_types={min(unknown)}: not supported; one of {CHUNKED}, {FULL}")
    chunk, tuned = data.get("attention_chunk_size", 8192), data.get("attn_temperature_tuning", True)
    max_positions = data.get("max_position_embeddings", 131072)
    return {
        **rope,
        "no_rope_layers": no_rope_layers_of(without, count),
        "dense_layers": dense,
        "dense_ffn": data.get("intermediate_size_mlp", 16384) if dense else None,
        "shared_ffn": data.get("intermediate_size", 8192),
        "max_positions": min(max_positions, chunk or max_positions) if CHUNKED in kinds else max_positions,
        "query_scale_weight": data.get("attn_scale", 0.1) if tuned else 0.0,
    }


def write(c: Llama4TextConfig) -> dict[str, Any]:
    return {
        **write_decoder(c),
        **write_no_rope_layers(c),
        "moe_layers": sorted(c.expert_layers),
        "intermediate_size_mlp": c.dense_ffn or c.ffn,
        "attention_chunk_size": c.max_positions,
        "attn_temperature_tuning": c.query_scale_weight > 0,
        "attn_scale": c.query_scale_weight,
    }


FAMILY = Family(
    name="llama4_text",
    config_class=Llama4TextConfig,
    module=DECODER_MODULE,
    blueprint=moe_blueprint,
    hf=decoder_hf_format(
        "llama4_text",
        "Llama4ForCausalLM",
        keys={
            **decoder_hf_keys(
                kv_heads=8,
                head_dim=128,
                max_positions=131072,
                rope_theta=500000.0,
                norm_eps=1e-5,
                bos_token_id=1,
                eos_token_id=2,
            ),
            "ffn": ("intermediate_size", 8192),
            "experts": ("num_local_experts", 16),
            "top_k": ("num_experts_per_tok", 1),
            "qk_norm": ("use_qk_norm", True),
            "attention_bias": ("attention_bias", False),
            "query_scale_interval": ("floor_scale", 8192),
            "balance_loss": ("router_aux_loss_coef", 0.001),
        },
        names=hf_names,
        fixed={"hidden_act": "silu", "attention_dropout": 0.0, "router_jitter_noise": 0.0},
        ignored=(*ROPE_HF_KEYS, *IGNORED.split()),
        read=read,
        write=write,
    ),
)
