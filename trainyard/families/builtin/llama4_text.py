"""Llama 4 (text): layers without RoPE, norms of q and k without weights, and a shared expert beside large ones."""

from collections.abc import Collection, Mapping
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from trainyard.core.section import PositiveInt
from trainyard.families.blueprint import layers_text, parse_layers
from trainyard.families.decoder import (
    DECODER_MODULE,
    DecoderStyle,
    decoder_hf_format,
    decoder_hf_keys,
    decoder_hf_names,
    write_decoder,
)
from trainyard.families.decoder_keys import periodic_layers
from trainyard.families.family import Family, HfNameMap, HfTensor
from trainyard.families.moe import LAYER, MoeConfig, MoeStyle, moe_blueprint, stacked_hf_names
from trainyard.families.rope import ROPE_HF_KEYS, QueryScale, Rope, read_rope

FULL, CHUNKED = "full_attention", "chunked_attention"


class Llama4TextConfig(MoeConfig):
    """Llama 4: RMSNorm, RoPE in three layers of four, grouped-query attention, SwiGLU experts with weighted inputs, one
    of them shared."""

    rope_interleaved: ClassVar[bool] = True
    experts: PositiveInt = 16
    """Number of experts in each layer."""
    top_k: PositiveInt = 1
    """Experts that a token goes to."""
    router_scores: Literal["softmax", "sigmoid"] = "sigmoid"
    """How the logits of the router become the scores by which experts are chosen and weighted."""
    normalize_top_k: bool = False
    """Scale the weights of a token's experts to the sum 1."""
    head_dim: PositiveInt | None = 128
    """Width of a head, an even number; null: hidden / heads."""
    rope_theta: float = Field(500000.0, gt=1)
    """Base of the RoPE frequencies."""
    attention_bias: bool = False
    """Biases in the four linear layers of attention."""
    qk_norm: bool = True
    """Norms of the heads of q and k, without weights, in layers with RoPE."""
    no_rope_layers: str | None = None
    """Layers without RoPE, such as 0-2, 3-, even, odd or 0,5-7; `none`: no layer. Default: every fourth."""
    attention_chunk: PositiveInt | None = 8192
    """Tokens of a chunk, beyond which layers with RoPE do not attend: max_positions is at most this. null: they attend
    to all tokens before."""
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

    @property
    def layers_without_rope(self) -> Collection[int]:
        if self.no_rope_layers is None:
            return periodic_layers(4, self.layers)
        return () if self.no_rope_layers == "none" else parse_layers(self.no_rope_layers, self.layers)

    def rope_of(self, layer: int) -> Rope | None:
        if layer not in self.layers_without_rope:
            return super().rope_of(layer)
        if not self.query_scale_weight:
            return None
        scale = QueryScale(self.query_scale_interval, self.query_scale_weight)
        return Rope(self.rope_theta, 0, self.max_positions, query_scale=scale)

    @model_validator(mode="after")
    def _check_chunk(self) -> Self:
        if self.attention_chunk and self.max_positions > self.attention_chunk:
            raise ValueError(
                f"max_positions={self.max_positions}: more than attention_chunk; nearest: {self.attention_chunk}"
            )
        return self


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
    step, interval = (data.get(key, default) for key, default in STEPS.items())
    flags = data.get("no_rope_layers") or [(layer + 1) % interval for layer in range(count)]
    with_experts = data.get("moe_layers")
    with_experts = range(step - 1, count, step) if with_experts is None else with_experts
    without = [layer for layer, has_rope in enumerate(flags[:count]) if not has_rope]
    dense = layers_text(layer for layer in range(count) if layer not in with_experts)
    kinds = data.get("layer_types") or [FULL if layer in without else CHUNKED for layer in range(count)]
    if unknown := {str(kind) for kind in kinds} - {FULL, CHUNKED}:
        raise ValueError(f"layer_types={min(unknown)}: not supported; one of {CHUNKED}, {FULL}")
    if min(len(flags), len(kinds)) < count:
        raise ValueError(f"no_rope_layers, layer_types: fewer than num_hidden_layers={count}")
    chunk, tuned = data.get("attention_chunk_size", 8192), data.get("attn_temperature_tuning", True)
    max_positions = data.get("max_position_embeddings", 131072)
    return {
        **rope,
        "no_rope_layers": None if without == list(periodic_layers(4, count)) else layers_text(without) or "none",
        "dense_layers": dense,
        "dense_ffn": data.get("intermediate_size_mlp", 16384) if dense else None,
        "shared_ffn": data.get("intermediate_size", 8192),
        "attention_chunk": chunk if CHUNKED in kinds else None,
        "max_positions": min(max_positions, chunk or max_positions) if CHUNKED in kinds else max_positions,
        "query_scale_weight": data.get("attn_scale", 0.1) if tuned else 0.0,
    }


STEPS = {"interleave_moe_layer_step": 1, "no_rope_layer_interval": 4}


def write(c: Llama4TextConfig) -> dict[str, Any]:
    chunked = CHUNKED if c.attention_chunk else FULL
    kinds = [FULL if layer in c.layers_without_rope else chunked for layer in range(c.layers)]
    return {
        **write_decoder(c),
        "no_rope_layers": [int(layer not in c.layers_without_rope) for layer in range(c.layers)],
        "moe_layers": sorted(c.expert_layers),
        "intermediate_size_mlp": c.dense_ffn or c.ffn,
        "attention_chunk_size": c.attention_chunk,
        "layer_types": kinds,
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
                kv_heads=8, head_dim=128, max_positions=131072, rope_theta=500000.0, norm_eps=1e-5, bos_token_id=1,
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
        ignored=(
            *ROPE_HF_KEYS, *STEPS, "no_rope_layers", "moe_layers", "intermediate_size_mlp", "attention_chunk_size",
            "layer_types", "attn_temperature_tuning", "attn_scale",
        ),
        read=read,
        write=write,
    ),
)  # fmt: skip
