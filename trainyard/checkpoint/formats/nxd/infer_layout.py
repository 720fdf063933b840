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
    FLAGS,
    KvOrder,
    NxdLayout,
    Rank,
    check,
    multipliers,
    padded_vocab,
    slots,
)
from trainyard.checkpoint.formats.nxd.names import STYLES, Style, Table
from trainyard.config.model_schema import LlamaModel
from trainyard.core.errors import UserError

Shapes = Mapping[Rank, Mapping[str, tuple[int, ...]]]
"""Of the tensors in each rank's file."""
Hints = Mapping[str, Any]
"""Fields of NxdLayout that the user gave."""
Agree = Callable[[NxdLayout, int], bool]
"""Do the copies of a layer's key and value heads agree, if that is the layout?"""

# Megatron pads a vocabulary to a multiple of 128 rows for each rank; more than that is another vocabulary.
PADDING = 128


def infer(where: str, model: LlamaModel, shapes: Shapes, hints: Hints) -> NxdLayout:
    """All but the order of repeated heads."""
    tp, pp = max(tp for _, tp in shapes) + 1, max(pp for pp, _ in shapes) + 1
    style = _style(where, shapes)
    names = STYLES[style]
    cuts = _cuts(where, model, shapes, names, pp)
    layer = _suffixes(shapes[0, 0], names)
    found = NxdLayout(
        tp,
        pp,
        (len(cuts) + 1) // pp,
        cuts,
        qkv=_kind(where, layer, {kind: [name for name, _ in held] for kind, held in names.qkv.items()}),
        gate_up=_kind(where, layer, {fused: [name for name, _ in held] for fused, held in names.gate_up.items()}),
        style=style,
        by_head=hints.get("by_head", True),
    )
    found = replace(
        found,
        kv_multiplier=_multiplier(where, model, found, layer),
        vocab=_rows(where, model, found, shapes[0, 0]),
    )
    _agree_with(where, found, hints)
    check(model, found)
    return found


def with_kv_order(where: str, model: LlamaModel, layout: NxdLayout, hints: Hints, agree: Agree) -> NxdLayout:
    orders: tuple[KvOrder, ...] = ("trn1", "trn2")
    ways = {order: replace(layout, kv_order=order) for order in orders}
    ways = {order: way for order, way in ways.items() if way.kv_multiplier in multipliers(model, way)}
    said: KvOrder | None = hints.get("kv_order")
    heads = [[slots(model, way, rank) for rank in range(way.tp)] for way in ways.values()]
    if len(heads) == 2 and heads[0] == heads[1]:
        return ways[said or "trn1"]
    for layer in range(model.layers if len(ways) > 1 else 0):
        fitting = [order for order, way in ways.items() if agree(way, layer)]
        if len(fitting) == 1:
            ways = {fitting[0]: ways[fitting[0]]}
        if len(fitting) < 2:
            break
    if len(ways) == 1:
        (order,) = ways
        if said not in (None, order):
            # The reference's converter for trn2 repeats keys as on trn1 and leaves the queries: both cannot be right.
            raise UserError(
                f"{where}: hw_backend={said} was given, but its kv heads lie as {order} has them; leave it out, "
                f"or convert again from the source if it came from the reference's converter"
            )
        return ways[order]
    if said is None:
        raise UserError(f"{where}: the copies of its kv heads do not tell trn1's order from trn2's; give --hw_backend")
    return ways[said]


def _style(where: str, shapes: Shapes) -> Style:
    for style, names in STYLES.items():
        if any(name.startswith(names.layer) for name in shapes[0, 0]):
            return style
    some = next(iter(shapes[0, 0]), "nothing")
    raise UserError(f"{where}: holds {some}, not a Llama model of NxD (wanted names like {STYLES['hf'].layer}0...)")


