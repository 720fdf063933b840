"""Ranks as XLA knows them on a CPU: replicas, each a thread of one process. (Several processes do not see each other.)

Every thread has a Trainer of its own. What a launcher says to processes, which rank of how many, is said to threads
here; the groups are the device's own, as `Mesh.join` makes them.
"""

from collections.abc import Callable
from threading import Barrier
from typing import Any, TypeVar
from unittest.mock import patch

import torch_xla
import torch_xla.runtime as xla_runtime
from torch_xla._internal import pjrt

from trainyard.devices import Device
from trainyard.devices.neuron.xla_device import XlaDevice
from trainyard.parallel.layout import AxisName, Layout
from trainyard.parallel.mesh import Mesh
from trainyard.parallel.process_group import Group
from trainyard.train import trainer

T = TypeVar("T")
VARIABLES = {
    "NPROC": "16",  # threads of XLA's CPU client: each rank's collectives hold one while they wait for the others
    "XLA_THREAD_POOL_SIZE": "16",
    "XLA_ENABLE_PARAM_ALIASING": "0",
}


def mesh_of(layout: Layout, rank: int, device: Device) -> Mesh:
    """The groups of `rank`, whoever the other ranks are."""

    def over(*dimensions: AxisName) -> Group:
        lists = layout.groups(*dimensions)
        mine = next(ranks for ranks in lists if rank in ranks)
        return Group(tuple(mine), mine.index(rank), "-".join(dimensions), None, device.collectives(lists))

    return Mesh(
        layout,
        rank,
        tp=over("tp"),
        cp=over("cp"),
        pp=over("pp"),
        dp_cp=over("dp", "cp"),
        dp_cp_tp=over("dp", "cp", "tp"),
        world=over("pp", "dp", "cp", "tp"),
    )


class Replica(XlaDevice):
    """Rank 0 compiles; the others then find what it has compiled."""

    def __init__(self, barrier: Barrier) -> None:
        super().__init__()
        self.barrier = barrier

    def flush(self) -> None:
        first = xla_runtime.global_ordinal() == 0
        if first:
            torch_xla.sync()
        self.barrier.wait()
        if not first:
            torch_xla.sync()


def together(ranks: int, job: Callable[[Replica], T]) -> dict[int, T]:
    """What `job` gives on each of so many replicas. CPU_NUM_DEVICES must be their number."""
    barrier = Barrier(ranks)

    def one() -> T:
        assert xla_runtime.world_size() == ranks
        try:
            return job(Replica(barrier))
        except BaseException:
            barrier.abort()
            raise

    def join(layout: Layout, device: Device, order: Any) -> Mesh:
        return mesh_of(layout, xla_runtime.global_ordinal(), device)

    with (
        patch.object(trainer, "world", lambda: (xla_runtime.global_ordinal(), ranks)),
        patch.object(Mesh, "join", join),
    ):
        return pjrt._run_thread_per_device(0, 1, one, pjrt.initialize_multiprocess)
