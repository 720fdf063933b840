"""Ranks on XLA's CPU client: replicas, each a thread of one process. (Several processes cannot communicate there.)

Each thread has its own Trainer with an explicit World; groups use the device's collectives, as in `Mesh.create`.
"""

from collections.abc import Callable
from threading import Barrier
from typing import TypeVar
from unittest.mock import patch

import torch_xla
import torch_xla.runtime as xla_runtime
from torch_xla._internal import pjrt

from trainyard.core.world import World
from trainyard.devices import Device
from trainyard.devices.neuron.xla_device import XlaDevice
from trainyard.parallel.layout import AxisName, Layout
from trainyard.parallel.mesh import Mesh
from trainyard.parallel.process_group import Group

T = TypeVar("T")
VARIABLES = {
    "NPROC": "16",  # threads of XLA's CPU client: each waiting collective occupies one
    "XLA_THREAD_POOL_SIZE": "16",
    "XLA_ENABLE_PARAM_ALIASING": "0",
}


def make_mesh(layout: Layout, rank: int, device: Device) -> Mesh:
    """The mesh of `rank`; no other rank needs to exist."""

    def make_group(name: str, groups: list[list[int]]) -> Group:
        members = next(ranks for ranks in groups if rank in ranks)
        return Group(tuple(members), members.index(rank), name, None, device.collectives(groups))

    def group(*dimensions: AxisName) -> Group:
        return make_group("-".join(dimensions), layout.groups(*dimensions))

    return Mesh(
        layout,
        rank,
        tp=group("tp"),
        cp=group("cp"),
        pp=group("pp"),
        dp_cp=group("dp", "cp"),
        ep=make_group("ep", layout.expert_groups()),
        expert_dp=make_group("expert_dp", layout.expert_data_groups()),
        dp_cp_tp=group("dp", "cp", "tp"),
        world=group("pp", "dp", "cp", "tp"),
    )


class Replica(XlaDevice):
    """Rank 0 compiles; the others find its code in the cache."""

    def __init__(self, barrier: Barrier) -> None:
        super().__init__()
        self.barrier = barrier

    def flush(self) -> None:
        is_first = xla_runtime.global_ordinal() == 0
        if is_first:
            torch_xla.sync()
        self.barrier.wait()
        if not is_first:
            torch_xla.sync()


def run_replicas(ranks: int, job: Callable[[Replica, World], T]) -> dict[int, T]:
    """Run `job` on each replica and return the results by rank. CPU_NUM_DEVICES must equal `ranks`."""
    barrier = Barrier(ranks)

    def run_replica() -> T:
        assert xla_runtime.world_size() == ranks
        try:
            return job(Replica(barrier), World(xla_runtime.global_ordinal(), ranks))
        except BaseException:
            barrier.abort()
            raise

    def create(layout: Layout, device: Device, world: World, rank_order: list[int] | None = None) -> Mesh:
        return make_mesh(layout, world.rank, device)

    with patch.object(Mesh, "create", create):
        return pjrt._run_thread_per_device(0, 1, run_replica, pjrt.initialize_multiprocess)
