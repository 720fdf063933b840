"""The model that a Megatron checkpoint holds, from the arguments and the shapes in its files.

Upstream stores all arguments, the AWS reference a few. What a file does not say is taken from the shapes, or assumed
and said in a note. Arguments that would change the numbers and that our models do not have are refused.
"""

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from trainyard.checkpoint.formats.megatron.files import Opened
from trainyard.config.model_schema import GptModel, LinearRope, Llama3Rope, LlamaModel
from trainyard.core.errors import UserError

Ours = GptModel | LlamaModel
NEEDED: dict[str, dict[str, object]] = {
    "gpt": {"normalization": "LayerNorm", "position_embedding_type": "learned_absolute", "add_bias_linear": True},
    "llama": {"normalization": "RMSNorm", "position_embedding_type": "rope", "add_bias_linear": False},
}
REFUSED = {
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
SIZES = {"num_layers": "layers", "hidden_size": "hidden", "num_attention_heads": "heads"}


def check_model(model: Ours, first: Opened, layers: int) -> None:
    """Shapes alone do not tell how many heads there are."""
    said = dict(first.said)
    keys = {**SIZES, **({"num_query_groups": "kv"} if said.get("group_query_attention") else {})}
    for key, ours in keys.items():
        if said.get(key, getattr(model, ours)) != getattr(model, ours):
            raise UserError(f"{first.path}: {key}={said[key]}, but the model has {ours}={getattr(model, ours)}")
    if layers != model.layers:
        raise UserError(f"{first.path}: {layers} layers in all files, but the model has layers={model.layers}")


def model_of(opened: Mapping[tuple[int, int], Opened], tp: int, layers: int, notes: list[str]) -> Ours:
    """The model's configuration, from the stored arguments and the shapes."""
    path, said = opened[0, 0].path, opened[0, 0].said
    shapes = {name: tensor.shape for file in opened.values() for chunk in file.chunks for name, tensor in chunk.items()}
    family = "llama" if said.get("swiglu") else "gpt"
    for key, only in {**REFUSED, **NEEDED[family]}.items():
        if said.get(key, only) != only:
            raise UserError(f"{path}: {key}={said[key]}: not supported for {family}; nearest: {only}")
    untied = said.get("untie_embeddings_and_output_weights", "output_layer.weight" in shapes)
    try:
        rows, hidden = _matrix(shapes, "word_embeddings.weight")
        width = _matrix(shapes, "layers.0.mlp.dense_h_to_4h.weight")[0] * tp
        common = {
            "family": family,
            "vocab": rows * tp,
            "hidden": hidden,
            "layers": layers,
            "heads": said["num_attention_heads"],
            "tied": not untied,
            "norm_eps": said.get("layernorm_epsilon", said.get("norm_epsilon", 1e-5)),
            "init_std": said.get("init_method_std", 0.02),
        }
        notes.append(f"vocab={rows * tp} counts rows of padding, if there are any; a configuration would say")
        if family == "llama":
            return LlamaModel.model_validate(common | _llama(said, width))
        return GptModel.model_validate(
            common | _gpt(said, width, _matrix(shapes, "position_embeddings.weight")[0], notes)
        )
    except KeyError as error:
        raise UserError(f"{path}: {error.args[0]} is not in it; give the model's configuration") from None
    except ValidationError as error:
        first = error.errors()[0]
        raise UserError(f"{path}: {'.'.join(map(str, first['loc']))}={first['input']}: {first['msg']}") from None


def _matrix(shapes: Mapping[str, tuple[int, ...]], name: str) -> tuple[int, int]:
    if len(shapes[name]) != 2:
        raise KeyError(f"a matrix {name}")
    return shapes[name][0], shapes[name][1]


def _gpt(said: Mapping[str, Any], width: int, positions: int, notes: list[str]) -> dict[str, Any]:
    if "bias_gelu_fusion" not in said:
        notes.append("activation=gelu is assumed: the file does not say it, and the AWS scripts use no other")
    dropout = said.get("hidden_dropout", 0.0)
    return {
        "ffn": width,
        "max_positions": positions,
        # Megatron's fused kernel is the tanh approximation.
        "activation": "gelu_tanh" if said.get("openai_gelu") or said.get("bias_gelu_fusion") else "gelu",
        "embedding_dropout": dropout,
        "hidden_dropout": dropout,
        "attention_dropout": said.get("attention_dropout", 0.0),
    }


def _llama(said: Mapping[str, Any], width: int) -> dict[str, Any]:
    scaling: LinearRope | Llama3Rope | None = None
    if said.get("use_rope_scaling"):
        scaling = Llama3Rope(factor=said.get("rope_scaling_factor", 8.0))
    elif factor := said.get("rotary_seq_len_interpolation_factor"):
        scaling = LinearRope(factor=factor)
    return {
        "ffn": width // 2,
        "max_positions": said["max_position_embeddings"],
        "kv_heads": said["num_query_groups"] if said.get("group_query_attention") else None,
        "head_dim": said.get("kv_channels"),
        "rope_theta": said.get("rotary_base", 10000.0),
        "rope_scaling": scaling,
    }
