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

from trainyard.core.errors import UserError
from trainyard.families.decoder import DecoderConfig
from trainyard.families.moe import MoeConfig
from trainyard.formats.format import LayoutHints
from trainyard.formats.nxd import layout as nxd
from trainyard.formats.nxd.layout import KvOrder, NxdLayout, NxdRank, valid_kv_multipliers
from trainyard.formats.nxd.names import NAME_TABLES, NameStyle, NameTable
from trainyard.formats.tensor_map import different_copies

Shapes = Mapping[str, tuple[int, ...]]
"""Shapes of the tensors in a file, or in a layer, by name."""
MismatchedCopy = Callable[[NxdLayout, int], str | None]
"""Returns a tensor of this layer with a replica of a key or value head that, at this layout, differs from another."""

VOCAB_PADDING_PER_RANK = 128
"""Megatron pads the vocabulary to a multiple of 128 rows per rank. With more padding, it is another vocabulary."""


def infer_layout(model: DecoderConfig, ranks: Mapping[NxdRank, Shapes], hints: LayoutHints) -> NxdLayout:
    """Infer everything except the order of replicated heads. The caller adds the path to the errors."""
    pp, ep, tp = (max(of_kind) + 1 for of_kind in zip(*ranks, strict=True))
    nxd.check_ep(model, ep)
    first = ranks[NxdRank(0, 0, 0)]
    style = _infer_style(first)
    names = NAME_TABLES[style]
    cuts = _infer_cuts(model, ranks, names, pp)
    in_layer = re.compile(re.escape(names.layer_prefix) + r"\d+\.(.+)")
    layer = {match[1]: shape for name, shape in first.items() if (match := in_layer.fullmatch(name))}
    qkv = _match_variant(layer, names.qkv)
    gate_up = True if isinstance(model, MoeConfig) else _match_variant(layer, names.gate_up)
    by_head = hints.get("by_head", True)
    layout = NxdLayout(tp, pp, (len(cuts) + 1) // pp, cuts, ep, qkv=qkv, gate_up=gate_up, style=style, by_head=by_head)
    multiplier = _infer_kv_multiplier(model, layout, layer)
    layout = replace(layout, kv_multiplier=multiplier, vocab=_infer_vocab(model, layout, first))
    for key, hint in hints.items():
        value = getattr(layout, key)
        not_inferred = key in ("kv_order", "by_head") or (key == "vpp" and pp == 1)
        if hint != value and not not_inferred:
            raise UserError(f"{nxd.FLAG_NAMES.get(key, key)}={hint} was given, but its files have {value}; omit it")
    return layout


def infer_kv_order(
    model: DecoderConfig, layout: NxdLayout, hint: KvOrder | None, mismatched_copy: MismatchedCopy
) -> tuple[NxdLayout, str | None]:
    """Return the layout with the order of replicated heads, found by comparing replicas layer by layer, and a note for
    the user if it is not certain. The caller adds the path to the errors."""
    orders: tuple[KvOrder, ...] = ("trn1", "trn2")
    candidates = {order: replace(layout, kv_order=order) for order in orders}
    slots = [[nxd.kv_slots(model, candidate, rank) for rank in range(layout.tp)] for candidate in candidates.values()]
    if slots[0] == slots[1]:  # one replica, or one head
        return candidates[hint or "trn1"], None
    if layout.kv_multiplier not in valid_kv_multipliers(model, candidates["trn2"]):
        del candidates["trn2"]
    fitting = list(candidates)
    for layer in range(model.layers):
        mismatched = {order: mismatched_copy(candidates[order], layer) for order in candidates}
        fitting = [order for order in candidates if mismatched[order] is None]
        if not fitting:
            raise UserError(different_copies(str(mismatched["trn1"])))
        if len(fitting) == 1:
            break
    if len(fitting) == 2:
        if hint is None:
            raise UserError(
                "its kv heads do not show whether the order is trn1 or trn2; pass --source-layout kv_order=trn1 or "
                "trn2 (convert-nxd: --hw_backend)"
            )
        return candidates[hint], None
    (order,) = fitting
    if order == hint:
        return candidates[order], None
    if hint is None:
        note = f"kv_order={order}, inferred from the replicas of its kv heads"
        if order == "trn1":  # the queries of trn1 and trn2_converter differ, the keys and values do not
            note += "; pass --source-layout kv_order=trn2 if NxD's converter wrote it with --hw_backend trn2"
        return candidates[order], note
    if hint == "trn1":
        raise UserError(
            "its kv heads are in trn2 order, not trn1; pass --source-layout kv_order=trn2 (convert-nxd: --hw_backend)"
        )
    note = "its kv heads are in trn1 order and its query heads in place, as NxD's converter writes them for trn2"
    return replace(layout, kv_order="trn2_converter"), note


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


def _infer_cuts(model: DecoderConfig, ranks: Mapping[NxdRank, Shapes], names: NameTable, pp: int) -> tuple[int, ...]:
    owner: dict[int, int] = {}
    layer_name = re.compile(re.escape(names.layer_prefix) + r"(\d+)\.")
    for (rank, _, _), shapes in sorted(ranks.items()):
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


def _infer_kv_multiplier(model: DecoderConfig, layout: NxdLayout, layer: Shapes) -> int:
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


def _infer_vocab(model: DecoderConfig, layout: NxdLayout, shapes: Shapes) -> int | None:
    name = NAME_TABLES[layout.style].embedding
    if name not in shapes:
        return None
    rows = _num_rows(shapes[name]) * layout.tp
    if not 0 <= rows - model.vocab < VOCAB_PADDING_PER_RANK * layout.tp:
        size = f"{name} has {rows} rows on all ranks, the model has vocab={model.vocab}"
        raise UserError(f"does not fit the model: {size}")
    return None if rows == nxd.padded_vocab(model, layout) else rows


def _num_rows(shape: tuple[int, ...]) -> int:
    return shape[0] if shape else 0
