"""Trainium machines: which one this is, its chips, and the groups of NeuronCores that the runtime supports: not every
size, and not always neighbors.

Chip figures: aws-neuron-sdk, about-neuron/arch/neuron-hardware. The rank order is NxD's (neuronx_distributed 0.18,
parallel_layers/parallel_state.py). A trn1.32xlarge has 32 cores on 16 chips in a torus; groups of four are every eighth
core. A trn2.48xlarge with LNC 2 (two physical cores per logical core) has 64 logical cores in four rows of 16; groups
of 32 are rows 0 and 3, and rows 1 and 2. With LNC 1 the same holds for 128 cores and groups of 64. trn3 chips are
connected by switches, without rows.

A machine is detected without starting the runtime, whose first user owns the cores.
"""

import os
from collections.abc import Mapping, Sequence
from importlib import metadata
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from trainyard.core.errors import UserError


class TrainiumChip(NamedTuple):
    """Figures of one chip; FLOP/s are dense."""

    cores: int
    """Physical NeuronCores."""
    bf16_flops: float
    fp8_flops: float
    fp32_flops: float
    memory_bytes: int
    """Device memory."""


CHIPS = {
    "trn1": TrainiumChip(2, 190e12, 190e12, 47.5e12, 32 << 30),
    "trn2": TrainiumChip(8, 667e12, 1299e12, 181e12, 96 << 30),
    "trn3": TrainiumChip(8, 671e12, 2517e12, 183e12, 144 << 30),
}
LNC_CHOICES = {"trn1": (1,), "trn2": (2, 1), "trn3": (2, 1)}
"""Physical cores per rank (LNC) that each generation supports; the first is the default."""
CORES_PER_INSTANCE = {("trn1", 1): 32, ("trn2", 1): 128, ("trn2", 2): 64}
"""Logical cores of an instance with a fixed topology, by generation and LNC."""
INSTANCES = {2: "trn1.2xlarge", 4: "trn2.3xlarge", 32: "trn1.32xlarge", 64: "trn2.48xlarge", 128: "trn2.48xlarge"}
"""By the number of their ranks; trn2 has 64 (two physical cores each) or 128."""
UNSUPPORTED_GROUPS = {("trn2", 2, 8), ("trn2", 1, 16)}
"""(generation, LNC, size) of consecutive cores that the runtime cannot connect. NxD documents them as unsupported, and
users report that creating a group of 8 ranks fails on trn2, while 2, 4 and 16 work."""
GROUP_STRIDES = {4: 8}
"""trn1: distance between the cores of a group, by group size."""
COLLECTIVE_KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send")


def check_lnc(generation: str, lnc: int) -> None:
    if lnc not in LNC_CHOICES.get(generation, ()):
        pairs = [(name, size) for name, sizes in LNC_CHOICES.items() for size in sorted(sizes)]
        supported = ", ".join(f"{name} with LNC {size}" for name, size in pairs)
        raise UserError(f"{generation} with LNC {lnc}: not supported; supported: {supported}")


def rank_flops(generation: str, lnc: int, dtype: str) -> float:
    """Dense FLOP/s of one rank; `dtype` is bf16, fp8 or fp32."""
    chip = CHIPS[generation]
    return {"bf16": chip.bf16_flops, "fp8": chip.fp8_flops, "fp32": chip.fp32_flops}[dtype] / chip.cores * lnc


def rank_memory_bytes(generation: str, lnc: int) -> int:
    """Memory of one rank: its cores' share of the chip."""
    chip = CHIPS[generation]
    return chip.memory_bytes // chip.cores * lnc


def rank_order(generation: str, lnc: int, tp: int, world_size: int) -> list[int]:
    """The rank at each position of a layout: position i of `[pp][dp][cp][tp]` is core `order[i]`."""
    check_lnc(generation, lnc)
    if (generation, lnc, tp) in UNSUPPORTED_GROUPS:
        raise UserError(f"layout.tp={tp}: not supported on {generation} with LNC {lnc}; nearest: {tp // 2} or {tp * 2}")
    cores = CORES_PER_INSTANCE.get((generation, lnc), 0)
    order = _instance_order(generation, cores, tp) if cores else None
    if order is None or world_size % cores:
        return list(range(world_size))
    return [first + core for first in range(0, world_size, cores) for core in order]


def _instance_order(generation: str, cores: int, tp: int) -> list[int] | None:
    """Order within one instance; None for consecutive cores."""
    if generation == "trn1" and tp in GROUP_STRIDES:
        return [core for first in range(GROUP_STRIDES[tp]) for core in range(first, cores, GROUP_STRIDES[tp])]
    if generation == "trn2" and tp == cores // 2:
        row = cores // 4
        rows = [range(start, start + row) for start in range(0, cores, row)]
        return [*rows[0], *rows[3], *rows[1], *rows[2]]
    return None