def _suffixes(held: Mapping[str, tuple[int, ...]], names: Table) -> dict[str, tuple[int, ...]]:
    """The tensors of the first layer in a file, by what follows the layer's number."""
    out: dict[str, tuple[int, ...]] = {}
    for name, shape in held.items():
        if match := re.fullmatch(re.escape(names.layer) + r"\d+\.(.+)", name):
            out.setdefault(match.group(1), shape)
    return out


def _kind(where: str, layer: Mapping[str, tuple[int, ...]], kinds: Mapping[Any, list[str]]) -> Any:
    """The one of `kinds` whose names are in the layer."""
    for kind, wanted in kinds.items():
        if all(name in layer for name in wanted):
            return kind
    wanted_names = " or ".join(wanted[0] for wanted in kinds.values())
    raise UserError(f"{where}: its layers have no {wanted_names}; not a Llama model of NxD, or not all of it")


def _cuts(where: str, model: LlamaModel, shapes: Shapes, names: Table, pp: int) -> tuple[int, ...]:
    owner: dict[int, int] = {}
    number = re.compile(re.escape(names.layer) + r"(\d+)\.")
    for (rank, _), held in sorted(shapes.items()):
        for match in filter(None, map(number.match, held)):
            layer = int(match.group(1))
            if owner.setdefault(layer, rank) != rank:
                raise UserError(f"{where}: layer {layer} is on pipeline ranks {owner[layer]} and {rank}; wanted on one")
    if sorted(owner) != list(range(model.layers)):
        missing = sorted(set(range(model.layers)) - set(owner))
        what = f"layer {missing[0]} is missing" if missing else f"it has a layer {max(owner)}"
        raise UserError(
            f"{where}: does not fit the model: {what}; the model has {model.layers} layers, it {len(owner)}"
        )
    runs = [(rank, list(layers)[-1]) for rank, layers in groupby(range(model.layers), key=lambda layer: owner[layer])]
    if len(runs) % pp or any(rank != stage % pp for stage, (rank, _) in enumerate(runs)):
        order = ", ".join(str(rank) for rank, _ in runs)
        raise UserError(f"{where}: its layers go through pipeline ranks {order}; wanted 0 to {pp - 1}, again and again")
    return tuple(last for _, last in runs[:-1])


def _multiplier(where: str, model: LlamaModel, layout: NxdLayout, layer: Mapping[str, tuple[int, ...]]) -> int:
    """From the rows of the tensor that has the keys."""
    name, letters = next(held for held in STYLES[layout.style].qkv[layout.qkv] if "k" in held[1])
    rows = _first(layer[name])
    keys = rows * layout.tp - (model.heads * model.head_size if "q" in letters else 0)
    times, left = divmod(keys, len(letters.replace("q", "")) * model.kv * model.head_size)
    if left or times not in multipliers(model, layout):  # trn1, the default, takes all that trn2 does
        raise UserError(
            f"{where}: does not fit the model: {name} has {rows} rows on each of {layout.tp} ranks, "
            f"not what {model.heads} heads and {model.kv} kv heads of {model.head_size} give, repeated or not"
        )
    return times


def _rows(where: str, model: LlamaModel, layout: NxdLayout, held: Mapping[str, tuple[int, ...]]) -> int | None:
    name = STYLES[layout.style].embedding
    if name not in held:
        return None
    rows = _first(held[name]) * layout.tp
    if not 0 <= rows - model.vocab < PADDING * layout.tp:
        raise UserError(
            f"{where}: does not fit the model: {name} has {rows} rows in all, the model's vocab is {model.vocab}"
        )
    return None if rows == padded_vocab(model, layout) else rows


def _first(shape: tuple[int, ...]) -> int:
    return shape[0] if shape else 0


def _agree_with(where: str, found: NxdLayout, hints: Hints) -> None:
    for key, said in hints.items():
        sees = getattr(found, key)
        open_question = key in ("kv_order", "by_head") or (key == "vpp" and found.pp == 1)
        if said != sees and not open_question:
            raise UserError(f"{where}: {FLAGS.get(key, key)}={said} was given, but its files have {sees}; leave it out")
