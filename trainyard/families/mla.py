"""Multi-head latent attention (DeepSeek-V2 and later): keys, and the parameters and Hugging Face names of a layer.

Keys and values of all heads come from one narrow vector of each token, the latent, which is what a cache keeps. RoPE
rotates a part of each query and one key that all heads share; the rest of a head has no positions.
"""

from dataclasses import replace

from pydantic import Field

from trainyard.core.section import PositiveInt
from trainyard.families.blueprint import Blueprint, FusedPart, ParamSpec
from trainyard.families.decoder import DecoderStyle, decoder_hf_names
from trainyard.families.family import HfNameMap, HfTensor
from trainyard.families.moe import MoeConfig, moe_blueprint, moe_hf_names
from trainyard.families.rope import YarnRopeScaling, yarn_mscale

ATTENTION = "layers.*.attention."
LATENT_NORM_EPS = 1e-6
"""Epsilon of the norms of latents, which no key sets."""


class MlaConfig(MoeConfig):
    """A decoder with latent attention."""

    rope_interleaved = True
    kv_heads: None = None
    """Always null: each head has keys and values of its own."""
    head_dim: None = None
    """Always null: qk_nope_head_dim, qk_rope_head_dim and v_head_dim are the widths of a head."""
    q_lora_rank: PositiveInt | None = 1536
    """Width of the latent that queries are made of; null: they are made of the hidden states."""
    kv_lora_rank: PositiveInt = 512
    """Width of the latent that keys and values are made of."""
    qk_nope_head_dim: PositiveInt = 128
    """Width of the part of a query or key without positions."""
    qk_rope_head_dim: int = Field(64, ge=2, multiple_of=2)
    """Width of the part of a query or key that RoPE rotates."""
    v_head_dim: PositiveInt = 128
    """Width of a value."""
    attention_bias: bool = False
    """Biases of the projections to latents and of the output projection."""
    shared_ffn: PositiveInt | None = Field(...)
    """Intermediate size of the shared experts together, through which every token goes as well."""

    @property
    def style(self) -> DecoderStyle:
        scale, rope = self.head_size**-0.5, self.rope_scaling
        if isinstance(rope, YarnRopeScaling) and rope.mscale_all_dim:
            scale *= yarn_mscale(rope.factor, rope.mscale_all_dim) ** 2
        return DecoderStyle(biases=("output",) if self.attention_bias else (), attention_scale=scale)

    @property
    def head_size(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def rotary_size(self) -> int:
        return self.qk_rope_head_dim

    @property
    def value_size(self) -> int:
        return self.v_head_dim

    def cache_width(self, layer: int, tp: int) -> int:
        return self.kv_lora_rank + self.qk_rope_head_dim


def mla_blueprint(c: MlaConfig) -> Blueprint:
    """The parameters of a decoder with latent attention."""
    blueprint = moe_blueprint(c)
    others = [spec for spec in blueprint.specs if not spec.name.startswith(ATTENTION)]
    return replace(blueprint, specs=(*others, *mla_specs(c)))


def mla_specs(c: MlaConfig) -> list[ParamSpec]:
    """The parameters of latent attention. Tensor-parallel ranks split the heads. The projections to latents, which all
    heads share, are of the tokens that a rank has between attention and MLP, and every rank has these matrices."""
    own, D, sizes = ATTENTION, c.hidden, latent_sizes(c)
    groups = {"qkv_a": tuple(sizes)} if c.fuse_qkv and c.q_lora_rank else {name: (name,) for name in sizes}

    def latent(name: str, kind: str, columns: tuple[int, ...], init_std: float | None) -> ParamSpec:
        parts = tuple(FusedPart(f"{own}{part}.{kind}", sizes[part], sizes[part]) for part in groups[name])
        shape = (sum(part.size for part in parts), *columns)
        spec = ParamSpec(f"{own}{name}.{kind}", shape, fused_parts=parts, init_std=init_std)
        return replace(spec, flops_tokens="tokens") if columns else spec

    def matrix(name: str, shape: tuple[int, int], tp_dim: int, init_std: float) -> ParamSpec:
        return ParamSpec(f"{own}{name}.weight", shape, tp_dim, init_std=init_std, flops_tokens="tokens")

    queries = matrix("q_b" if c.q_lora_rank else "q", (c.heads * c.head_size, c.q_lora_rank or D), 0, c.init_std)
    key_values = (c.heads * (c.qk_nope_head_dim + c.v_head_dim), c.kv_lora_rank)
    norms = {"q_a_norm": c.q_lora_rank, "kv_a_norm": c.kv_lora_rank}
    return [
        *(latent(name, "weight", (D,), c.init_std) for name in groups),
        *(latent(name, "bias", (), None) for name in groups if c.attention_bias),
        *(ParamSpec(f"{own}{name}.weight", (size,), init_value=1.0) for name, size in norms.items() if size),
        queries,
        matrix("kv_b", key_values, 0, c.init_std),
        matrix("output", (D, c.heads * c.v_head_dim), 1, c.output_init_std),
        *([ParamSpec(f"{own}output.bias", (D,))] if c.attention_bias else []),
    ]


def latent_sizes(c: MlaConfig) -> dict[str, int]:
    """Widths of the projections to latents by name; that of keys and values includes the key with positions."""
    return {**({"q_a": c.q_lora_rank} if c.q_lora_rank else {}), "kv_a": c.kv_lora_rank + c.qk_rope_head_dim}


def mla_names(c: MlaConfig) -> HfNameMap:
    """The names that transformers has for a decoder with latent attention."""
    names = decoder_hf_names(c, moe_hf_names(c, shared="shared_experts"))
    others = {ours: hf for ours, hf in names.table.items() if not ours.startswith(ATTENTION)}
    hf = {"kv_a": "kv_a_proj_with_mqa", "kv_a_norm": "kv_a_layernorm", "kv_b": "kv_b_proj", "output": "o_proj"}
    hf |= {"q_a": "q_a_proj", "q_a_norm": "q_a_layernorm", "q_b": "q_b_proj"} if c.q_lora_rank else {"q": "q_proj"}
    kinds = [(name, "weight") for name in hf]
    kinds += [(name, "bias") for name in (*latent_sizes(c), "output") if c.attention_bias]
    attention = {
        f"{ATTENTION}{name}.{kind}": HfTensor(f"model.layers.*.self_attn.{hf[name]}.{kind}") for name, kind in kinds
    }
    return replace(names, table={**others, **attention})
