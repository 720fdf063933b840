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
from trainyard.checkpoint.formats.megatron.config import Ours, check_model, model_of
from trainyard.checkpoint.formats.megatron.files import FILES, MegatronFiles, Opened, find_megatron, open_file
from trainyard.checkpoint.formats.tensor_map import Piece, Scattered, Stored, shapes_of, stored_shape
from trainyard.checkpoint.io.torch_file import Lazy
from trainyard.config.model_schema import GptModel
from trainyard.core.errors import UserError

__all__ = ["Megatron", "MegatronFiles", "find_megatron", "open_megatron"]

LAYER = re.compile(r"layers\.(\d+)\.(.+)\.(weight|bias)")

Lies = Literal["whole", "rows", "columns", "heads"]
Place = tuple[Lies, tuple[str, ...]]
"""The parts in a tensor, and how: whole on every rank; each part's share of the rows, one after the other; a share of
the columns; or for each kv head in turn what belongs to it of every part."""
BLOCK: dict[str, Place] = {
    "input_layernorm": ("whole", ("attention_norm",)),
    "self_attention.query_key_value": ("heads", ("attention.q", "attention.k", "attention.v")),
    "self_attention.query": ("rows", ("attention.q",)),
    "self_attention.key_value": ("heads", ("attention.k", "attention.v")),
    "self_attention.dense": ("columns", ("attention.output",)),
    "post_attention_layernorm": ("whole", ("mlp_norm",)),
    "mlp.dense_h_to_4h": ("rows", ("mlp.up",)),
    "mlp.dense_4h_to_h": ("columns", ("mlp.down",)),
}
GATED: dict[str, Place] = {**BLOCK, "mlp.dense_h_to_4h": ("rows", ("mlp.gate", "mlp.up"))}
APART: dict[str, Place] = {
    **BLOCK,
    "mlp.dense_h_to_4h": ("rows", ("mlp.gate",)),
    "mlp.dense_h_to_4h_2": ("rows", ("mlp.up",)),
}
"""nemo-megatron keeps gate and up apart."""
VOCAB = {
    "word_embeddings.weight": "embedding.weight",
    "word_embeddings_for_head.weight": "embedding.weight",  # the last stage's copy
    "output_layer.weight": "output.weight",
}
OUTSIDE: dict[str, Place] = {
    "position_embeddings.weight": ("whole", ("position.weight",)),
    "final_layernorm.weight": ("whole", ("norm.weight",)),
    "final_layernorm.bias": ("whole", ("norm.bias",)),
}


class Megatron(Scattered[Path]):
    """Weights of a Megatron checkpoint, and what had to be assumed to read them."""

    notes: tuple[str, ...] = ()


def open_megatron(path: str | Path, model: models.AnyModel | None = None) -> Megatron:
    """The weights at `path`. The model is the one given, or else what the files say of theirs."""
    files = find_megatron(path)
    if files is None:
        raise UserError(f"{path}: no Megatron checkpoint; iter_NNNNNNN/mp_rank_NN/{FILES[0]} was expected")
    opened = {place: open_file(files.grid[place]) for place in sorted(files.grid, key=lambda place: place[::-1])}
    _check_grid(files, opened[0, 0])
    starts, layers = _starts(opened)
    notes = list(files.notes)
    model = model or model_of(opened, files.tp, layers, notes)
    if not isinstance(model, Ours):
        raise UserError(f"{path}: model.family={model.family}: not read from Megatron's files; gpt or llama")
    check_model(model, opened[0, 0], layers)
    parts = shapes_of(model)
    held: list[tuple[Path, Stored]] = []
    tensors: dict[tuple[Path, str], Lazy] = {}
    for (rank, stage), file in opened.items():
        for number, chunk in enumerate(file.chunks):
            for name, tensor in chunk.items():
                stored = _vocab(model, file, name, tensor, files.tp, rank)
                if stored is None:
                    place = _place(model, file, chunk, name, starts[number, stage])
                    if place is None or any(part not in parts for part in place[1]):
                        raise UserError(f"{file.path}: {name} has no place in this model")
                    stored = describe(model, parts, place, files.tp, rank)
                if (wanted := stored_shape(stored, parts)) != tensor.shape:
                    raise UserError(f"{file.path}: {name} is {list(tensor.shape)}, the model wants {list(wanted)}")
                key = f"{number}.{name}"
                tensors[file.path, key] = tensor
                held.append((file.path, replace(stored, name=key)))
    weights = Megatron(
        model,
        held,
        lambda file, name, region: tensors[file, name].read(region),
        lambda file, name: tensors[file, name].dtype,
    )
    weights.notes = tuple(notes)
    return weights


