"""Which NxdLayout a checkpoint has: NxD writes none down, but names and shapes give away all of it that matters.

How often key and value heads are repeated shows in their rows, which layers a pipeline rank has in the names (so any
cuts will do), and the order of the repeated heads in which ranks hold the same bits. What a user says is a hint: it
decides where the files do not, and where they do it must agree.
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
"""Of the tensors in each rank's file."""
LayoutHints = Mapping[str, Any]
"""Fields of NxdLayout that the user gave."""
CopiesAgree = Callable[[NxdLayout, int], bool]
"""Do the copies of a layer's key and value heads agree, if that is the layout?"""

# Megatron pads a vocabulary to a multiple of 128 rows for each rank; more than that is another vocabulary.
VOCAB_PADDING_PER_RANK = 128


def infer_layout(path: str, model: LlamaConfig, shapes: RankShapes, hints: LayoutHints) -> NxdLayout:
    """All but the order of repeated heads."""
    tp, pp = max(tp for _, tp in shapes) + 1, max(pp for pp, _ in shapes) + 1
    style = _infer_style(path, shapes)
    names = NAME_TABLES[style]
    cuts = _infer_cuts(path, model, shapes, names, pp)
    layer = _first_layer_shapes(shapes[0, 0], names)
    found = NxdLayout(
        tp,
        pp,
        (len(cuts) + 1) // pp,
        cuts,
        qkv=_match_variant(path, layer, {kind: [name for name, _ in held] for kind, held in names.qkv.items()}),
        gate_up=_match_variant(
            path, layer, {fused: [name for name, _ in held] for fused, held in names.gate_up.items()}
        ),
        style=style,
        by_head=hints.get("by_head", True),
    )
    found = replace(
        found,
        kv_multiplier=_infer_kv_multiplier(path, model, found, layer),
        vocab=_infer_vocab(path, model, found, shapes[0, 0]),
    )
    _check_hints(path, found, hints)
    check_layout(model, found)
    return found


def infer_kv_order(
    path: str, model: LlamaConfig, layout: NxdLayout, hints: LayoutHints, copies_agree: CopiesAgree
) -> NxdLayout:
    orders: tuple[KvOrder, ...] = ("trn1", "trn2")
    ways = {order: replace(layout, kv_order=order) for order in orders}
    ways = {order: way for order, way in ways.items() if way.kv_multiplier in valid_kv_multipliers(model, way)}
    said: KvOrder | None = hints.get("kv_order")
    heads = [[kv_slots(model, way, rank) for rank in range(way.tp)] for way in ways.values()]
    if len(heads) == 2 and heads[0] == heads[1]:
        return ways[said or "trn1"]
    for layer in range(model.layers if len(ways) > 1 else 0):
        fitting = [order for order, way in ways.items() if copies_agree(way, layer)]
        if len(fitting) == 1:
            ways = {fitting[0]: ways[fitting[0]]}
        if len(fitting) < 2:
            break
    if len(ways) == 1:
        (order,) = ways
        if said not in (None, order):
            # The reference's converter for trn2 repeats keys as on trn1 and leaves the queries: both cannot be right.
            raise UserError(
                f"{path}: hw_backend={said} was given, but its kv heads lie as {order} has them; leave it out, "
                f"or convert again from the source if it came from the reference's converter"
            )
        return ways[order]
    if said is None:
        raise UserError(f"{path}: the copies of its kv heads do not tell trn1's order from trn2's; give --hw_backend")
    return ways[said]


def _infer_style(path: str, shapes: RankShapes) -> NameStyle:
    for style, names in NAME_TABLES.items():
        if any(name.startswith(names.layer_prefix) for name in shapes[0, 0]):
            return style
    some = next(iter(shapes[0, 0]), "nothing")
    raise UserError(
        f"{path}: holds {some}, not a Llama model of NxD (wanted names like {NAME_TABLES['hf'].layer_prefix}0...)"
    )


