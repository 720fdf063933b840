"""What Llama and the families that share its block have in common: keys, parameter table, Hugging Face names."""

import itertools
import operator
import re
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from trainyard.core.section import PositiveInt, nearest_divisor, nearest_multiples
from trainyard.families.blueprint import Blueprint, FusedPart, ParamSpec, column_parallel_specs
from trainyard.families.family import REQUIRED, HfFormat, HfKeys, HfNameMap, HfTensor, MegatronModel
from trainyard.families.model_config import ModelConfig
from trainyard.families.rope import ROPE_HF_KEYS, Rope, RopeScaling, check_rope, read_rope, write_rope

DECODER_MODULE = "trainyard.models.llama:Llama"
"""The module of all these families. What differs between them is in their blueprints and styles."""
NormKind = Literal["rms", "rms_plus_one", "layer", "layer_bias"]
Activation = Literal["silu", "gelu", "gelu_tanh", "relu", "relu2"]
NormTensors = Mapping[str, str]
"""The end of a norm's name in transformers by its name in a block."""
PRE_NORMS: NormTensors = {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
"""Of most families: the inputs of attention and MLP are normalized."""


@dataclass(frozen=True)
class DecoderStyle:
    """What the blocks of a decoder have besides their matrices, and what they compute between them."""

    norms: NormTensors = field(default_factory=lambda: PRE_NORMS)
    """The norms of a block: of the inputs of attention and MLP (`attention_norm`, `mlp_norm`), and of their outputs
    before these are added to the residual (`attention_output_norm`, `mlp_output_norm`)."""
    norm: NormKind = "rms"
    """RMSNorm, RMSNorm times 1 + weight, or LayerNorm without and with a bias."""
    qk_norm: Literal["", "heads", "all", "unit"] = ""
    """RMSNorm of q and k before RoPE: of each head, or of all heads together; `unit`: of each head without a weight, in
    layers that rotate."""
    parallel: bool = False
    """Attention and MLP read the same residual, and both are added to it. Without `mlp_norm` they share a norm."""
    biases: Collection[str] = ()
    """Which linear layers have one: `qkv`, `output` (of attention), `mlp` and `head` (unless it is tied)."""
    gated: bool = True
    """The MLP has a gate, whose activation multiplies the up projection; otherwise it is the up projection's own."""
    activation: Activation = "silu"
    """Of the MLP: SiLU, GELU, its tanh approximation, ReLU or its square."""
    embedding_scale: float = 1.0
    """Factor of the embedded tokens, rounded to their dtype."""
    residual_scale: float = 1.0
    """Factor of the outputs of attention and MLP."""
    logit_scale: float = 1.0
    """Factor of the logits."""
    logit_soft_cap: float | None = None
    """Bound c of the logits x, which become c tanh(x / c)."""
    attention_scale: float | None = None
    """Factor of the attention scores. Default: 1 / sqrt(head size)."""
    attention_soft_cap: float | None = None
    """Bound of the attention scores, as for logits."""
    sinks: bool = False
    """A trained logit of each head takes part in the softmax of its scores, without a value."""

    @property
    def has_qk_weights(self) -> bool:
        return self.qk_norm in ("heads", "all")


class DecoderConfig(ModelConfig):
    """RMSNorm, RoPE, grouped-query attention, SwiGLU."""

    kv_heads: PositiveInt | None = None
    """Number of key and value heads. Default: heads."""
    head_dim: PositiveInt | None = None
    """Width of a head, an even number. Default: hidden / heads."""
    ffn: PositiveInt
    """Intermediate size of the MLP."""
    rope_theta: float = Field(10000.0, gt=1)
    """Base of the RoPE frequencies."""
    rope_scaling: RopeScaling | None = None
    """RoPE scaling for a longer context. Default: none."""
    tie_embeddings: bool = False
    """Share one matrix between the input embedding and the output head."""
    norm_eps: float = Field(1e-5, gt=0)
    """Epsilon added to the mean square in RMSNorm, or to the variance in LayerNorm."""
    fuse_gate_up: bool = True
    """Store gate and up projections as one matrix."""

    rope_interleaved: ClassVar[bool] = False
    """True if RoPE rotates dims (0, 1), (2, 3), ... of a head, and not its halves."""

    @property
    def style(self) -> DecoderStyle:
        """How the blocks of this family differ from Llama's."""
        return DecoderStyle()

    @model_validator(mode="after")
    def _check_head_sizes(self) -> Self:
        if self.heads % self.num_kv_heads:
            nearest = nearest_divisor(self.num_kv_heads, self.heads)
            raise ValueError(f"kv_heads={self.num_kv_heads}: does not divide heads={self.heads}; nearest: {nearest}")
        if self.head_size % 2:
            multiples = nearest_multiples(self.head_size, 2)
            raise ValueError(f"head_dim={self.head_size}: RoPE needs an even head size; nearest: {multiples}")
        for rope in self.ropes:
            if rope:
                check_rope(rope)
        return self

    @property
    def context_keys(self) -> tuple[str, ...]:
        return ("max_positions", "rope_theta", "rope_scaling")

    @property
    def rotary_size(self) -> int:
        """Dims of a head that RoPE rotates."""
        return int(self.head_size * getattr(self, "partial_rotary_factor", 1.0))

    def rope_of(self, layer: int) -> Rope | None:
        """How this layer tells positions; None: it does not."""
        return Rope(self.rope_theta, self.rotary_size, self.max_positions, self.rope_scaling, self.rope_interleaved)

    @property
    def ropes(self) -> list[Rope | None]:
        """What `rope_of` answers, each once."""
        return list(dict.fromkeys(map(self.rope_of, range(self.layers))))

    def layer_kind(self, layer: int) -> Hashable:
        return super().layer_kind(layer), self.rope_of(layer)


def decoder_blueprint(c: DecoderConfig, mlp_specs: Sequence[ParamSpec] | None = None) -> Blueprint:
    """The parameters of a decoder; `mlp_specs` replace those of the MLP."""
    D, V, tied = c.hidden, c.vocab, c.tie_embeddings
    head = ParamSpec("output.weight", (V, D), 0, (), "last", c.init_std, flops_tokens="tokens", padded=True)
    biased = "head" in c.style.biases and not tied
    if mlp_specs is None:
        mlp_specs = (gated_mlp_specs if c.style.gated else plain_mlp_specs)(c, c.ffn)
    before, after = (
        [spec for name in names if name in c.style.norms for spec in norm_specs(c, f"layers.*.{name}")]
        for names in (("attention_norm", "attention_output_norm"), ("mlp_norm", "mlp_output_norm"))
    )
    return Blueprint(
        (
            ParamSpec("embedding.weight", (V, D), 0, (), "both" if tied else "first", c.init_std, padded=True),
            *before,
            *attention_specs(c),
            *after,
            *mlp_specs,
            *(replace(spec, pipeline_stage="last") for spec in norm_specs(c, "norm")),
            *([] if tied else [head]),
            *([replace(head, name="output.bias", shape=(V,), init_std=None, flops_tokens="nothing")] if biased else []),
        ),
        c.layers,
        (V, D, "tokens") if tied else None,
    )


def norm_specs(c: DecoderConfig, name: str) -> list[ParamSpec]:
    """The parameters of a norm of the hidden states."""
    weight = ParamSpec(f"{name}.weight", (c.hidden,), init_value=0.0 if c.style.norm == "rms_plus_one" else 1.0)
    return [weight, ParamSpec(f"{name}.bias", (c.hidden,))] if c.style.norm == "layer_bias" else [weight]


def attention_specs(c: DecoderConfig) -> list[ParamSpec]:
    layer, style, Q, KV = "layers.*.attention.", c.style, c.heads * c.head_size, c.num_kv_heads * c.head_size
    sizes = (("q", Q, c.heads), ("k", KV, c.num_kv_heads), ("v", KV, c.num_kv_heads))

    def parts(kind: str) -> tuple[FusedPart, ...]:
        return tuple(FusedPart(f"{layer}{name}.{kind}", size, units) for name, size, units in sizes)

    def qk_norm(name: str, size: int, units: int) -> ParamSpec:
        """Each tensor-parallel rank normalizes its own heads."""
        name, value = f"{layer}{name}_norm.weight", 0.0 if style.norm == "rms_plus_one" else 1.0
        if style.qk_norm == "all":
            return ParamSpec(name, (size,), 0, (FusedPart(name, size, units),), init_value=value)
        return ParamSpec(name, (c.head_size,), init_value=value, tp_gradient="partial")

    return [
        *column_parallel_specs(f"{layer}qkv.weight", parts("weight"), (c.hidden,), c.fuse_qkv, c.init_std),
        *(column_parallel_specs(f"{layer}qkv.bias", parts("bias"), (), c.fuse_qkv) if "qkv" in style.biases else ()),
        *(itertools.starmap(qk_norm, sizes[:2]) if style.has_qk_weights else ()),
        *([ParamSpec(f"{layer}sinks", (c.heads,), 0)] if style.sinks else []),
        ParamSpec(f"{layer}output.weight", (c.hidden, Q), 1, init_std=c.output_init_std, flops_tokens="tokens"),
        *([ParamSpec(f"{layer}output.bias", (c.hidden,))] if "output" in style.biases else []),
    ]


def plain_mlp_specs(c: DecoderConfig, ffn: int, name: str = "layers.*.mlp.") -> list[ParamSpec]:
    """The parameters of an MLP without a gate."""
    up = ParamSpec(f"{name}up.weight", (ffn, c.hidden), 0, init_std=c.init_std, flops_tokens="tokens")
    down = ParamSpec(f"{name}down.weight", (c.hidden, ffn), 1, init_std=c.output_init_std, flops_tokens="tokens")
    if "mlp" not in c.style.biases:
        return [up, down]
    return [up, ParamSpec(f"{name}up.bias", (ffn,), 0), down, ParamSpec(f"{name}down.bias", (c.hidden,))]


def gated_mlp_specs(c: DecoderConfig, ffn: int, name: str = "layers.*.mlp.") -> list[ParamSpec]:
    """The parameters of an MLP with a gate and this intermediate size."""

    def gate_up(kind: str) -> tuple[FusedPart, ...]:
        return tuple(FusedPart(f"{name}{part}.{kind}", ffn, ffn) for part in ("gate", "up"))

    down = ParamSpec(f"{name}down.weight", (c.hidden, ffn), 1, init_std=c.output_init_std, flops_tokens="tokens")
    weights = column_parallel_specs(f"{name}gate_up.weight", gate_up("weight"), (c.hidden,), c.fuse_gate_up, c.init_std)
    if "mlp" not in c.style.biases:
        return [*weights, down]
    biases = column_parallel_specs(f"{name}gate_up.bias", gate_up("bias"), (), c.fuse_gate_up)
    return [*weights, *biases, down, ParamSpec(f"{name}down.bias", (c.hidden,))]


DECODER_HF_KEYS = {
    "vocab": "vocab_size",
    "hidden": "hidden_size",
    "ffn": "intermediate_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "max_positions": "max_position_embeddings",
    "rope_theta": "rope_theta",
    "norm_eps": "rms_norm_eps",
    "tie_embeddings": "tie_word_embeddings",
    "init_std": "initializer_range",
    "bos_token_id": "bos_token_id",
    "eos_token_id": "eos_token_id",
    "pad_token_id": "pad_token_id",
}
COMMON_DEFAULTS: dict[str, object] = {"tie_embeddings": False, "init_std": 0.02}
COMMON_DEFAULTS |= dict.fromkeys(("head_dim", "bos_token_id", "eos_token_id", "pad_token_id"))
"""Defaults of most decoders in transformers."""


def decoder_hf_keys(absent: Collection[str] = (), **defaults: object) -> HfKeys:
    """The keys of a decoder in config.json. `defaults` are those of its class in transformers, which differ between
    families. A size without a default is required; `absent` ones have no key there."""
    defaults = {**COMMON_DEFAULTS, **defaults}
    return {key: (hf_key, defaults.get(key, REQUIRED)) for key, hf_key in DECODER_HF_KEYS.items() if key not in absent}


def decoder_hf_names(c: DecoderConfig, mlp: Mapping[str, HfTensor] | None = None) -> HfNameMap:
    """Names of a decoder; `mlp` replaces those of the MLP."""
    ours, hf, style = "layers.*.", "model.layers.*.", c.style
    attention, of_hf = f"{ours}attention.", f"{hf}self_attn."

    def kinds(biased: str) -> tuple[str, ...]:
        return ("weight", "bias") if biased in style.biases else ("weight",)

    dense_mlp = {
        f"{ours}mlp.{x}.{kind}": HfTensor(f"{hf}mlp.{x}_proj.{kind}")
        for kind in kinds("mlp")
        for x in (("gate", "up", "down") if style.gated else ("up", "down"))
    }
    of_norms = ("weight", "bias") if style.norm == "layer_bias" else ("weight",)
    table = {
        "embedding.weight": HfTensor("model.embed_tokens.weight"),
        **{f"{ours}{x}.{kind}": HfTensor(f"{hf}{name}.{kind}") for x, name in style.norms.items() for kind in of_norms},
        **{f"{attention}{x}.{kind}": HfTensor(f"{of_hf}{x}_proj.{kind}") for kind in kinds("qkv") for x in "qkv"},
        **{f"{attention}{x}_norm.weight": HfTensor(f"{of_hf}{x}_norm.weight") for x in "qk" if style.has_qk_weights},
        **({f"{attention}sinks": HfTensor(f"{of_hf}sinks")} if style.sinks else {}),
        **{f"{attention}output.{kind}": HfTensor(f"{of_hf}o_proj.{kind}") for kind in kinds("output")},
        **(dense_mlp if mlp is None else mlp),
        **{f"norm.{kind}": HfTensor(f"model.norm.{kind}") for kind in of_norms},
    }
    if c.tie_embeddings:
        return HfNameMap(table, {"lm_head.weight": "model.embed_tokens.weight"})
    return HfNameMap({**table, **{f"output.{kind}": HfTensor(f"lm_head.{kind}") for kind in kinds("head")}})


def renamed_hf(names: HfNameMap, changes: Mapping[str, str], qkv: str = "", groups: int = 1) -> HfNameMap:
    """The same tensors under other names, in which `changes` replaces each of its keys, one after the other. `qkv` is
    the name of a matrix of all of q, k and v, by `groups` of heads: the queries of a kv head, its key, its value."""

    def rename(name: str) -> str:
        return reduce(lambda text, change: text.replace(*change), changes.items(), name)

    table = {ours: replace(tensor, name=rename(tensor.name)) for ours, tensor in names.table.items()}
    for ours, tensor in table.items() if qkv else ():
        if re.search(r"\.attention\.[qkv]\.", ours):
            name = re.sub(r"[qkv]_proj", qkv, tensor.name)
            table[ours] = replace(tensor, name=name, groups=groups)
    return HfNameMap(table, {rename(copy): rename(original) for copy, original in names.tied.items()})


@dataclass(frozen=True)
class HfKeyGroup:
    """Keys of config.json that need more than renaming, for families that share them."""

    keys: tuple[str, ...]
    read: Callable[[Mapping[str, Any]], dict[str, Any]]
    """As HfFormat.read."""
    write: Callable[[Any], dict[str, Any]]


def decoder_hf_format(
    model_type: str, architecture: str, keys: HfKeys, groups: Sequence[HfKeyGroup] = (), **options: Any
) -> HfFormat:
    """The format of a decoder; `groups` are its keys besides those of RoPE that need more than renaming, and `options`
    fields of HfFormat that differ."""
    fields: dict[str, Any] = {
        "names": decoder_hf_names,
        "fixed": {"hidden_act": "silu", "attention_dropout": 0.0},
        "ignored": ROPE_HF_KEYS,
        "read": read_rope,
        "write": write_decoder,
        **options,
    }
    read, write = ([fields[name], *(getattr(group, name) for group in groups)] for name in ("read", "write"))
    context_key, context = keys["max_positions"]  # on which RoPE scaling depends
    fields["ignored"] = (*fields["ignored"], *(key for group in groups for key in group.keys))
    fields["fixed"] = {key: value for key, value in fields["fixed"].items() if key not in fields["ignored"]}
    fields["read"] = lambda data: reduce(operator.or_, (each({context_key: context, **data}) for each in read))
    fields["write"] = lambda c: reduce(operator.or_, (each(c) for each in write))
    return HfFormat(model_type, architecture, keys, **fields)


def read_default_head_dim(data: Mapping[str, Any], rotary_factor: float | None = None) -> dict[str, Any]:
    """RoPE, and the head size of families that leave it out unless it is another one than hidden / heads."""
    head_dim = data.get("head_dim")
    is_default = head_dim is None or head_dim * data["num_attention_heads"] == data["hidden_size"]
    return {"head_dim": None if is_default else head_dim, **read_rope(data, rotary_factor)}


def write_decoder(c: DecoderConfig) -> dict[str, Any]:
    return {"num_key_value_heads": c.num_kv_heads, "head_dim": c.head_size, **write_rope(c)}


def read_megatron_decoder(model: MegatronModel) -> dict[str, Any]:
    """The keys of a decoder from the arguments of Megatron-LM."""
    args, scaling = model.args, None
    if args.get("use_rope_scaling"):
        scaling = {"kind": "llama3", "factor": args.get("rope_scaling_factor", 8.0)}
    elif factor := args.get("rotary_seq_len_interpolation_factor"):
        scaling = {"kind": "linear", "factor": factor}
    return {
        "ffn": model.mlp_width // 2,
        "max_positions": args["max_position_embeddings"],
        "kv_heads": args["num_query_groups"] if args.get("group_query_attention") else None,
        "head_dim": args.get("kv_channels"),
        "rope_theta": args.get("rotary_base", 10000.0),
        "rope_scaling": scaling,
    }