def describe(model: Ours, parts: Mapping[str, tuple[int, ...]], place: Place, tp: int, rank: int) -> Stored:
    """What tensor-parallel rank `rank` of `tp` has of the parts in one tensor."""
    lies, names = place
    dim = 1 if lies == "columns" and len(parts[names[0]]) == 2 else 0
    units, own = 1, range(1)
    if lies in ("rows", "heads") or dim == 1:  # not norms, nor biases that are added after the ranks' sum
        units = model.kv if lies == "heads" else tp
        if units % tp or any(parts[name][dim] % units for name in names):
            raise UserError(f"checkpoint does not fit the model: {names[0]} cannot be split over tp={tp} ranks")
        own = range(rank * units // tp, (rank + 1) * units // tp)
    sizes = [(name, parts[name][dim] // units) for name in names]
    return Stored("", dim, tuple(Piece(name, i * size, (i + 1) * size) for i in own for name, size in sizes))


def _place(model: Ours, file: Opened, chunk: Mapping[str, Lazy], name: str, first: int) -> Place | None:
    """Where a tensor of a chunk whose first layer is number `first` belongs, if it is not the vocabulary's."""
    if not (match := LAYER.fullmatch(name)):
        return OUTSIDE.get(name)
    apart = f"layers.{match[1]}.mlp.dense_h_to_4h_2.weight" in chunk
    table = BLOCK if isinstance(model, GptModel) else APART if apart else GATED
    if match[2] not in table:
        return None
    lies, parts = table[match[2]]
    if lies == "heads" and file.version < 2:
        lies = "rows"
    return lies, tuple(f"layers.{first + int(match[1])}.{part}.{match[3]}" for part in parts)


def _vocab(model: Ours, file: Opened, name: str, tensor: Lazy, tp: int, rank: int) -> Stored | None:
    """Rows of the vocabulary, padded to share it evenly; the padding is dropped."""
    part = VOCAB.get(name)
    if part == "output.weight" and model.tied and file.said.get("untie_embeddings_and_output_weights") is False:
        part = "embedding.weight"  # Megatron Core's name for the last stage's copy
    if part is None or (part == "output.weight" and model.tied) or not tensor.shape:
        return None
    rows = tensor.shape[0]
    if rows * tp < model.vocab:
        raise UserError(f"{file.path}: {name} has {rows} x tp={tp} rows, the model has vocab={model.vocab}")
    start, stop = (min(end * rows, model.vocab) for end in (rank, rank + 1))
    return Stored("", 0, (Piece(part, start, stop),), rows)


def _check_grid(files: MegatronFiles, first: Opened) -> None:
    tp = first.said.get("tensor_model_parallel_size", first.said.get("model_parallel_size")) or files.tp
    pp = first.said.get("pipeline_model_parallel_size") or files.pp
    if (tp, pp) != (files.tp, files.pp):
        where = first.path.parent.parent
        raise UserError(f"{where}: files of tp={files.tp} x pp={files.pp} ranks, but tp={tp} x pp={pp} saved it")


def _starts(opened: Mapping[tuple[int, int], Opened]) -> tuple[dict[tuple[int, int], int], int]:
    """The number of the first layer of every (virtual stage, stage), and how many layers there are.

    Stages take turns: all stages' first virtual stage, then all their second.
    """
    counts = {
        (number, stage): len({match[1] for name in chunk if (match := LAYER.fullmatch(name))})
        for (_, stage), file in opened.items()
        for number, chunk in enumerate(file.chunks)
    }
    starts, total = {}, 0
    for place in sorted(counts):
        starts[place] = total
        total += counts[place]
    return starts, total
