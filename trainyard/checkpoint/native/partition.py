"""Which box of which part every rank holds: pure arithmetic over the blueprint and the layout.

Because any rank can say what any other holds, a checkpoint needs no meeting to be planned: each rank writes its own
file and knows all files. A part is what a parameter is called unfused, whole; boxes of parts are what every layout has
in common.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from trainyard.models.blueprint import Blueprint, layer
from trainyard.parallel.layout import Layout


@dataclass(frozen=True)
class Box:
    """[offsets, offsets + sizes) of a part; it begins at `at` of this rank's rows of parameter `name`."""

    name: str
    part: str
    shape: tuple[int, ...]
    """Of the whole part."""
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    at: tuple[int, ...]

    @property
    def count(self) -> int:
        return prod(self.sizes)


def boxes(blueprint: Blueprint, name: str, tp: int, rank: int, rows: range, once: bool) -> Iterator[Box]:
    """What `rows` of tensor-parallel rank `rank`'s share of a parameter hold. `once`: of ranks that hold the same, only
    the first counts."""
    begin = 0
    holders = blueprint.holders(name, tp)
    for number, piece in enumerate(blueprint.slices(name, tp, rank)):
        size = piece.stop - piece.start
        offsets, sizes, at = [0] * len(piece.shape), list(piece.shape), [0] * len(piece.shape)
        offsets[piece.dim], sizes[piece.dim] = piece.start, size
        height = sizes[0]
        first, end = max(rows.start, begin), min(rows.stop, begin + height)
        if first < end and all(sizes) and not (once and rank % holders[number]):
            offsets[0] += first - begin
            sizes[0] = end - first
            at[0] = first - rows.start
            yield Box(name, piece.name, piece.shape, tuple(offsets), tuple(sizes), tuple(at))
        begin += height


def written(blueprint: Blueprint, layout: Layout, rank: int) -> list[Box]:
    """What the rank at place `rank` puts into its file: data-parallel ranks share out the rows, whether or not they
    hold them all, and every element of the model is in exactly one file."""
    place = layout.place(rank)
    data, ranks = place["dp"] * layout.cp + place["cp"], layout.dp * layout.cp
    out: list[Box] = []
    for name in blueprint.names():
        if holder(blueprint, layout, name) == place["pp"]:
            rows = blueprint.local_shape(name, layout.tp, place["tp"])[0]
            mine = share_of_rows(rows, ranks, data)
            out += boxes(blueprint, name, layout.tp, place["tp"], mine, once=True)
    return out


def share_of_rows(rows: int, ranks: int, rank: int) -> range:
    """The chunk of a parameter's rows that is one data-parallel rank's (as in parallel/flat_buffer.py)."""
    chunk = -(-rows // ranks)
    return range(min(rank * chunk, rows), min((rank + 1) * chunk, rows))


def holder(blueprint: Blueprint, layout: Layout, name: str) -> int:
    """The pipeline rank that has a parameter (the first one, if two have)."""
    number = layer(name)
    if number is not None:
        return layout.owners[number]
    return layout.holder(len(layout.stages) - 1) if blueprint.row(name).place == "last" else 0
