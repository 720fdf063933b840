"""Reads Megatron-LM checkpoints: of the AWS reference, of upstream (both model classes) and of nemo-megatron.

A checkpoint is a grid of files, tensor-parallel rank by pipeline stage; each file numbers its layers from 0. Only
names, shapes and a few stored arguments show what the tensors are, so everything is checked before anything is read.
The order of heads in a fused matrix depends on the checkpoint version.

The model follows from the arguments and the shapes. Upstream stores all arguments, the AWS reference a few. Missing
values come from the shapes, or are assumed and reported in a note. Arguments that change the computation in a way that
no supported model has are refused.
"""

import re
from collections.abc import Mapping
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from trainyard import models
from trainyard.checkpoint.weights import unfused_tensors
from trainyard.core.errors import UserError
from trainyard.core.quantities import counted
from trainyard.families import Family, ModelConfig, all_families
from trainyard.families.family import MegatronFormat, MegatronModel
from trainyard.formats.format import CheckpointFormat
from trainyard.formats.io.lazy_tensor import LazyTensor
from trainyard.formats.megatron.rank_files import (
    CHECKPOINT_FILES,
    MegatronFiles,
    MegatronRankFile,
    find_megatron,
    open_rank_file,
)
from trainyard.formats.tensor_map import ShardedWeights, StoredTensor, padded_shard

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
LAYER_NAME = re.compile(r"layers\.(\d+)\.(.+)\.(weight|bias)")
SplitKind = Literal["replicated", "rows", "columns", "heads", "vocab"]
TensorMapping = tuple[SplitKind, tuple[str, ...]]
"""The unfused tensors in a stored tensor, and how it is split: replicated on every rank; a shard of the rows of each
tensor, concatenated; a shard of the columns; for each kv head in turn, its rows of every tensor; or a shard of the
vocabulary, which Megatron pads to equal shards."""
LAYER_TENSORS: dict[str, TensorMapping] = {
    "input_layernorm": ("replicated", ("attention_norm",)),
    "self_attention.query_key_value": ("heads", ("attention.q", "attention.k", "attention.v")),
    "self_attention.query": ("rows", ("attention.q",)),
    "self_attention.key_value": ("heads", ("attention.k", "attention.v")),
    "self_attention.dense": ("columns", ("attention.output",)),
    "post_attention_layernorm": ("replicated", ("mlp_norm",)),
    "mlp.dense_h_to_4h": ("rows", ("mlp.up",)),
    "mlp.dense_4h_to_h": ("columns", ("mlp.down",)),
}
GATED_MLP_TENSORS: dict[str, TensorMapping] = {"mlp.dense_h_to_4h": ("rows", ("mlp.gate", "mlp.up"))}
SEPARATE_GATE_TENSORS: dict[str, TensorMapping] = {
    "mlp.dense_h_to_4h": ("rows", ("mlp.gate",)),
    "mlp.dense_h_to_4h_2": ("rows", ("mlp.up",)),
}
"""nemo-megatron stores gate and up separately."""
NON_LAYER_TENSORS: dict[str, TensorMapping] = {
    "word_embeddings.weight": ("vocab", ("embedding.weight",)),
    "word_embeddings_for_head.weight": ("vocab", ("embedding.weight",)),  # the last stage's copy
    "output_layer.weight": ("vocab", ("output.weight",)),
    "position_embeddings.weight": ("replicated", ("position.weight",)),
    "final_layernorm.weight": ("replicated", ("norm.weight",)),
    "final_layernorm.bias": ("replicated", ("norm.bias",)),
}


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


def open_megatron(path: str | Path, model: models.ModelConfig | None = None) -> ShardedWeights:
    """Open the weights at `path`. The model is `model` if given, else inferred from the files."""
    files = find_megatron(path)
    if files is None:
        raise UserError(f"{path}: no Megatron checkpoint; expected iter_NNNNNNN/mp_rank_NN/{CHECKPOINT_FILES[0]}")
    ranks = sorted(files.grid, key=lambda rank: rank[::-1])
    opened = {rank: open_rank_file(files.grid[rank]) for rank in ranks}
    _check_grid(files, opened[0, 0])
    first_layers, layers = _first_layers(opened)
    notes = list(files.notes)
    model = model or infer_model(opened, files.tp, layers, notes)
    if models.family_of(model).megatron is None:
        names = [name for name, family in all_families().items() if family.megatron]
        raise UserError(
            f"{path}: model.family={model.family}: not supported in Megatron files; use {' or '.join(names)}"
        )
    check_model(model, opened[0, 0], layers)
    pairs: list[tuple[StoredTensor, LazyTensor]] = []
    for (tp_rank, stage), file in opened.items():
        for virtual_stage, chunk in enumerate(file.chunks):
            for name, tensor in chunk.items():
                mapping = _find_mapping(model, file, chunk, name, first_layers[virtual_stage, stage])
                if mapping is None or any(unfused not in unfused_tensors(model) for unfused in mapping[1]):
                    raise UserError(f"{file.path}: {name} is not a tensor of this model")
                rows = tensor.shape[0] if tensor.shape else 0
                if mapping[0] == "vocab" and rows * files.tp < model.vocab:
                    problem = f"has {rows} x tp={files.tp} rows, the model has vocab={model.vocab}"
                    raise UserError(f"{file.path}: {name} {problem}")
                stored = _stored_on_rank(model, name, mapping, files.tp, tp_rank, rows)
                if stored.shape != tensor.shape:
                    expected = f"the model expects {list(stored.shape)}"
                    raise UserError(f"{file.path}: {name} is {list(tensor.shape)}, {expected}")
                pairs.append((stored, tensor))
    weights = ShardedWeights(model, pairs)
    weights.notes = tuple(notes)
    return weights


