"""Megatron-LM checkpoints in: the AWS reference's, upstream's (both its model classes) and nemo-megatron's.

A checkpoint is a grid of files, tensor-parallel rank by pipeline stage; each numbers its layers from 0. Names, shapes
and a few stored arguments are all that says what the tensors are, so everything is checked before anything is read.
Which rows of a fused matrix belong to which head depends on the checkpoint's version.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Literal

from trainyard import models
from trainyard.checkpoint.formats.megatron.config import SupportedModel, check_model, infer_model
from trainyard.checkpoint.formats.megatron.files import (
    CHECKPOINT_FILES,
    MegatronFiles,
    MegatronRankFile,
    find_megatron,
    open_rank_file,
)
from trainyard.checkpoint.formats.tensor_map import (
    ShardedWeights,
    StoredTensor,
    TensorRange,
    stored_shape,
    unfused_shapes,
)
from trainyard.checkpoint.io.torch_file import LazyTensor
from trainyard.config.model_schema import GptConfig
from trainyard.core.errors import UserError

__all__ = ["MegatronFiles", "MegatronWeights", "find_megatron", "open_megatron"]

LAYER_NAME = re.compile(r"layers\.(\d+)\.(.+)\.(weight|bias)")

SplitKind = Literal["whole", "rows", "columns", "heads"]
TensorMapping = tuple[SplitKind, tuple[str, ...]]
"""The parts in a tensor, and how: whole on every rank; each part's share of the rows, one after the other; a share of
the columns; or for each kv head in turn what belongs to it of every part."""
LAYER_TENSORS: dict[str, TensorMapping] = {
    "input_layernorm": ("whole", ("attention_norm",)),
    "self_attention.query_key_value": ("heads", ("attention.q", "attention.k", "attention.v")),
    "self_attention.query": ("rows", ("attention.q",)),
    "self_attention.key_value": ("heads", ("attention.k", "attention.v")),
    "self_attention.dense": ("columns", ("attention.output",)),
    "post_attention_layernorm": ("whole", ("mlp_norm",)),
    "mlp.dense_h_to_4h": ("rows", ("mlp.up",)),
    "mlp.dense_4h_to_h": ("columns", ("mlp.down",)),
}
GATED_LAYER_TENSORS: dict[str, TensorMapping] = {**LAYER_TENSORS, "mlp.dense_h_to_4h": ("rows", ("mlp.gate", "mlp.up"))}
SEPARATE_GATE_LAYER_TENSORS: dict[str, TensorMapping] = {
    **LAYER_TENSORS,
    "mlp.dense_h_to_4h": ("rows", ("mlp.gate",)),
    "mlp.dense_h_to_4h_2": ("rows", ("mlp.up",)),
}
"""nemo-megatron keeps gate and up apart."""
VOCAB_TENSORS = {
    "word_embeddings.weight": "embedding.weight",
    "word_embeddings_for_head.weight": "embedding.weight",  # the last stage's copy
    "output_layer.weight": "output.weight",
}
NON_LAYER_TENSORS: dict[str, TensorMapping] = {
    "position_embeddings.weight": ("whole", ("position.weight",)),
    "final_layernorm.weight": ("whole", ("norm.weight",)),
    "final_layernorm.bias": ("whole", ("norm.bias",)),
}


class MegatronWeights(ShardedWeights[Path]):
    """Weights of a Megatron checkpoint, and what had to be assumed to read them."""

    notes: tuple[str, ...] = ()


def open_megatron(path: str | Path, model: models.AnyModelConfig | None = None) -> MegatronWeights:
    """The weights at `path`. The model is the one given, or else what the files say of theirs."""
    files = find_megatron(path)
    if files is None:
        raise UserError(f"{path}: no Megatron checkpoint; iter_NNNNNNN/mp_rank_NN/{CHECKPOINT_FILES[0]} was expected")
    opened = {place: open_rank_file(files.grid[place]) for place in sorted(files.grid, key=lambda place: place[::-1])}
    _check_grid(files, opened[0, 0])
    starts, layers = _first_layers(opened)
    notes = list(files.notes)
    model = model or infer_model(opened, files.tp, layers, notes)
    if not isinstance(model, SupportedModel):
        raise UserError(f"{path}: model.family={model.family}: not read from Megatron's files; gpt or llama")
    check_model(model, opened[0, 0], layers)
    parts = unfused_shapes(model)
    held: list[tuple[Path, StoredTensor]] = []
    tensors: dict[tuple[Path, str], LazyTensor] = {}
    for (rank, stage), file in opened.items():
        for number, chunk in enumerate(file.chunks):
            for name, tensor in chunk.items():
                stored = _vocab_tensor(model, file, name, tensor, files.tp, rank)
                if stored is None:
                    place = _find_mapping(model, file, chunk, name, starts[number, stage])
                    if place is None or any(part not in parts for part in place[1]):
                        raise UserError(f"{file.path}: {name} has no place in this model")
                    stored = stored_on_rank(model, parts, place, files.tp, rank)
                if (wanted := stored_shape(stored, parts)) != tensor.shape:
                    raise UserError(f"{file.path}: {name} is {list(tensor.shape)}, the model wants {list(wanted)}")
                key = f"{number}.{name}"
                tensors[file.path, key] = tensor
                held.append((file.path, replace(stored, name=key)))
    weights = MegatronWeights(
        model,
        held,
        lambda file, name, region: tensors[file, name].read(region),
        lambda file, name: tensors[file, name].dtype,
    )
    weights.notes = tuple(notes)
    return weights


def stored_on_rank(
    model: SupportedModel, shapes: Mapping[str, tuple[int, ...]], mapping: TensorMapping, tp: int, rank: int
) -> StoredTensor:
    """What tensor-parallel rank `rank` of `tp` has of the parts in one tensor."""
    lies, names = mapping
    dim = 1 if lies == "columns" and len(shapes[names[0]]) == 2 else 0
    units, own = 1, range(1)
    if lies in ("rows", "heads") or dim == 1:  # not norms, nor biases that are added after the ranks' sum
        units = model.num_kv_heads if lies == "heads" else tp
        if units % tp or any(shapes[name][dim] % units for name in names):
            raise UserError(f"checkpoint does not fit the model: {names[0]} cannot be split over tp={tp} ranks")
        own = range(rank * units // tp, (rank + 1) * units // tp)
    sizes = [(name, shapes[name][dim] // units) for name in names]
    return StoredTensor(
        "", dim, tuple(TensorRange(name, i * size, (i + 1) * size) for i in own for name, size in sizes)
    )


def _find_mapping(
    model: SupportedModel, file: MegatronRankFile, chunk: Mapping[str, LazyTensor], name: str, first_layer: int
) -> TensorMapping | None:
    """Where a tensor of a chunk whose first layer is number `first` belongs, if it is not the vocabulary's."""
    if not (match := LAYER_NAME.fullmatch(name)):
        return NON_LAYER_TENSORS.get(name)
    apart = f"layers.{match[1]}.mlp.dense_h_to_4h_2.weight" in chunk
    table = (
        LAYER_TENSORS if isinstance(model, GptConfig) else SEPARATE_GATE_LAYER_TENSORS if apart else GATED_LAYER_TENSORS
    )
    if match[2] not in table:
        return None
    lies, parts = table[match[2]]
    if lies == "heads" and file.version < 2:
        lies = "rows"
    return lies, tuple(f"layers.{first_layer + int(match[1])}.{part}.{match[3]}" for part in parts)


