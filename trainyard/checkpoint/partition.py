"""Computes which slices every rank holds and writes: pure arithmetic over the blueprint and the layout.

Any rank can compute what any other rank holds, so planning a checkpoint needs no communication: each rank writes its
own file and knows the contents of all files. Slices refer to unfused tensors, which are the same at every layout.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from trainyard.core.splits import ModelShard, shard_rows
from trainyard.core.tensor_slice import TensorIndex, TensorSlice
from trainyard.families.blueprint import Blueprint, layer_index
from trainyard.parallel.layout import Layout


@dataclass(frozen=True)
class LocalSlice(TensorSlice):
    """A slice of an unfused tensor, and where it is in this rank's rows of the (fused) parameter `param`."""

    param: str
    local_row: int

    @property
    def local_index(self) -> TensorIndex:
        rows = slice(self.local_row, self.local_row + self.sizes[0])
        return (rows, *(slice(0, size) for size in self.sizes[1:]))


def rank_slices(
    blueprint: Blueprint, name: str, shard: ModelShard, rows: range, skip_replicas: bool
) -> Iterator[LocalSlice]:
    """The slices in `rows` of parameter `name` as a rank holds it.

    `skip_replicas`: where several tensor-parallel ranks hold the same values, only the first of them yields the slice.
    """
    start = 0
    pieces, replication = blueprint.local_slices(name, shard), blueprint.replication(name, shard)
    for piece, replicas in zip(pieces, replication, strict=True):
        first, end = max(rows.start, start), min(rows.stop, start + piece.sizes[0])
        if first < end and piece.numel and not (skip_replicas and shard.tp_rank % replicas):
            row = piece.offsets[0] - start
            piece_rows = piece.narrow(0, row + first, row + end)
            yield LocalSlice(
                piece.name, piece.global_shape, piece_rows.offsets, piece_rows.sizes, name, first - rows.start
            )
        start += piece.sizes[0]


def owned_slices(
    blueprint: Blueprint, layout: Layout, rank: int, names: Iterable[str] | None = None
) -> list[LocalSlice]:
    """The slices of all parameters, or of `names`, that global rank `rank` writes to its file.

    Data-parallel ranks divide the rows among themselves, whether or not each of them holds all rows. Every element of
    the model is in exactly one file.
    """
    pp_rank, model_shard = layout.coords(rank)["pp"], layout.model_shard(rank)
    out: list[LocalSlice] = []
    for name in blueprint.parameter_names() if names is None else names:
        if pipeline_owner(blueprint, layout, name) == pp_rank:
            num_rows = blueprint.local_shape(name, model_shard)[0]
            rows = shard_rows(num_rows, *layout.data_shard(rank, bool(blueprint.spec(name).experts)))
            out += rank_slices(blueprint, name, model_shard, rows, skip_replicas=True)
    return out


def pipeline_owner(blueprint: Blueprint, layout: Layout, name: str) -> int:
    """The pipeline rank that holds a parameter (the first one if two ranks hold it)."""
    layer = layer_index(name)
    if layer is not None:
        return layout.layer_owner[layer]
    return layout.stage_owner(len(layout.stages) - 1) if blueprint.spec(name).pipeline_stage == "last" else 0
