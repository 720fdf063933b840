"""The model that a Megatron checkpoint holds, from the arguments and the shapes in its files.

Upstream stores all arguments, the AWS reference a few. What a file does not say is taken from the shapes, or assumed
and said in a note. Arguments that would change the numbers and that our models do not have are refused.
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
"""Arguments with the only value that our models have."""
SIZE_ARGS = {"num_layers": "layers", "hidden_size": "hidden", "num_attention_heads": "heads"}


def check_model(model: SupportedModel, first_file: MegatronRankFile, layers: int) -> None:
    """Shapes alone do not tell how many heads there are."""
    said = dict(first_file.args)
    keys = {**SIZE_ARGS, **({"num_query_groups": "num_kv_heads"} if said.get("group_query_attention") else {})}
    for key, ours in keys.items():
        if said.get(key, getattr(model, ours)) != getattr(model, ours):
            raise UserError(f"{first_file.path}: {key}={said[key]}, but the model has {ours}={getattr(model, ours)}")
    if layers != model.layers:
        raise UserError(f"{first_file.path}: {layers} layers in all files, but the model has layers={model.layers}")


def infer_model(
    opened: Mapping[tuple[int, int], MegatronRankFile], tp: int, layers: int, notes: list[str]
) -> SupportedModel:
    """The model's configuration, from the stored arguments and the shapes."""
    path, said = opened[0, 0].path, opened[0, 0].args
    shapes = {name: tensor.shape for file in opened.values() for chunk in file.chunks for name, tensor in chunk.items()}
    family = "llama" if said.get("swiglu") else "gpt"
    for key, only in {**FIXED_ARGS, **REQUIRED_ARGS[family]}.items():
        if said.get(key, only) != only:
            raise UserError(f"{path}: {key}={said[key]}: not supported for {family}; nearest: {only}")
    untied = said.get("untie_embeddings_and_output_weights", "output_layer.weight" in shapes)
    try:
        rows, hidden = _matrix_shape(shapes, "word_embeddings.weight")
        width = _matrix_shape(shapes, "layers.0.mlp.dense_h_to_4h.weight")[0] * tp
        common = {
            "family": family,
            "vocab": rows * tp,
            "hidden": hidden,
            "layers": layers,
            "heads": said["num_attention_heads"],
            "tie_embeddings": not untied,
            "norm_eps": said.get("layernorm_epsilon", said.get("norm_epsilon", 1e-5)),
            "init_std": said.get("init_method_std", 0.02),
        }
        notes.append(f"vocab={rows * tp} counts rows of padding, if there are any; a configuration would say")
        if family == "llama":
            return LlamaConfig.model_validate(common | _llama_fields(said, width))
        return GptConfig.model_validate(
            common | _gpt_fields(said, width, _matrix_shape(shapes, "position_embeddings.weight")[0], notes)
        )
    except KeyError as error:
        raise UserError(f"{path}: {error.args[0]} is not in it; give the model's configuration") from None
    except ValidationError as error:
        first = error.errors()[0]
        raise UserError(f"{path}: {'.'.join(map(str, first['loc']))}={first['input']}: {first['msg']}") from None


def _matrix_shape(shapes: Mapping[str, tuple[int, ...]], name: str) -> tuple[int, int]:
    if len(shapes[name]) != 2:
        raise KeyError(f"a matrix {name}")
    return shapes[name][0], shapes[name][1]


def _gpt_fields(args: Mapping[str, Any], width: int, positions: int, notes: list[str]) -> dict[str, Any]:
    if "bias_gelu_fusion" not in args:
        notes.append("activation=gelu is assumed: the file does not say it, and the AWS scripts use no other")
    dropout = args.get("hidden_dropout", 0.0)
    return {
        "ffn": width,
        "max_positions": positions,
        # Megatron's fused kernel is the tanh approximation.
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