def _first_layer_shapes(held: Mapping[str, tuple[int, ...]], names: NameTable) -> dict[str, tuple[int, ...]]:
    """The tensors of the first layer in a file, by what follows the layer's number."""
    out: dict[str, tuple[int, ...]] = {}
    for name, shape in held.items():
        if match := re.fullmatch(re.escape(names.layer_prefix) + r"\d+\.(.+)", name):
            out.setdefault(match.group(1), shape)
    return out


def _match_variant(path: str, layer: Mapping[str, tuple[int, ...]], variants: Mapping[Any, list[str]]) -> Any:
    """The one of `kinds` whose names are in the layer."""
    for kind, wanted in variants.items():
        if all(name in layer for name in wanted):
            return kind
    wanted_names = " or ".join(wanted[0] for wanted in variants.values())
    raise UserError(f"{path}: its layers have no {wanted_names}; not a Llama model of NxD, or not all of it")


def _infer_cuts(path: str, model: LlamaConfig, shapes: RankShapes, names: NameTable, pp: int) -> tuple[int, ...]:
    owner: dict[int, int] = {}
    number = re.compile(re.escape(names.layer_prefix) + r"(\d+)\.")
    for (rank, _), held in sorted(shapes.items()):
        for match in filter(None, map(number.match, held)):
            layer = int(match.group(1))
            if owner.setdefault(layer, rank) != rank:
                raise UserError(f"{path}: layer {layer} is on pipeline ranks {owner[layer]} and {rank}; wanted on one")
    if sorted(owner) != list(range(model.layers)):
        missing = sorted(set(range(model.layers)) - set(owner))
        what = f"layer {missing[0]} is missing" if missing else f"it has a layer {max(owner)}"
        raise UserError(f"{path}: does not fit the model: {what}; the model has {model.layers} layers, it {len(owner)}")
    runs = [(rank, list(layers)[-1]) for rank, layers in groupby(range(model.layers), key=lambda layer: owner[layer])]
    if len(runs) % pp or any(rank != stage % pp for stage, (rank, _) in enumerate(runs)):
        order = ", ".join(str(rank) for rank, _ in runs)
        raise UserError(f"{path}: its layers go through pipeline ranks {order}; wanted 0 to {pp - 1}, again and again")
    return tuple(last for _, last in runs[:-1])


def _infer_kv_multiplier(path: str, model: LlamaConfig, layout: NxdLayout, layer: Mapping[str, tuple[int, ...]]) -> int:
    """From the rows of the tensor that has the keys."""
    name, letters = next(held for held in NAME_TABLES[layout.style].qkv[layout.qkv] if "k" in held[1])
    rows = _num_rows(layer[name])
    keys = rows * layout.tp - (model.heads * model.head_size if "q" in letters else 0)
    times, left = divmod(keys, len(letters.replace("q", "")) * model.num_kv_heads * model.head_size)
    if left or times not in valid_kv_multipliers(model, layout):  # trn1, the default, takes all that trn2 does
        raise UserError(
            f"{path}: does not fit the model: {name} has {rows} rows on each of {layout.tp} ranks, "
            f"not what {model.heads} heads and {model.num_kv_heads} kv heads of {model.head_size} give, repeated or not"
        )
    return times


def _infer_vocab(path: str, model: LlamaConfig, layout: NxdLayout, held: Mapping[str, tuple[int, ...]]) -> int | None:
    name = NAME_TABLES[layout.style].embedding
    if name not in held:
        return None
    rows = _num_rows(held[name]) * layout.tp
    if not 0 <= rows - model.vocab < VOCAB_PADDING_PER_RANK * layout.tp:
        raise UserError(
            f"{path}: does not fit the model: {name} has {rows} rows in all, the model's vocab is {model.vocab}"
        )
    return None if rows == padded_vocab(model, layout) else rows


def _num_rows(shape: tuple[int, ...]) -> int:
    return shape[0] if shape else 0


def _check_hints(path: str, inferred: NxdLayout, hints: LayoutHints) -> None:
    for key, said in hints.items():
        sees = getattr(inferred, key)
        open_question = key in ("kv_order", "by_head") or (key == "vpp" and inferred.pp == 1)
        if said != sees and not open_question:
            raise UserError(
                f"{path}: {FLAG_NAMES.get(key, key)}={said} was given, but its files have {sees}; leave it out"
            )
