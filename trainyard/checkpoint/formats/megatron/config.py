"""Infers the model of a Megatron checkpoint from the arguments and the shapes in its files.

Upstream stores all arguments, the AWS reference a few. Missing values come from the shapes, or are assumed and
reported in a note. Arguments that change the computation in a way that no supported model has are refused.
"""

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from trainyard.checkpoint.formats.megatron.files import MegatronRankFile
from trainyard.core.errors import UserError
from trainyard.core.quantities import counted
from trainyard.families import Family, ModelConfig, all_families
from trainyard.families.family import MegatronFormat, MegatronModel

DEFAULT_ARGS = {"swiglu": False}
"""Values of arguments that the AWS reference does not store."""
FIXED_ARGS: dict[str, object] = {
    "add_qkv_bias": False,
    "num_experts": None,
    "squared_relu": False,
    "apply_layernorm_1p": False,
    "apply_residual_connection_post_layernorm": False,
    "qk_layernorm": False,
    "multi_latent_attention": False,
    "rotary_percent": 1.0,
    "rotary_interleaved": False,
}
"""Arguments and their only supported value, unless a family requires another."""
SIZE_ARGS = {"num_layers": "layers", "hidden_size": "hidden", "num_attention_heads": "heads"}


def check_model(model: ModelConfig, first_file: MegatronRankFile, layers: int) -> None:
    """Refuse a model that contradicts the stored arguments. (Shapes alone do not show the number of heads.)"""
    args = dict(first_file.args)
    keys = {**SIZE_ARGS, **({"num_query_groups": "num_kv_heads"} if args.get("group_query_attention") else {})}
    for key, attribute in keys.items():
        expected = getattr(model, attribute)
        if args.get(key, expected) != expected:
            raise UserError(f"{first_file.path}: {key}={args[key]}, but the model has {attribute}={expected}")
    if layers != model.layers:
        raise UserError(
            f"{first_file.path}: {counted(layers, 'layer')} in all files, but the model has layers={model.layers}"
        )


def infer_model(
    opened: Mapping[tuple[int, int], MegatronRankFile], tp: int, layers: int, notes: list[str]
) -> ModelConfig:
    """The model configuration from the stored arguments and the shapes. Appends assumptions to `notes`."""
    path, args = opened[0, 0].path, opened[0, 0].args
    shapes = {name: tensor.shape for file in opened.values() for chunk in file.chunks for name, tensor in chunk.items()}
    family, megatron = _find_family(args)
    if mismatch := _first_mismatch(args, megatron):
        key, supported = mismatch
        raise UserError(f"{path}: {key}={args.get(key)}: not supported for {family.name}; nearest: {supported}")
    untied = args.get("untie_embeddings_and_output_weights", "output_layer.weight" in shapes)
    try:
        rows, hidden = _matrix_shape(shapes, "word_embeddings.weight")
        width = _matrix_shape(shapes, "layers.0.mlp.dense_h_to_4h.weight")[0] * tp
        if "layers.0.mlp.dense_h_to_4h_2.weight" in shapes:
            width *= 2  # gate and up are separate
        common = {
            "family": family.name,
            "vocab": rows * tp,
            "hidden": hidden,
            "layers": layers,
            "heads": args["num_attention_heads"],
            "tie_embeddings": not untied,
            "norm_eps": args.get("layernorm_epsilon", args.get("norm_epsilon", 1e-5)),
            "init_std": args.get("init_method_std", 0.02),
        }
        notes.append(f"vocab={rows * tp} includes rows of padding, if any; pass the model's configuration to drop them")
        position = "position_embeddings.weight"
        positions = _matrix_shape(shapes, position)[0] if position in shapes else None
        own = megatron.read(MegatronModel(args, width, positions, notes))
        return family.config_class.model_validate(common | own)
    except KeyError as error:
        raise UserError(f"{path}: {error.args[0]} is missing; pass the model's configuration") from None
    except ValidationError as error:
        first = error.errors()[0]
        raise UserError(f"{path}: {'.'.join(map(str, first['loc']))}={first['input']}: {first['msg']}") from None


def _matrix_shape(shapes: Mapping[str, tuple[int, ...]], name: str) -> tuple[int, int]:
    if len(shapes[name]) != 2:
        raise KeyError(f"a matrix {name}")
    return shapes[name][0], shapes[name][1]


def _find_family(args: Mapping[str, Any]) -> tuple[Family, MegatronFormat]:
    """The first family that all arguments fit, else the first one with such an MLP."""
    candidates = [(family, family.megatron) for family in all_families().values() if family.megatron]
    fitting = (entry for entry in candidates if not _first_mismatch(args, entry[1]))
    return next(fitting, None) or next(entry for entry in candidates if entry[1].gated_mlp == bool(args.get("swiglu")))


def _first_mismatch(args: Mapping[str, Any], megatron: MegatronFormat) -> tuple[str, object] | None:
    """An argument that the family does not have, and the value it would have."""
    for key, supported in {**FIXED_ARGS, **megatron.required_args}.items():
        if args.get(key, DEFAULT_ARGS.get(key, supported)) != supported:
            return key, supported
    return None