def _vocab_tensor(
    model: SupportedModel, file: MegatronRankFile, name: str, tensor: LazyTensor, tp: int, rank: int
) -> StoredTensor | None:
    """Rows of the vocabulary, padded to share it evenly; the padding is dropped."""
    part = VOCAB_TENSORS.get(name)
    if (
        part == "output.weight"
        and model.tie_embeddings
        and file.args.get("untie_embeddings_and_output_weights") is False
    ):
        part = "embedding.weight"  # Megatron Core's name for the last stage's copy
    if part is None or (part == "output.weight" and model.tie_embeddings) or not tensor.shape:
        return None
    rows = tensor.shape[0]
    if rows * tp < model.vocab:
        raise UserError(f"{file.path}: {name} has {rows} x tp={tp} rows, the model has vocab={model.vocab}")
    start, stop = (min(end * rows, model.vocab) for end in (rank, rank + 1))
    return StoredTensor("", 0, (TensorRange(part, start, stop),), rows)


def _check_grid(files: MegatronFiles, first_file: MegatronRankFile) -> None:
    tp = first_file.args.get("tensor_model_parallel_size", first_file.args.get("model_parallel_size")) or files.tp
    pp = first_file.args.get("pipeline_model_parallel_size") or files.pp
    if (tp, pp) != (files.tp, files.pp):
        where = first_file.path.parent.parent
        raise UserError(f"{where}: files of tp={files.tp} x pp={files.pp} ranks, but tp={tp} x pp={pp} saved it")


def _first_layers(opened: Mapping[tuple[int, int], MegatronRankFile]) -> tuple[dict[tuple[int, int], int], int]:
    """The number of the first layer of every (virtual stage, stage), and how many layers there are.

    Stages take turns: all stages' first virtual stage, then all their second.
    """
    counts = {
        (number, stage): len({match[1] for name in chunk if (match := LAYER_NAME.fullmatch(name))})
        for (_, stage), file in opened.items()
        for number, chunk in enumerate(file.chunks)
    }
    starts, total = {}, 0
    for place in sorted(counts):
        starts[place] = total
        total += counts[place]
    return starts, total
