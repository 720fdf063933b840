"""Where a rank runs its part of a model."""

from dataclasses import dataclass

from trainyard.devices import Device
from trainyard.families.blueprint import Blueprint
from trainyard.kernels.reference import Kernels
from trainyard.parallel.mesh import Mesh


@dataclass(frozen=True)
class RankContext:
    """The device of a rank, its place among the ranks, the parameters of the full model, and the operators of its
    modules. They are fixed for the life of a run, and what builds a part of a run takes all four."""

    device: Device
    mesh: Mesh
    blueprint: Blueprint
    kernels: Kernels