def _stored_on_rank(
    model: models.ModelConfig, name: str, mapping: TensorMapping, tp: int, rank: int, rows: int
) -> StoredTensor:
    """What tensor-parallel rank `rank` of `tp` stores of these unfused tensors, in a tensor of `rows` rows."""
    split, names = mapping
    tensors = [unfused_tensors(model)[unfused] for unfused in names]
    if split == "vocab":
        return padded_shard(name, tensors[0], rows, rank)
    dim = 1 if split == "columns" and len(tensors[0].sizes) == 2 else 0
    units, on_rank = 1, range(1)
    if split in ("rows", "heads") or dim == 1:  # not norms, nor biases that are added after the all-reduce
        units = model.num_kv_heads if split == "heads" else tp
        if units % tp or any(tensor.sizes[dim] % units for tensor in tensors):
            raise UserError(f"checkpoint does not fit the model: {names[0]} cannot be split over tp={tp} ranks")
        on_rank = range(rank * units // tp, (rank + 1) * units // tp)
    sizes = [(tensor, tensor.sizes[dim] // units) for tensor in tensors]
    slices = tuple(tensor.narrow(dim, i * size, (i + 1) * size) for i in on_rank for tensor, size in sizes)
    return StoredTensor(name, dim, slices)


def _find_mapping(
    model: models.ModelConfig, file: MegatronRankFile, chunk: Mapping[str, LazyTensor], name: str, first_layer: int
) -> TensorMapping | None:
    """The mapping of a tensor in a chunk whose first layer is `first_layer`."""
    if not (match := LAYER_NAME.fullmatch(name)):
        is_tied = models.blueprint_of(model).tied_head and file.args.get("untie_embeddings_and_output_weights") is False
        if name == "output_layer.weight" and is_tied:  # Megatron Core's name for the last stage's copy
            name = "word_embeddings.weight"
        return NON_LAYER_TENSORS.get(name)
    table = LAYER_TENSORS
    megatron = models.family_of(model).megatron
    if megatron and megatron.gated_mlp:
        separate_gate = f"layers.{match[1]}.mlp.dense_h_to_4h_2.weight" in chunk
        table = LAYER_TENSORS | (SEPARATE_GATE_TENSORS if separate_gate else GATED_MLP_TENSORS)
    if match[2] not in table:
        return None
    split, unfused_names = table[match[2]]
    if split == "heads" and file.version < 2:
        split = "rows"
    return split, tuple(f"layers.{first_layer + int(match[1])}.{unfused}.{match[3]}" for unfused in unfused_names)


def _check_grid(files: MegatronFiles, first_file: MegatronRankFile) -> None:
    tp = first_file.args.get("tensor_model_parallel_size", first_file.args.get("model_parallel_size")) or files.tp
    pp = first_file.args.get("pipeline_model_parallel_size") or files.pp
    if (tp, pp) != (files.tp, files.pp):
        directory = first_file.path.parent.parent
        raise UserError(
            f"{directory}: has files of tp={files.tp} x pp={files.pp} ranks, but was saved by tp={tp} x pp={pp}"
        )


def _first_layers(opened: Mapping[tuple[int, int], MegatronRankFile]) -> tuple[dict[tuple[int, int], int], int]:
    """The first layer of every (virtual stage, stage), and the number of layers of the model.

    Stages alternate: the first virtual stage of all stages, then the second of all, and so on.
    """
    counts = {
        (virtual_stage, stage): len({match[1] for name in chunk if (match := LAYER_NAME.fullmatch(name))})
        for (_, stage), file in opened.items()
        for virtual_stage, chunk in enumerate(file.chunks)
    }
    chunks = sorted(counts)
    ends = list(accumulate(counts[chunk] for chunk in chunks))
    return dict(zip(chunks, (0, *ends), strict=False)), ends[-1]


FORMAT = CheckpointFormat(
    "megatron", "a Megatron-LM checkpoint", find_megatron, lambda path, model, hints: open_megatron(path, model)
)
