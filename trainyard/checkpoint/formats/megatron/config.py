"""Infers the model of a Megatron checkpoint from the arguments and the shapes in its files.

Upstream stores all arguments, the AWS reference a few. Missing values come from the shapes, or are assumed and
reported in a note. Arguments that change the computation in a way that no supported model has are refused.
"""

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from trainyard.checkpoint.formats.megatron.files import MegatronRankFile
from trainyard.config.model_schema import GptConfig, LinearRopeScaling, Llama3RopeScaling, LlamaConfig
from trainyard.core.errors import UserError

SupportedModel = GptConfig | LlamaConfig
REQUIRED_ARGS: dict[str, dict[str, object]] = {
    "gpt": {"normalization": "LayerNorm", "position_embedding_type": "learned_absolute", "add_bias_linear": True},
    "llama": {"normalization": "RMSNorm", "position_embedding_type": "rope", "add_bias_linear": False},
}
FIXED_ARGS = {
    "num_experts": None,
    "squared_relu": False,
    "apply_layernorm_1p": False,
    "apply_residual_connection_post_layernorm": False,
    "qk_layernorm": False,
    "multi_latent_attention": False,
    "rotary_percent": 1.0,
    "rotary_interleaved": False,
}
"""Arguments and their only supported value."""
SIZE_ARGS = {"num_layers": "layers", "hidden_size": "hidden", "num_attention_heads": "heads"}


def check_model(model: SupportedModel, first_file: MegatronRankFile, layers: int) -> None:
    """Refuse a model that contradicts the stored arguments. (Shapes alone do not show the number of heads.)"""
    args = dict(first_file.args)
    keys = {**SIZE_ARGS, **({"num_query_groups": "num_kv_heads"} if args.get("group_query_attention") else {})}
    for key, attribute in keys.items():
        expected = getattr(model, attribute)
        if args.get(key, expected) != expected:
            raise UserError(f"{first_file.path}: {key}={args[key]}, but the model has {attribute}={expected}")
    if layers != model.layers:
        raise UserError(f"{first_file.path}: {layers} layers in all files, but the model has layers={model.layers}")


def infer_model(
    opened: Mapping[tuple[int, int], MegatronRankFile], tp: int, layers: int, notes: list[str]
) -> SupportedModel:
    """The model configuration from the stored arguments and the shapes. Appends assumptions to `notes`."""
    path, args = opened[0, 0].path, opened[0, 0].args
    shapes = {name: tensor.shape for file in opened.values() for chunk in file.chunks for name, tensor in chunk.items()}
    family = "llama" if args.get("swiglu") else "gpt"
    for key, supported in {**FIXED_ARGS, **REQUIRED_ARGS[family]}.items():
        if args.get(key, supported) != supported:
            raise UserError(f"{path}: {key}={args[key]}: not supported for {family}; nearest: {supported}")
    untied = args.get("untie_embeddings_and_output_weights", "output_layer.weight" in shapes)
    try:
        rows, hidden = _matrix_shape(shapes, "word_embeddings.weight")
        width = _matrix_shape(shapes, "layers.0.mlp.dense_h_to_4h.weight")[0] * tp
        if "layers.0.mlp.dense_h_to_4h_2.weight" in shapes:
            width *= 2  # gate and up are separate
        common = {
            "family": family,
            "vocab": rows * tp,
            "hidden": hidden,
            "layers": layers,
            "heads": args["num_attention_heads"],
            "tie_embeddings": not untied,
            "norm_eps": args.get("layernorm_epsilon", args.get("norm_epsilon", 1e-5)),
            "init_std": args.get("init_method_std", 0.02),
        }
        notes.append(f"vocab={rows * tp} includes rows of padding, if any; pass the model's configuration to drop them")
        if family == "llama":
            return LlamaConfig.model_validate(common | _llama_fields(args, width))
        return GptConfig.model_validate(
            common | _gpt_fields(args, width, _matrix_shape(shapes, "position_embeddings.weight")[0], notes)
        )
    except KeyError as error:
        raise UserError(f"{path}: {error.args[0]} is missing; pass the model's configuration") from None
    except ValidationError as error:
        first = error.errors()[0]
        raise UserError(f"{path}: {'.'.join(map(str, first['loc']))}={first['input']}: {first['msg']}") from None


def _matrix_shape(shapes: Mapping[str, tuple[int, ...]], name: str) -> tuple[int, int]:
    if len(shapes[name]) != 2:
        raise KeyError(f"a matrix {name}")
    return shapes[name][0], shapes[name][1]


def _gpt_fields(args: Mapping[str, Any], width: int, positions: int, notes: list[str]) -> dict[str, Any]:
    if "bias_gelu_fusion" not in args:
        notes.append("assuming activation=gelu: the file does not store it, and the AWS scripts use no other")
    dropout = args.get("hidden_dropout", 0.0)
    return {
        "ffn": width,
        "max_positions": positions,
        # Megatron's fused kernel computes the tanh approximation.
        "activation": "gelu_tanh" if args.get("openai_gelu") or args.get("bias_gelu_fusion") else "gelu",
        "embedding_dropout": dropout,
        "hidden_dropout": dropout,
        "attention_dropout": args.get("attention_dropout", 0.0),
    }


def _llama_fields(args: Mapping[str, Any], width: int) -> dict[str, Any]:
    scaling: LinearRopeScaling | Llama3RopeScaling | None = None
    if args.get("use_rope_scaling"):
        scaling = Llama3RopeScaling(factor=args.get("rope_scaling_factor", 8.0))
    elif factor := args.get("rotary_seq_len_interpolation_factor"):
        scaling = LinearRopeScaling(factor=factor)
    return {
        "ffn": width // 2,
        "max_positions": args["max_position_embeddings"],
        "kv_heads": args["num_query_groups"] if args.get("group_query_attention") else None,
        "head_dim": args.get("kv_channels"),
        "rope_theta": args.get("rotary_base", 10000.0),
        "rope_scaling": scaling,
    }
