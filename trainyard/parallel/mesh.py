"""The process groups of a layout, made once and together by all ranks."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Self, TypeVar

import torch.distributed as dist

from trainyard import compat
from trainyard.core.errors import UserError
from trainyard.devices import Device
from trainyard.parallel.layout import AxisName, Layout
from trainyard.parallel.nested_group import NestedGroup
from trainyard.parallel.process_group import Group

T = TypeVar("T")
SINGLE_RANK = Group()
TIMEOUT = timedelta(minutes=30)
"""How long a rank waits for the others; a compile or a slow disk may hold one up."""


def world() -> tuple[int, int]:
    """(rank, ranks) that the launcher gave this process; (0, 1) when it runs alone."""
    try:
        return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    except ValueError:
        raise UserError(
            f"RANK={os.environ.get('RANK')} WORLD_SIZE={os.environ.get('WORLD_SIZE')}: must be numbers"
        ) from None


def local_rank() -> int:
    """Which of this machine's devices is ours."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def local_ranks() -> int:
    """Ranks of this machine, as far as the launcher says."""
    return int(os.environ.get("LOCAL_WORLD_SIZE") or 1)


@dataclass(frozen=True)
class Mesh:
    """Every group that a run needs. A group's name says what its ranks share or sum."""

    layout: Layout
    layout_rank: int = 0
    tp: Group = SINGLE_RANK
    cp: Group = SINGLE_RANK
    pp: Group = SINGLE_RANK
    dp_cp: Group = SINGLE_RANK
    """dp x cp: the ranks that hold the same weights and see different tokens."""
    dp_cp_tp: Group = SINGLE_RANK
    """dp x cp x tp: all ranks of a pipeline rank, in the order of their numbers, as `everyone` is."""
    world: Group = SINGLE_RANK
    kv_replicas: Group = SINGLE_RANK
    """Tensor-parallel ranks that hold the same kv heads."""
    rank_order: tuple[int, ...] = (0,)
    """The rank at each place of the layout."""
    tied_embedding: Group = SINGLE_RANK
    """First and last pipeline rank, where a tied embedding lives twice; alone for those in between."""

    @property
    def coords(self) -> dict[AxisName, int]:
        return self.layout.coords(self.layout_rank)

    @classmethod
    def create(cls, layout: Layout, device: Device, rank_order: list[int] | None = None) -> Self:
        """Meet the other ranks. `order` is the physical rank at each place of the layout, where the device cares."""
        rank, ranks = world()
        if ranks == 1:
            return cls(layout)
        if not dist.is_initialized():
            dist.init_process_group(device.process_group_backend, timeout=TIMEOUT)
        physical = rank_order or list(range(ranks))
        here = physical.index(rank)

        def group(lists: list[list[int]], name: str = "", in_places: bool = True) -> Group:
            """Ranks in the order of their places or, for sums alone, of their numbers."""
            mine = Group((rank,))
            everywhere = [[physical[place] for place in places] for places in lists if len(places) > 1]
            if not in_places:
                everywhere = [sorted(members) for members in everywhere]
            for members in everywhere:
                in_order = members == sorted(members)
                if not (in_order or compat.supports_unsorted_groups()):
                    raise UserError(f"this device's order of ranks ({members[:4]}, ...): needs torch 2.13 or newer")
                handle = (
                    dist.new_group(members, timeout=TIMEOUT)
                    if in_order
                    else compat.new_unsorted_group(members, TIMEOUT)
                )
                if rank in members:
                    known = compat.register_group_name(name, handle) if name else handle.group_name
                    own = device.collectives(everywhere)
                    mine = Group(tuple(members), members.index(rank), known, handle, own)
            return mine

        def over(*dimensions: AxisName, name: str = "", in_places: bool = True) -> Group:
            return group(layout.groups(*dimensions), name, in_places)

        last = layout.stage_owner(layout.pp * layout.vpp - 1)
        tp = over("tp", name="trainyard.tp")  # in the graphs of blocks, which are the same on every rank
        copies = [
            each[first : first + layout.kv_replication]
            for each in layout.groups("tp")
            for first in range(0, layout.tp, layout.kv_replication)
        ]
        apart = all(device.supports_group([physical[place] for place in places]) for places in copies)
        return cls(
            layout,
            here,
            tp=tp,
            cp=over("cp", name="trainyard.cp"),
            pp=over("pp"),
            dp_cp=over("dp", "cp"),
            rank_order=tuple(physical),
            dp_cp_tp=over("dp", "cp", "tp", in_places=False),
            world=over("pp", "dp", "cp", "tp", in_places=False),
            kv_replicas=group(copies)
            if apart
            else NestedGroup.contiguous(tp, layout.kv_replication, device.torch_device),
            tied_embedding=group([[each[0], each[last]] for each in layout.groups("pp")] if last else []),
        )

    def broadcast_object(self, make: Callable[[], T], device: Device) -> T:
        """What rank 0 makes, known to all."""
        if self.world.size == 1:
            return make()
        box: list[Any] = [make() if self.layout_rank == 0 else None]
        dist.broadcast_object_list(box, src=self.rank_order[0], device=device.torch_device)
        return box[0]

    def all_gather_object(self, value: T) -> list[T]:
        """What every rank has, known to all, in the order of places."""
        if self.world.size == 1:
            return [value]
        out: list[Any] = [None] * self.world.size
        dist.all_gather_object(out, value)
        return [out[rank] for rank in self.rank_order]


def shutdown_distributed() -> None:
    """Before a rank ends: gloo's threads do not outlive the interpreter, and now and then abort it."""
    if dist.is_initialized():
        dist.destroy_process_group()
