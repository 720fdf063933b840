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
from trainyard.parallel.layout import Dimension, Layout
from trainyard.parallel.nested_group import Within
from trainyard.parallel.process_group import Group

T = TypeVar("T")
ALONE = Group()
WAIT = timedelta(minutes=30)
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
    rank: int = 0
    tp: Group = ALONE
    cp: Group = ALONE
    pp: Group = ALONE
    data: Group = ALONE
    """dp x cp: the ranks that hold the same weights and see different tokens."""
    stage: Group = ALONE
    """dp x cp x tp: all ranks of a pipeline rank, in the order of their numbers, as `everyone` is."""
    everyone: Group = ALONE
    copies: Group = ALONE
    """Tensor-parallel ranks that hold the same kv heads."""
    physical: tuple[int, ...] = (0,)
    """The rank at each place of the layout."""
    tied: Group = ALONE
    """First and last pipeline rank, where a tied embedding lives twice; alone for those in between."""

    @property
    def place(self) -> dict[Dimension, int]:
        return self.layout.place(self.rank)

    @classmethod
    def join(cls, layout: Layout, device: Device, order: list[int] | None = None) -> Self:
        """Meet the other ranks. `order` is the physical rank at each place of the layout, where the device cares."""
        rank, ranks = world()
        if ranks == 1:
            return cls(layout)
        if not dist.is_initialized():
            dist.init_process_group(device.process_group, timeout=WAIT)
        physical = order or list(range(ranks))
        here = physical.index(rank)

        def group(lists: list[list[int]], name: str = "", in_places: bool = True) -> Group:
            """Ranks in the order of their places or, for sums alone, of their numbers."""
            mine = Group((rank,))
            everywhere = [[physical[place] for place in places] for places in lists if len(places) > 1]
            if not in_places:
                everywhere = [sorted(members) for members in everywhere]
            for members in everywhere:
                in_order = members == sorted(members)
                if not (in_order or compat.keeps_order()):
                    raise UserError(f"this device's order of ranks ({members[:4]}, ...): needs torch 2.13 or newer")
                handle = dist.new_group(members, timeout=WAIT) if in_order else compat.ordered_group(members, WAIT)
                if rank in members:
                    known = compat.name_group(name, handle) if name else handle.group_name
                    own = device.collectives(everywhere)
                    mine = Group(tuple(members), members.index(rank), known, handle, own)
            return mine

        def over(*dimensions: Dimension, name: str = "", in_places: bool = True) -> Group:
            return group(layout.groups(*dimensions), name, in_places)

        last = layout.holder(layout.pp * layout.vpp - 1)
        tp = over("tp", name="trainyard.tp")  # in the graphs of blocks, which are the same on every rank
        copies = [
            each[first : first + layout.copies]
            for each in layout.groups("tp")
            for first in range(0, layout.tp, layout.copies)
        ]
        apart = all(device.takes([physical[place] for place in places]) for places in copies)
        return cls(
            layout,
            here,
            tp=tp,
            cp=over("cp", name="trainyard.cp"),
            pp=over("pp"),
            data=over("dp", "cp"),
            physical=tuple(physical),
            stage=over("dp", "cp", "tp", in_places=False),
            everyone=over("pp", "dp", "cp", "tp", in_places=False),
            copies=group(copies) if apart else Within.neighbours(tp, layout.copies, device.handle),
            tied=group([[each[0], each[last]] for each in layout.groups("pp")] if last else []),
        )

    def agree(self, make: Callable[[], T], device: Device) -> T:
        """What rank 0 makes, known to all."""
        if self.everyone.size == 1:
            return make()
        box: list[Any] = [make() if self.rank == 0 else None]
        dist.broadcast_object_list(box, src=self.physical[0], device=device.handle)
        return box[0]

    def collect(self, mine: T) -> list[T]:
        """What every rank has, known to all, in the order of places."""
        if self.everyone.size == 1:
            return [mine]
        out: list[Any] = [None] * self.everyone.size
        dist.all_gather_object(out, mine)
        return [out[rank] for rank in self.physical]


def leave() -> None:
    """Before a rank ends: gloo's threads do not outlive the interpreter, and now and then abort it."""
    if dist.is_initialized():
        dist.destroy_process_group()