def group_problem(generation: str, lnc: int, kind: str, ranks: Sequence[int]) -> str | None:
    """Why these ranks cannot run the collective `kind` (one of COLLECTIVE_KINDS), and what would work; None if no rule
    forbids it.

    The rules come from users and from the runtime's messages, not from its documentation: a group has 1, 2, 4, 8, 16 or
    a multiple of 32 ranks per instance, consecutive ranks start at a multiple of their count, and all instances
    participate with the same cores.
    """
    check_lnc(generation, lnc)
    if kind not in COLLECTIVE_KINDS:
        raise ValueError(f"{kind}: not one of {', '.join(COLLECTIVE_KINDS)}")
    size = len(ranks)
    if size < 2 or kind == "send":
        return None
    cores = CORES_PER_INSTANCE.get((generation, lnc)) or max(ranks) + 1
    cores_by_instance: dict[int, list[int]] = {}
    for rank in sorted(ranks):
        cores_by_instance.setdefault(rank // cores, []).append(rank % cores)
    first, *others = cores_by_instance.values()
    if any(cores_used != first for cores_used in others):
        return "instances participate with different cores; nearest: the same cores on each"
    if kind == "all_to_all" and not (size in (4, 8, 16) or size % 32 == 0):
        return f"{size} ranks: all_to_all needs 4, 8, 16 or a multiple of 32"
    return _instance_group_problem(generation, lnc, kind, first, cores)


def _instance_group_problem(generation: str, lnc: int, kind: str, cores_used: list[int], cores: int) -> str | None:
    """`group_problem` for the cores of one instance."""
    size = len(cores_used)
    if size not in (1, 2, 4, 8, 16) and size % 32:
        return f"{size} ranks on an instance: a group has 1, 2, 4, 8, 16 or a multiple of 32"
    if size == 1 or (kind != "all_to_all" and cores_used in _preferred_groups(generation, cores, size)):
        return None
    step = cores_used[1] - cores_used[0]
    if any(after - before != step for before, after in pairwise(cores_used)):
        return "the ranks are not evenly spaced; nearest: consecutive ranks"
    if generation == "trn1" and step > 1 and kind == "all_to_all":
        return f"every {step}th core: all_to_all on trn1 needs consecutive cores"
    if step > 1:
        return None
    if cores_used[0] % min(size, 32):
        aligned = cores_used[0] // size * size
        return (
            f"{size} consecutive ranks from {cores_used[0]}: not aligned; nearest: from {aligned} or {aligned + size}"
        )
    if (generation, lnc, size) in UNSUPPORTED_GROUPS:
        near = f"{size // 2} or {size * 2}"
        return f"{size} consecutive ranks: unsupported on {generation} with LNC {lnc}; nearest: {near}"
    if generation == "trn1" and size in GROUP_STRIDES:
        return f"{size} consecutive ranks: unsupported on trn1; nearest: every {GROUP_STRIDES[size]}th core"
    return None


def _preferred_groups(generation: str, cores: int, size: int) -> list[list[int]]:
    """Groups of this size that `rank_order` makes of cores that are not consecutive."""
    order = _instance_order(generation, cores, size) or []
    return [sorted(order[start : start + size]) for start in range(0, len(order), size)]


PLATFORM_VARIABLE = "NEURON_PLATFORM_TARGET_OVERRIDE"
"""AWS's variable for machines that cannot tell their type, such as containers and compile hosts."""


class TrainiumInstance(NamedTuple):
    """The EC2 instance this process runs on."""

    generation: str | None
    """trn1, trn2 or trn3; None on any other machine."""
    chips: int
    """Chips that the driver reports."""
    instance_type: str
    """EC2 instance type, such as trn2.48xlarge."""


def parse_generation(product_name: str) -> str | None:
    """Generation of an instance type: trn1n.32xlarge is trn1, trn2u.48xlarge is trn2."""
    return next((name for name in CHIPS if product_name.lower().startswith(name)), None)


def detect_instance(root: Path = Path("/"), environ: Mapping[str, str] = os.environ) -> TrainiumInstance:
    """Read the instance type, which EC2 puts into the DMI product name, and count the device files."""
    try:
        product_name = (root / "sys/devices/virtual/dmi/id/product_name").read_text().strip()
    except (OSError, UnicodeDecodeError):
        product_name = ""
    chips = sum(path.name.removeprefix("neuron").isdigit() for path in (root / "dev").glob("neuron*"))
    return TrainiumInstance(
        parse_generation(environ.get(PLATFORM_VARIABLE, "")) or parse_generation(product_name), chips, product_name
    )


def installed_version(package: str) -> tuple[int, int] | None:
    """Major and minor version of a package; None if it is not installed."""
    try:
        major, minor, *_ = metadata.version(package).split(".")
        return int(major), int(minor)
    except (metadata.PackageNotFoundError, ValueError):
        return None
