"""Infers the NxdLayout of a checkpoint. NxD does not store it, but tensor names and shapes determine all that matters.

The number of rows of key and value matrices shows how often heads are replicated, the names show which layers a
pipeline rank has (so any pipeline cuts can be read), and the equality of bits across ranks shows the order of the
replicas. The user's hints decide what the files leave open, and must agree with the files otherwise.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import groupby
from typing import Any

from trainyard.checkpoint.formats.nxd.layout import (
    FLAG_NAMES,
    KvOrder,
    NxdLayout,
    PpTpRank,
    check_layout,
    kv_slots,
    padded_vocab,
    valid_kv_multipliers,
)
from trainyard.checkpoint.formats.nxd.names import NAME_TABLES, NameStyle, NameTable
from trainyard.config.model_schema import LlamaConfig
from trainyard.core.errors import UserError

RankShapes = Mapping[PpTpRank, Mapping[str, tuple[int, ...]]]
"""Shapes of the tensors in each rank's file."""
LayoutHints = Mapping[str, Any]
"""Fields of NxdLayout that the user specified."""
CopiesAgree = Callable[[NxdLayout, int], bool]
"""Returns True if, at this layout, all replicas of the key and value heads of this layer are equal."""

VOCAB_PADDING_PER_RANK = 128
"""Megatron pads the vocabulary to a multiple of 128 rows per rank. With more padding, it is another vocabulary."""


def infer_layout(path: str, model: LlamaConfig, shapes: RankShapes, hints: LayoutHints) -> NxdLayout:
    """Infer everything except the order of replicated heads."""
    tp, pp = max(tp for _, tp in shapes) + 1, max(pp for pp, _ in shapes) + 1
    style = _infer_style(path, shapes)
    names = NAME_TABLES[style]
    cuts = _infer_cuts(path, model, shapes, names, pp)
    layer = _first_layer_shapes(shapes[0, 0], names)
    layout = NxdLayout(
        tp,
        pp,
        (len(cuts) + 1) // pp,
        cuts,
        qkv=_match_variant(path, layer, names.qkv),
        gate_up=_match_variant(path, layer, names.gate_up),
        style=style,
        by_head=hints.get("by_head", True),
    )
    layout = replace(
        layout,
        kv_multiplier=_infer_kv_multiplier(path, model, layout, layer),
        vocab=_infer_vocab(path, model, layout, shapes[0, 0]),
    )
    _check_hints(path, layout, hints)
    check_layout(model, layout)
    return layout


def infer_kv_order(
    path: str, model: LlamaConfig, layout: NxdLayout, hints: LayoutHints, copies_agree: CopiesAgree
) -> NxdLayout:
    """Return the layout with the order of replicated heads, found by comparing replicas layer by layer."""
    orders: tuple[KvOrder, ...] = ("trn1", "trn2")
    candidates = {order: replace(layout, kv_order=order) for order in orders}
    candidates = {
        order: candidate
        for order, candidate in candidates.items()
        if candidate.kv_multiplier in valid_kv_multipliers(model, candidate)
    }
    hint: KvOrder | None = hints.get("kv_order")
    heads = [[kv_slots(model, candidate, rank) for rank in range(layout.tp)] for candidate in candidates.values()]
    if len(heads) == 2 and heads[0] == heads[1]:
        return candidates[hint or "trn1"]
    for layer in range(model.layers if len(candidates) > 1 else 0):
        fitting = [order for order, candidate in candidates.items() if copies_agree(candidate, layer)]
        if len(fitting) == 1:
            candidates = {fitting[0]: candidates[fitting[0]]}
        if len(fitting) < 2:
            break
    if len(candidates) == 1:
        (order,) = candidates
        if hint not in (None, order):
            # NxD's reference converter for trn2 replicates keys in trn1's order but does not permute the queries.
            raise UserError(
                f"{path}: hw_backend={hint} was given, but its kv heads are in {order} order; omit it, or convert "
                "again from the source if the checkpoint came from NxD's reference converter"
            )
        return candidates[order]
    if hint is None:
        raise UserError(f"{path}: its kv heads do not show whether the order is trn1 or trn2; pass --hw_backend")
    return candidates[hint]


def _infer_style(path: str, shapes: RankShapes) -> NameStyle:
    for style, names in NAME_TABLES.items():
        if any(name.startswith(names.layer_prefix) for name in shapes[0, 0]):
            return style
    first = next(iter(shapes[0, 0]), "nothing")
    raise UserError(
        f"{path}: holds {first}, not an NxD Llama model (expected names such as {NAME_TABLES['hf'].layer_prefix}0...)"
    )


