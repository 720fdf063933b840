"""What Trainium chips can do, and which NeuronCores make good groups: not always neighbours, and not every size.

Chips: aws-neuron-sdk, about-neuron/arch/neuron-hardware. The order of ranks is NxD's (neuronx_distributed 0.18,
parallel_layers/parallel_state.py). On a trn1.32xlarge, 32 cores on 16 chips in a torus, groups of four are every
eighth core. On a trn2.48xlarge with two cores seen as one (LNC 2), 64 of them in four rows of 16, groups of 32 are rows
0 and 3 and rows 1 and 2; with LNC 1 the same holds for 128 cores and groups of 64. Chips of trn3 are joined by
switches, which know no rows.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from trainyard.core.errors import UserError


class TrainiumChip(NamedTuple):
    cores: int
    """Physical NeuronCores."""
    bf16_flops: float
    """Dense FLOP/s, and so for the next two."""
    fp8_flops: float
    fp32_flops: float
    memory_bytes: int
    """Bytes of device memory."""


CHIPS = {
    "trn1": TrainiumChip(2, 190e12, 190e12, 47.5e12, 32 << 30),
    "trn2": TrainiumChip(8, 667e12, 1299e12, 181e12, 96 << 30),
    "trn3": TrainiumChip(8, 671e12, 2517e12, 183e12, 144 << 30),
}
LNC_CHOICES = {"trn1": (1,), "trn2": (2, 1), "trn3": (2, 1)}
"""Physical cores that one rank may drive; the first is usual."""
CORES_PER_INSTANCE = {("trn1", 1): 32, ("trn2", 1): 128, ("trn2", 2): 64}
"""Ranks of an instance whose cores are wired in rows, by generation and LNC."""
UNSUPPORTED_GROUPS = {("trn2", 2, 8), ("trn2", 1, 16)}
"""(generation, LNC, size) of neighbours for whom the runtime finds no way to talk: NxD calls them not supported, and
users saw 8 ranks of a trn2 fail when the group is made, while 2, 4 and 16 did not."""
GROUP_STRIDES = {4: 8}
"""trn1: distance between the cores of a group of so many."""
COLLECTIVE_KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send")


def check_lnc(generation: str, lnc: int) -> None:
    if lnc not in LNC_CHOICES.get(generation, ()):
        known = ", ".join(f"{name} with LNC {size}" for name, sizes in LNC_CHOICES.items() for size in sorted(sizes))
        raise UserError(f"{generation} with LNC {lnc}: not known; here: {known}")


def rank_flops(generation: str, lnc: int, dtype: str) -> float:
    """Dense FLOP/s of what one rank drives; kind: bf16, fp8 or fp32."""
    chip = CHIPS[generation]
    return {"bf16": chip.bf16_flops, "fp8": chip.fp8_flops, "fp32": chip.fp32_flops}[dtype] / chip.cores * lnc


def rank_memory_bytes(generation: str, lnc: int) -> int:
    """Bytes that one rank has: its cores' share of the chip."""
    chip = CHIPS[generation]
    return chip.memory_bytes // chip.cores * lnc


def rank_order(generation: str, lnc: int, tp: int, world_size: int) -> list[int]:
    """The rank at each place of a layout: place i of `[pp][dp][cp][tp]` is core `order[i]`."""
    check_lnc(generation, lnc)
    if (generation, lnc, tp) in UNSUPPORTED_GROUPS:
        raise UserError(f"layout.tp={tp}: not supported on {generation} with LNC {lnc}; nearest: {tp // 2} or {tp * 2}")
    cores = CORES_PER_INSTANCE.get((generation, lnc), 0)
    node = _instance_order(generation, cores, tp) if cores else None
    if node is None or world_size % cores:
        return list(range(world_size))
    return [first + core for first in range(0, world_size, cores) for core in node]


def _instance_order(generation: str, cores: int, tp: int) -> list[int] | None:
    """Within one instance; None: neighbours."""
    if generation == "trn1" and tp in GROUP_STRIDES:
        return [core for first in range(GROUP_STRIDES[tp]) for core in range(first, cores, GROUP_STRIDES[tp])]
    if generation == "trn2" and tp == cores // 2:
        row = cores // 4
        rows = [range(number * row, (number + 1) * row) for number in range(4)]
        return [*rows[0], *rows[3], *rows[1], *rows[2]]
    return None


def group_problem(generation: str, lnc: int, kind: str, ranks: Sequence[int]) -> str | None:
    """Why these ranks cannot do `kind` (one of MESSAGES) together, and what would work; None where nothing is known
    against it.

    Reported by users and by the runtime's own messages, not by its documentation: a group has 1, 2, 4, 8, 16 or a
    multiple of 32 ranks on an instance, neighbours begin at a multiple of their number, and instances take part with
    the same cores each.
    """
    check_lnc(generation, lnc)
    if kind not in COLLECTIVE_KINDS:
        raise ValueError(f"{kind}: not one of {', '.join(COLLECTIVE_KINDS)}")
    size = len(ranks)
    if size < 2 or kind == "send":
        return None
    cores = CORES_PER_INSTANCE.get((generation, lnc)) or max(ranks) + 1
    parts: dict[int, list[int]] = {}
    for rank in sorted(ranks):
        parts.setdefault(rank // cores, []).append(rank % cores)
    first, *others = parts.values()
    if any(part != first for part in others):
        return "instances take part with different cores; nearest: the same cores of each"
    if kind == "all_to_all" and not (size in (4, 8, 16) or size % 32 == 0):
        return f"{size} ranks: all_to_all is among 4, 8, 16 or a multiple of 32"
    return _instance_group_problem(generation, lnc, kind, first, cores)


def _instance_group_problem(generation: str, lnc: int, kind: str, part: list[int], cores: int) -> str | None:
    """The same for the cores of one instance."""
    size = len(part)
    if size not in (1, 2, 4, 8, 16) and size % 32:
        return f"{size} ranks of an instance: a group has 1, 2, 4, 8, 16 or a multiple of 32"
    if size == 1 or (kind != "all_to_all" and part in _preferred_groups(generation, cores, size)):
        return None
    step = part[1] - part[0]
    if any(after - before != step for before, after in pairwise(part)):
        return "the ranks are not at equal distances; nearest: neighbours"
    if generation == "trn1" and step > 1 and kind == "all_to_all":
        return f"every {step}th core: on trn1 all_to_all is among neighbours"
    if step > 1:
        return None
    if part[0] % min(size, 32):
        below = part[0] // size * size
        return f"{size} neighbours from {part[0]}: not aligned; nearest: from {below} or {below + size}"
    if (generation, lnc, size) in UNSUPPORTED_GROUPS:
        return f"{size} neighbours: not supported on {generation} with LNC {lnc}; nearest: {size // 2} or {size * 2}"
    if generation == "trn1" and size in GROUP_STRIDES:
        return f"{size} neighbours: not supported on trn1; nearest: every {GROUP_STRIDES[size]}th core"
    return None


def _preferred_groups(generation: str, cores: int, size: int) -> list[list[int]]:
    """Groups of this size that are not neighbours, as `rank_order` makes them."""
    node = _instance_order(generation, cores, size) or []
    return [sorted(node[start : start + size]) for start in range(0, len(node), size)]
