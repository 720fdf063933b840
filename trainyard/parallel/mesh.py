"""The process groups of a layout. All ranks create them together, once."""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Self, TypeVar

import torch.distributed as dist

from trainyard import compat
from trainyard.core.errors import UserError
from trainyard.core.splits import ModelShard
from trainyard.core.world import World
from trainyard.devices import Device
from trainyard.parallel.layout import AxisName, Layout
from trainyard.parallel.process_group import Group, NestedGroup
from trainyard.parallel.rendezvous import meet_all_ranks

T = TypeVar("T")
SINGLE_RANK = Group()
TIMEOUT = timedelta(minutes=30)
"""Limit of a collective's wait for other ranks, which may be compiling or waiting for a slow disk."""


@dataclass(frozen=True)
class Mesh:
    """All process groups of a run, as one rank sees them."""

    layout: Layout
    layout_rank: int = 0
    """This rank's index in the layout. It differs from the global rank if the device reorders ranks."""
    local_rank: int = 0
    """Index among the ranks of this host."""
    tp: Group = SINGLE_RANK
    cp: Group = SINGLE_RANK
    pp: Group = SINGLE_RANK
    dp_cp: Group = SINGLE_RANK
    """The ranks that hold the same weights, except those of experts, and see different tokens."""
    ep: Group = SINGLE_RANK
    """The ranks that divide the experts, adjacent ones of `dp_cp`."""
    expert_dp: Group = SINGLE_RANK
    """The ranks of `dp_cp` that hold the same experts; `dp_cp` itself without expert parallelism."""
    dp_cp_tp: Group = SINGLE_RANK
    """All ranks of a pipeline rank, sorted by global rank, as `world` is."""
    world: Group = SINGLE_RANK
    kv_replicas: Group = SINGLE_RANK
    """Tensor-parallel ranks that hold the same kv heads."""
    rank_order: tuple[int, ...] = (0,)
    """The global rank at each index of the layout."""
    tied_embedding: Group = SINGLE_RANK
    """The first and last pipeline ranks, which both hold a tied embedding; for other ranks a group of one."""
    object_group: dist.ProcessGroup | None = None
    """A gloo group of all ranks for pickled objects; None if the device's process group carries them."""
    store: Any = None
    """The store where the ranks met, a connection of its own for threads; None on one rank."""

    @property
    def coords(self) -> dict[AxisName, int]:
        return self.layout.coords(self.layout_rank)

    @property
    def model_shard(self) -> ModelShard:
        """The part of every parameter that this rank holds."""
        return self.layout.model_shard(self.layout_rank)

    def data_group(self, of_experts: bool) -> Group:
        """The ranks that hold the same values of a parameter."""
        return self.expert_dp if of_experts else self.dp_cp

    @classmethod
    def create(cls, layout: Layout, device: Device, world: World, rank_order: list[int] | None = None) -> Self:
        """Create all groups. `rank_order` is the global rank at each index of the layout, if the device needs one."""
        if world.size == 1:
            return cls(layout, local_rank=world.local_rank)
        thread_store = None
        if not dist.is_initialized():
            store, backend = meet_all_ranks(world), device.process_group_backend
            store.set_timeout(TIMEOUT)
            dist.init_process_group(backend, store=store, rank=world.rank, world_size=world.size, timeout=TIMEOUT)
            device.join_world(world)
            thread_store = store.clone()
        order = rank_order or list(range(world.size))

        def create_group(
            members_by_group: list[list[int]], name: str = "", sort: bool = False, alone: bool = False
        ) -> Group:
            """The group of this rank, with members in layout order or, for sums only, sorted by global rank. With
            `alone`, groups of one rank are process groups, too."""
            own_group = Group((world.rank,))
            groups = [[order[index] for index in members] for members in members_by_group if len(members) > 1]
            if sort:
                groups = [sorted(members) for members in groups]
            if alone and not groups:  # torch's FSDP takes a process group also for the experts of no other rank
                handle = dist.new_group([world.rank], timeout=TIMEOUT, use_local_synchronization=True)
                own_group = Group((world.rank,), 0, handle.group_name, handle)
            for members in groups:  # every rank creates every group, its own or not: new_group is a collective
                is_sorted = members == sorted(members)
                if is_sorted:
                    handle = dist.new_group(members, timeout=TIMEOUT)
                elif compat.supports_unsorted_groups():
                    handle = compat.new_unsorted_group(members, TIMEOUT)
                else:
                    raise UserError(f"this device's order of ranks ({members[:4]}, ...): needs torch 2.13 or newer")
                if world.rank in members:
                    group_name = compat.register_group_name(name, handle) if name else handle.group_name
                    own_rank, collectives = members.index(world.rank), device.collectives(groups)
                    own_group = Group(tuple(members), own_rank, group_name, handle, collectives)
            return own_group

        def along(*axes: AxisName, name: str = "", sort: bool = False) -> Group:
            return create_group(layout.groups(*axes), name, sort)

        last_pp_rank = layout.stage_owner(layout.pp * layout.vpp - 1)
        tp = along("tp", name="trainyard.tp")  # a fixed name: it is in the graphs of blocks, equal on every rank
        kv_replicas = [
            members[first : first + layout.kv_replication]
            for members in layout.groups("tp")
            for first in range(0, layout.tp, layout.kv_replication)
        ]
        dp_cp = along("dp", "cp")
        supported = all(device.supports_group([order[index] for index in members]) for members in kv_replicas)
        return cls(
            layout,
            order.index(world.rank),
            world.local_rank,
            tp=tp,
            cp=along("cp", name="trainyard.cp"),
            pp=along("pp"),
            dp_cp=dp_cp,
            ep=create_group(layout.expert_groups(), "trainyard.ep"),
            expert_dp=create_group(layout.expert_data_groups(), alone=True) if layout.ep > 1 else dp_cp,
            rank_order=tuple(order),
            dp_cp_tp=along("dp", "cp", "tp", sort=True),
            world=along("pp", "dp", "cp", "tp", sort=True),
            kv_replicas=create_group(kv_replicas)
            if supported
            else NestedGroup.contiguous(tp, layout.kv_replication, device.torch_device),
            tied_embedding=create_group(
                [[members[0], members[last_pp_rank]] for members in layout.groups("pp")] if last_pp_rank else []
            ),
            object_group=None if device.carries_objects else dist.new_group(backend="gloo", timeout=TIMEOUT),
            store=thread_store,
        )

    def broadcast_object(self, make: Callable[[], T], device: Device) -> T:
        """Call `make` on the first rank of the layout and return its result, or raise its UserError, on all ranks."""
        if self.world.size == 1:
            return make()
        objects: list[Any] = [None]
        if self.layout_rank == 0:
            try:
                objects = [make()]
            except UserError as error:
                objects = [error]
        handle = None if self.object_group else device.torch_device
        dist.broadcast_object_list(objects, src=self.rank_order[0], group=self.object_group, device=handle)
        if isinstance(objects[0], UserError):
            raise objects[0]
        return objects[0]

    def all_gather_object(self, value: T) -> list[T]:
        """The values of all ranks, in layout order."""
        if self.world.size == 1:
            return [value]
        values: list[Any] = [None] * self.world.size
        dist.all_gather_object(values, value, group=self.object_group)
        return [values[rank] for rank in self.rank_order]


def shutdown_distributed() -> None:
    """Destroy the process groups before a rank exits: gloo's threads sometimes abort an interpreter that shuts down."""
    if dist.is_initialized():
        dist.destroy_process_group()