def _first_layer_shapes(shapes: Mapping[str, tuple[int, ...]], names: NameTable) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors of the first layer in a file, by the part of the name after the layer number."""
    out: dict[str, tuple[int, ...]] = {}
    for name, shape in shapes.items():
        if match := re.fullmatch(re.escape(names.layer_prefix) + r"\d+\.(.+)", name):
            out.setdefault(match.group(1), shape)
    return out


def _match_variant(
    path: str, layer: Mapping[str, tuple[int, ...]], variants: Mapping[Any, tuple[tuple[str, Any], ...]]
) -> Any:
    """The key of the first variant whose tensors are all in the layer."""
    for variant, tensors in variants.items():
        if all(name in layer for name, _ in tensors):
            return variant
    expected = " or ".join(tensors[0][0] for tensors in variants.values())
    raise UserError(f"{path}: its layers have no {expected}; not an NxD Llama model, or an incomplete one")


def _infer_cuts(path: str, model: LlamaConfig, shapes: RankShapes, names: NameTable, pp: int) -> tuple[int, ...]:
    owner: dict[int, int] = {}
    layer_name = re.compile(re.escape(names.layer_prefix) + r"(\d+)\.")
    for (rank, _), tensors in sorted(shapes.items()):
        for match in filter(None, map(layer_name.match, tensors)):
            layer = int(match.group(1))
            if owner.setdefault(layer, rank) != rank:
                raise UserError(
                    f"{path}: layer {layer} is on pipeline ranks {owner[layer]} and {rank}; expected on one only"
                )
    if sorted(owner) != list(range(model.layers)):
        missing = sorted(set(range(model.layers)) - set(owner))
        problem = f"layer {missing[0]} is missing" if missing else f"it has a layer {max(owner)}"
        raise UserError(
            f"{path}: does not fit the model: {problem}; the model has {model.layers} layers, "
            f"the checkpoint {len(owner)}"
        )
    stages = [(rank, list(layers)[-1]) for rank, layers in groupby(range(model.layers), key=lambda layer: owner[layer])]
    if len(stages) % pp or any(rank != stage % pp for stage, (rank, _) in enumerate(stages)):
        order = ", ".join(str(rank) for rank, _ in stages)
        raise UserError(
            f"{path}: its layers are on pipeline ranks {order}, in this order; expected 0 to {pp - 1} in turn"
        )
    return tuple(last_layer for _, last_layer in stages[:-1])


def _infer_kv_multiplier(path: str, model: LlamaConfig, layout: NxdLayout, layer: Mapping[str, tuple[int, ...]]) -> int:
    """Infer the multiplier from the number of rows of the tensor that holds the keys."""
    tensors = NAME_TABLES[layout.style].qkv[layout.qkv]
    name, letters = next((name, letters) for name, letters in tensors if "k" in letters)
    rows = _num_rows(layer[name])
    kv_rows = rows * layout.tp - (model.heads * model.head_size if "q" in letters else 0)
    multiplier, rest = divmod(kv_rows, len(letters.replace("q", "")) * model.num_kv_heads * model.head_size)
    if rest or multiplier not in valid_kv_multipliers(model, layout):  # trn1, the default, allows all that trn2 allows
        raise UserError(
            f"{path}: does not fit the model: {name} has {rows} rows on each of {layout.tp} ranks; that fits no "
            f"multiplier for {model.heads} heads and {model.num_kv_heads} kv heads of size {model.head_size}"
        )
    return multiplier


def _infer_vocab(path: str, model: LlamaConfig, layout: NxdLayout, shapes: Mapping[str, tuple[int, ...]]) -> int | None:
    name = NAME_TABLES[layout.style].embedding
    if name not in shapes:
        return None
    rows = _num_rows(shapes[name]) * layout.tp
    if not 0 <= rows - model.vocab < VOCAB_PADDING_PER_RANK * layout.tp:
        raise UserError(
            f"{path}: does not fit the model: {name} has {rows} rows on all ranks, the model has vocab={model.vocab}"
        )
    return None if rows == padded_vocab(model, layout) else rows


def _num_rows(shape: tuple[int, ...]) -> int:
    return shape[0] if shape else 0


def _check_hints(path: str, inferred: NxdLayout, hints: LayoutHints) -> None:
    for key, hint in hints.items():
        value = getattr(inferred, key)
        not_inferred = key in ("kv_order", "by_head") or (key == "vpp" and inferred.pp == 1)
        if hint != value and not not_inferred:
            raise UserError(f"{path}: {FLAG_NAMES.get(key, key)}={hint} was given, but its files have {value}; omit it")
