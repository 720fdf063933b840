"""Which box of which part every rank holds: pure arithmetic over the blueprint and the layout.

Because any rank can say what any other holds, a checkpoint needs no meeting to be planned: each rank writes its own
file and knows all files. A part is what a parameter is called unfused, whole; boxes of parts are what every layout has
in common.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from trainyard.models.blueprint import Blueprint, layer_index
from trainyard.parallel.layout import Layout


@dataclass(frozen=True)
class LocalSlice:
    """[offsets, offsets + sizes) of a part; it begins at `at` of this rank's rows of parameter `name`."""

    param: str
    tensor_name: str
    global_shape: tuple[int, ...]
    """Of the whole part."""
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    local_offsets: tuple[int, ...]

    @property
    def numel(self) -> int:
        return prod(self.sizes)


def rank_slices(
    blueprint: Blueprint, name: str, tp: int, rank: int, rows: range, skip_replicas: bool
) -> Iterator[LocalSlice]:
    """What `rows` of tensor-parallel rank `rank`'s share of a parameter hold. `once`: of ranks that hold the same, only
    the first counts."""
    begin = 0
    holders = blueprint.replication(name, tp)
    for number, piece in enumerate(blueprint.tp_slices(name, tp, rank)):
        size = piece.stop - piece.start
        offsets, sizes, at = [0] * len(piece.shape), list(piece.shape), [0] * len(piece.shape)
        offsets[piece.dim], sizes[piece.dim] = piece.start, size
        height = sizes[0]
        first, end = max(rows.start, begin), min(rows.stop, begin + height)
        if first < end and all(sizes) and not (skip_replicas and rank % holders[number]):
            offsets[0] += first - begin
            sizes[0] = end - first
            at[0] = first - rows.start
            yield LocalSlice(name, piece.name, piece.shape, tuple(offsets), tuple(sizes), tuple(at))
        begin += height


def owned_slices(blueprint: Blueprint, layout: Layout, rank: int) -> list[LocalSlice]:
    """What the rank at place `rank` puts into its file: data-parallel ranks share out the rows, whether or not they
    hold them all, and every element of the model is in exactly one file."""
    place = layout.coords(rank)
    data, ranks = place["dp"] * layout.cp + place["cp"], layout.dp * layout.cp
    out: list[LocalSlice] = []
    for name in blueprint.parameter_names():
        if pipeline_owner(blueprint, layout, name) == place["pp"]:
            rows = blueprint.local_shape(name, layout.tp, place["tp"])[0]
            mine = shard_rows(rows, ranks, data)
            out += rank_slices(blueprint, name, layout.tp, place["tp"], mine, skip_replicas=True)
    return out


def shard_rows(num_rows: int, shards: int, shard: int) -> range:
    """The chunk of a parameter's rows that is one data-parallel rank's (as in parallel/flat_buffer.py)."""
    chunk = -(-num_rows // shards)
    return range(min(shard * chunk, num_rows), min((shard + 1) * chunk, num_rows))


def pipeline_owner(blueprint: Blueprint, layout: Layout, name: str) -> int:
    """The pipeline rank that has a parameter (the first one, if two have)."""
    number = layer_index(name)
    if number is not None:
        return layout.layer_owner[number]
    return layout.stage_owner(len(layout.stages) - 1) if blueprint.spec(name).pipeline_stage == "last" else 0
