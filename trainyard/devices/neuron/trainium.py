"""What the devices of a Trainium have in common: rank order, group rules, figures of the chip, settings of a rank."""

import os
from collections.abc import Sequence

import torch

from trainyard.core.errors import UserError
from trainyard.core.quantities import counted
from trainyard.core.world import World
from trainyard.devices.base import Device, PeakThroughput
from trainyard.devices.builtin.neuron import DEVICE
from trainyard.devices.meta import MetaDevice
from trainyard.devices.neuron.environment import PROCESS_START_ENV, check_precision, merge_env, resolve_lnc
from trainyard.devices.neuron.topology import (
    CHIPS,
    TrainiumInstance,
    detect_instance,
    group_problem,
    rank_flops,
    rank_memory_bytes,
    rank_order,
)


class TrainiumTopology(Device):
    """What holds for a Trainium with or without memory: above all the rank order and the groups of the chip."""

    kind = DEVICE
    generation: str | None
    """trn1, trn2 or trn3; None on another device, without rules."""
    lnc: int
    """Physical NeuronCores per rank."""

    def rank_order(self, tp: int, world_size: int) -> list[int] | None:
        order = rank_order(self.generation, self.lnc, tp, world_size) if self.generation else []
        return None if order == sorted(order) else order

    def supports_group(self, ranks: Sequence[int]) -> bool:
        return not self.generation or group_problem(self.generation, self.lnc, "all_reduce", ranks) is None


class TrainiumDevice(TrainiumTopology):
    synchronous = False
    carries_objects = False  # the chip has 32-bit integers, and XLA would compile a graph for each size

    def __init__(self, instance: TrainiumInstance | None = None) -> None:
        self.instance = instance or detect_instance()
        self.generation = self.instance.generation
        self.lnc = resolve_lnc(self.generation, None, os.environ) if self.generation else 1

    def max_local_ranks(self) -> int:
        return self.instance.chips * CHIPS[self.generation].cores // self.lnc if self.generation else 1

    def memory_gib(self) -> float:
        assert self.generation
        return rank_memory_bytes(self.generation, self.lnc) / 2**30

    def peak_throughput(self, dtype: torch.dtype) -> PeakThroughput | None:
        if not self.generation:
            return None
        flops = rank_flops(self.generation, self.lnc, "fp32" if dtype == torch.float32 else "bf16")
        return PeakThroughput(flops, f"{self.generation} data sheet, dense, LNC {self.lnc}")

    @property
    def init_device(self) -> torch.device:
        return torch.device("cpu")  # the chip has 32-bit integers only, and this avoids compiling

    def rank_environment(self) -> dict[str, str]:
        return merge_env(PROCESS_START_ENV, os.environ)

    def check_rank(self, world: World, precision: str, lnc: int | None) -> None:
        """Check the settings of a rank, and choose the LNC."""
        if self.generation:
            check_precision(precision)
            self.lnc = resolve_lnc(self.generation, lnc, os.environ)
            cores = self.max_local_ranks()
            if world.local_rank >= cores:
                raise UserError(
                    f"local rank {world.local_rank}: this machine has {counted(cores, 'core')}, one per rank"
                )


class MetaTrainium(TrainiumTopology, MetaDevice):
    """A Trainium without memory: the meta device with the rank order and group rules of the chip. Audits use it on
    machines without the chip; it computes nothing, and `select` never returns it."""

    def __init__(self, generation: str, lnc: int) -> None:
        self.generation: str = generation
        self.lnc = lnc
