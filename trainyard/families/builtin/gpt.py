"""GPT-2 and GPT-3."""

from collections.abc import Collection
from typing import Any, ClassVar

from pydantic import Field

from trainyard.core.section import PositiveInt
from trainyard.families.biased_block import GELU_TO_HF, Gelu, biased_block_specs, read_gelu
from trainyard.families.blueprint import Blueprint, ParamSpec
from trainyard.families.family import REQUIRED, Family, HfFormat, HfNameMap, HfTensor, MegatronFormat, MegatronModel
from trainyard.families.model_config import ModelConfig, Probability


class GptConfig(ModelConfig):
    """GPT-2 and GPT-3: learned positions, LayerNorm before attention and MLP, GELU, biases everywhere."""

    position_offset: ClassVar[int] = 0
    """The row of the position embedding that the first position has."""
    ffn: PositiveInt | None = None
    """Intermediate size of the MLP. Default: 4 * hidden."""
    activation: Gelu = "gelu_tanh"
    """gelu: exact (erf); gelu_tanh: the tanh approximation that GPT-2 was trained with (gelu_new)."""
    tie_embeddings: bool = True
    """Share one matrix between the input embedding and the output head."""
    embedding_dropout: Probability = 0.0
    """Dropout after the embeddings; 0 to below 1."""
    hidden_dropout: Probability = 0.0
    """Dropout of the attention and MLP outputs before the residual add; 0 to below 1."""
    attention_dropout: Probability = 0.0
    """Dropout of the attention probabilities; 0 to below 1."""
    norm_eps: float = Field(1e-5, gt=0)
    """Epsilon added to the variance in LayerNorm."""


def blueprint(c: GptConfig) -> Blueprint:
    D, V, std, tied = c.hidden, c.vocab, c.init_std, c.tie_embeddings
    head = ParamSpec("output.weight", (V, D), 0, (), "last", std, flops_tokens="tokens", padded=True)
    return Blueprint(
        (
            ParamSpec("embedding.weight", (V, D), 0, (), "both" if tied else "first", std, padded=True),
            ParamSpec(
                "position.weight", (c.max_positions + c.position_offset, D), pipeline_stage="first", init_std=std
            ),
            *biased_block_specs(c),
            ParamSpec("norm.weight", (D,), pipeline_stage="last", init_value=1.0),
            ParamSpec("norm.bias", (D,), pipeline_stage="last"),
            *([] if tied else [head]),
        ),
        c.layers,
        (V, D, "tokens") if tied else None,
    )


def hf_names(c: GptConfig) -> HfNameMap:
    ours, top, hf = "layers.*.", "transformer.", "transformer.h.*."
    table = {"embedding.weight": HfTensor(f"{top}wte.weight"), "position.weight": HfTensor(f"{top}wpe.weight")}
    for kind in ("weight", "bias"):
        transposed = kind == "weight"
        table |= {
            f"{ours}attention_norm.{kind}": HfTensor(f"{hf}ln_1.{kind}"),
            **{f"{ours}attention.{x}.{kind}": HfTensor(f"{hf}attn.c_attn.{kind}", transposed) for x in "qkv"},
            f"{ours}attention.output.{kind}": HfTensor(f"{hf}attn.c_proj.{kind}", transposed),
            f"{ours}mlp_norm.{kind}": HfTensor(f"{hf}ln_2.{kind}"),
            f"{ours}mlp.up.{kind}": HfTensor(f"{hf}mlp.c_fc.{kind}", transposed),
            f"{ours}mlp.down.{kind}": HfTensor(f"{hf}mlp.c_proj.{kind}", transposed),
            f"norm.{kind}": HfTensor(f"{top}ln_f.{kind}"),
        }
    if c.tie_embeddings:
        return HfNameMap(table, {"lm_head.weight": "transformer.wte.weight"})
    return HfNameMap({**table, "output.weight": HfTensor("lm_head.weight")})


def current_name(name: str, names: Collection[str]) -> str:
    """GPT-2's own files have no prefix."""
    return f"transformer.{name}" if "wte.weight" in names and not name.startswith("lm_head.") else name


def read_megatron(model: MegatronModel) -> dict[str, Any]:
    args = model.args
    if model.positions is None:
        raise KeyError("position_embeddings.weight")
    if "bias_gelu_fusion" not in args:
        model.notes.append("assuming activation=gelu: the file does not store it, and the AWS scripts use no other")
    dropout = args.get("hidden_dropout", 0.0)
    return {
        "ffn": model.mlp_width,
        "max_positions": model.positions,
        # Megatron's fused kernel computes the tanh approximation.
        "activation": "gelu_tanh" if args.get("openai_gelu") or args.get("bias_gelu_fusion") else "gelu",
        "embedding_dropout": dropout,
        "hidden_dropout": dropout,
        "attention_dropout": args.get("attention_dropout", 0.0),
    }


FAMILY = Family(
    name="gpt",
    config_class=GptConfig,
    module="trainyard.models.gpt:Gpt",
    blueprint=blueprint,
    hf=HfFormat(
        "gpt2",
        "GPT2LMHeadModel",
        {
            "vocab": ("vocab_size", REQUIRED),
            "hidden": ("n_embd", REQUIRED),
            "layers": ("n_layer", REQUIRED),
            "heads": ("n_head", REQUIRED),
            "ffn": ("n_inner", None),
            "max_positions": ("n_positions", 1024),
            "embedding_dropout": ("embd_pdrop", 0.1),
            "hidden_dropout": ("resid_pdrop", 0.1),
            "attention_dropout": ("attn_pdrop", 0.1),
            "norm_eps": ("layer_norm_epsilon", 1e-5),
            "tie_embeddings": ("tie_word_embeddings", True),
            "init_std": ("initializer_range", 0.02),
            "bos_token_id": ("bos_token_id", 50256),
            "eos_token_id": ("eos_token_id", 50256),
            "pad_token_id": ("pad_token_id", None),
        },
        hf_names,
        {"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False},
        ignored=(
            *("activation_function", "n_ctx", "reorder_and_upcast_attn", "summary_activation", "summary_first_dropout"),
            *("summary_proj_to_labels", "summary_type", "summary_use_proj"),
        ),
        read=lambda data: read_gelu(data, "activation_function", "gelu_new"),
        write=lambda c: {"activation_function": GELU_TO_HF[c.activation]},
        current_name=current_name,
    ),
    score_passes=4,  # a fused softmax stores one result, which attention and its backward pass read
    megatron=MegatronFormat(
        {
            "swiglu": False,
            "normalization": "LayerNorm",
            "position_embedding_type": "learned_absolute",
            "add_bias_linear": True,
        },
        read_megatron,
        gated_mlp=False,
    ),
)
