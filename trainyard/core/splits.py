"""How rows, heads and experts are divided among ranks."""

from typing import NamedTuple


class ModelShard(NamedTuple):
    """A rank's index along the axes that split parameters; data-parallel sharding (ZeRO) comes after it."""

    tp: int = 1
    tp_rank: int = 0
    ep: int = 1
    ep_rank: int = 0


FULL_MODEL = ModelShard()


def shard_rows(num_rows: int, num_shards: int, shard: int) -> range:
    """The rows (dim 0) of a parameter in one data-parallel shard: equal chunks, the last ones shorter or empty."""
    chunk = -(-num_rows // num_shards)
    return range(min(shard * chunk, num_rows), min((shard + 1) * chunk, num_rows))


def head_range(units: int, tp: int, rank: int) -> tuple[int, int]:
    """The units (heads) [first, end) that tensor-parallel rank `rank` of `tp` holds; every rank has equally many.

    With fewer units than ranks, tp / units ranks hold each unit. If neither divides the other, every rank holds all.
    """
    if units % tp == 0:
        return rank * units // tp, (rank + 1) * units // tp
    if tp % units == 0:
        return rank * units // tp, rank * units // tp + 1
    return 0, units


def replication_factor(units: int, tp: int) -> int:
    """Number of adjacent tensor-parallel ranks that hold the same units."""
    return 1 if units % tp == 0 else tp // units if tp % units == 0 else tp
