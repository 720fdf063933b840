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
    kv_slots,
    padded_vocab,
    valid_kv_multipliers,
)
from trainyard.checkpoint.formats.nxd.names import NAME_TABLES, NameStyle, NameTable
from trainyard.config.model_schema import LlamaConfig
from trainyard.core.errors import UserError

Shapes = Mapping[str, tuple[int, ...]]
"""Shapes of the tensors in a file, or in a layer, by name."""
LayoutHints = Mapping[str, Any]
"""Fields of NxdLayout that the user specified."""
CopiesAgree = Callable[[NxdLayout, int], bool]
"""Returns True if, at this layout, all replicas of the key and value heads of this layer are equal."""

VOCAB_PADDING_PER_RANK = 128
"""Megatron pads the vocabulary to a multiple of 128 rows per rank. With more padding, it is another vocabulary."""


def infer_layout(model: LlamaConfig, ranks: Mapping[PpTpRank, Shapes], hints: LayoutHints) -> NxdLayout:
    """Infer everything except the order of replicated heads. The caller adds the path to the errors."""
    tp, pp = max(tp for _, tp in ranks) + 1, max(pp for pp, _ in ranks) + 1
    first = ranks[0, 0]
    style = _infer_style(first)
    names = NAME_TABLES[style]
    cuts = _infer_cuts(model, ranks, names, pp)
    in_layer = re.compile(re.escape(names.layer_prefix) + r"\d+\.(.+)")
    layer = {match[1]: shape for name, shape in first.items() if (match := in_layer.fullmatch(name))}
    qkv, gate_up = _match_variant(layer, names.qkv), _match_variant(layer, names.gate_up)
    by_head = hints.get("by_head", True)
    layout = NxdLayout(tp, pp, (len(cuts) + 1) // pp, cuts, qkv=qkv, gate_up=gate_up, style=style, by_head=by_head)
    multiplier = _infer_kv_multiplier(model, layout, layer)
    layout = replace(layout, kv_multiplier=multiplier, vocab=_infer_vocab(model, layout, first))
    for key, hint in hints.items():
        value = getattr(layout, key)
        not_inferred = key in ("kv_order", "by_head") or (key == "vpp" and pp == 1)
        if hint != value and not not_inferred:
            raise UserError(f"{FLAG_NAMES.get(key, key)}={hint} was given, but its files have {value}; omit it")
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


def _infer_style(shapes: Shapes) -> NameStyle:
    for style, names in NAME_TABLES.items():
        if any(name.startswith(names.layer_prefix) for name in shapes):
            return style
    expected = f"expected names such as {NAME_TABLES['hf'].layer_prefix}0..."
    raise UserError(f"holds {next(iter(shapes), 'nothing')}, not an NxD Llama model ({expected})")


def _match_variant(layer: Shapes, variants: Mapping[Any, tuple[tuple[str, Any], ...]]) -> Any:
    """The key of the first variant whose tensors are all in the layer."""
    for variant, tensors in variants.items():
        if all(name in layer for name, _ in tensors):
            return variant
    expected = " or ".join(tensors[0][0] for tensors in variants.values())
    raise UserError(f"its layers have no {expected}; not an NxD Llama model, or an incomplete one")


def _infer_cuts(model: LlamaConfig, ranks: Mapping[PpTpRank, Shapes], names: NameTable, pp: int) -> tuple[int, ...]:
    owner: dict[int, int] = {}
    layer_name = re.compile(re.escape(names.layer_prefix) + r"(\d+)\.")
    for (rank, _), shapes in sorted(ranks.items()):
        for match in filter(None, map(layer_name.match, shapes)):
            layer = int(match[1])
            if owner.setdefault(layer, rank) != rank:
                raise UserError(f"layer {layer} is on pipeline ranks {owner[layer]} and {rank}; expected on one only")
    if sorted(owner) != list(range(model.layers)):
        missing = sorted(set(range(model.layers)) - set(owner))
        problem = f"layer {missing[0]} is missing" if missing else f"it has a layer {max(owner)}"
        counts = f"the model has {model.layers} layers, the checkpoint {len(owner)}"
        raise UserError(f"does not fit the model: {problem}; {counts}")
    stages = [(rank, list(layers)[-1]) for rank, layers in groupby(range(model.layers), key=lambda layer: owner[layer])]
    if len(stages) % pp or any(rank != stage % pp for stage, (rank, _) in enumerate(stages)):
        order = ", ".join(str(rank) for rank, _ in stages)
        raise UserError(f"its layers are on pipeline ranks {order}, in this order; expected 0 to {pp - 1} in turn")
    return tuple(last_layer for _, last_layer in stages[:-1])


def _infer_kv_multiplier(model: LlamaConfig, layout: NxdLayout, layer: Shapes) -> int:
    """Infer the multiplier from the number of rows of the tensor that holds the keys."""
    tensors = NAME_TABLES[layout.style].qkv[layout.qkv]
    name, letters = next((name, letters) for name, letters in tensors if "k" in letters)
    rows = _num_rows(layer[name])
    kv_rows = rows * layout.tp - (model.heads * model.head_size if "q" in letters else 0)
    multiplier, rest = divmod(kv_rows, len(letters.replace("q", "")) * model.num_kv_heads * model.head_size)
    if rest or multiplier not in valid_kv_multipliers(model, layout):  # trn1, the default, allows all that trn2 allows
        raise UserError(
            f"does not fit the model: {name} has {rows} rows on each of {layout.tp} ranks; that fits no "
            f"multiplier for {model.heads} heads and {model.num_kv_heads} kv heads of size {model.head_size}"
        )
    return multiplier


def _infer_vocab(model: LlamaConfig, layout: NxdLayout, shapes: Shapes) -> int | None:
    name = NAME_TABLES[layout.style].embedding
    if name not in shapes:
        return None
    rows = _num_rows(shapes[name]) * layout.tp
    if not 0 <= rows - model.vocab < VOCAB_PADDING_PER_RANK * layout.tp:
        size = f"{name} has {rows} rows on all ranks, the model has vocab={model.vocab}"
        raise UserError(f"does not fit the model: {size}")
    return None if rows == padded_vocab(model, layout) else rows


def _num_rows(shape: tuple[int, ...]) -> int:
    return shape[0] if shape else 0
