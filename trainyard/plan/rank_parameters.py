"""Which parameters a pipeline rank holds, with their local shapes, from the blueprint: in the order of its memory."""

from dataclasses import dataclass
from functools import cache

from trainyard.models import AnyModel, family
from trainyard.models.blueprint import Row
from trainyard.parallel.layout import Stage


@dataclass(frozen=True)
class Held:
    """A parameter as a tensor-parallel rank has it; the same for all ranks and, in blocks, for all layers."""

    row: Row
    shape: tuple[int, ...]
    pieces: tuple[tuple[int, int], ...]
    """Rows of each part, and how many ranks hold the same ones."""


def parameters(model: AnyModel, tp: int, stages: list[Stage]) -> dict[str, Held]:
    """All that these stages hold, by name, in the order of memory: those with weight decay first. (Vectors of a block
    may stand in another order than the model's own; they share their buckets all the same.)"""
    rows = rows_of(model, tp)
    found: dict[str, Held] = {}
    for stage in stages:
        ends = rows["both"] * (stage.first or stage.last) + rows["first"] * stage.first
        inside = [(each.row.name.replace("*", str(layer)), each) for layer in stage.layers for each in rows["block"]]
        before, after = ([(each.row.name, each) for each in some] for some in (ends, rows["last"] * stage.last))
        found |= dict([*before, *inside, *after])
    return dict(sorted(found.items(), key=lambda item: not item[1].row.decay))


@cache
def rows_of(model: AnyModel, tp: int) -> dict[str, list[Held]]:
    """By place."""
    blueprint = family(model).blueprint(model)
    out: dict[str, list[Held]] = {"first": [], "block": [], "last": [], "both": []}
    for row in blueprint.rows:
        name = row.name.replace("*", "0")
        shape = blueprint.local_shape(name, tp)
        holders = blueprint.holders(name, tp)
        parts = [part.stop - part.start for part in blueprint.slices(name, tp)] if row.split == 0 else [shape[0]]
        out[row.place].append(Held(row, shape, tuple(zip(parts, holders, strict=True))))
    return out
