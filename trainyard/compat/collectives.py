"""Functional collectives on plain local tensors, process groups with extra names, and fake process groups.

Holds for torch 2.11 to 2.14. Each collective starts the work and returns a tensor that must pass through `wait` before
it is read, so that the caller decides what overlaps.
"""

from datetime import timedelta
from itertools import count
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor


def all_reduce(x: Tensor, group: str, op: str = "sum") -> Tensor:
    return torch.ops._c10d_functional.all_reduce(x.contiguous(), op, group)


def all_reduce_(x: Tensor, group: str) -> Tensor:
    """All-reduce (sum) in place, on a contiguous tensor."""
    return torch.ops._c10d_functional.all_reduce_(x, "sum", group)


def all_gather(x: Tensor, size: int, group: str) -> Tensor:
    """Gather [n, ...] from each of `size` ranks to [size * n, ...], in rank order."""
    if not _emulate_with_all_reduce(x):
        return torch.ops._c10d_functional.all_gather_into_tensor(x.contiguous(), size, group)
    out = x.new_zeros(size, *x.shape)
    out[group_rank(group)] = x
    wait(all_reduce_(out.view(-1).view(torch.uint8), group))  # bytes plus zeros: the bits do not change
    return out.flatten(0, 1)


def reduce_scatter(x: Tensor, size: int, group: str) -> Tensor:
    """Sum [size * n, ...] over ranks and return this rank's [n, ...]."""
    if not _emulate_with_all_reduce(x):
        return torch.ops._c10d_functional.reduce_scatter_tensor(x.contiguous(), "sum", size, group)
    return wait(all_reduce(x, group)).chunk(size)[group_rank(group)].clone()


def _emulate_with_all_reduce(x: Tensor) -> bool:
    """True if gathers and scatters are emulated with all-reduce: on a CPU, outside compiled code (whose graph must not
    depend on the rank). With two functional gathers or scatters in flight on gloo, torch 2.13 and 2.14 corrupt memory
    or hang about once in ten thousand calls; all-reduce does not (scripts/repro_gloo_all_gather.py)."""
    return x.is_cpu and not torch.compiler.is_compiling()


def sendrecv(x: Tensor, destination: int, source: int, size: int, group: str) -> Tensor:
    """Send `x` to group rank `destination` and receive a tensor of the same shape from group rank `source`."""
    flat = x.contiguous().view(-1)
    send, receive = [0] * size, [0] * size
    send[destination] = receive[source] = flat.numel()
    return torch.ops._c10d_functional.all_to_all_single(flat, receive, send, group)


def all_to_all(x: Tensor, receive: list[int], send: list[int], group: str) -> Tensor:
    """Send the first `send[0]` rows of `x` to rank 0 of the group, the next `send[1]` to rank 1, and so on, and receive
    `receive[r]` rows from each rank r, in rank order."""
    return torch.ops._c10d_functional.all_to_all_single(x.contiguous(), receive, send, group)


WAIT_TENSOR = torch.ops._c10d_functional.wait_tensor.default
"""The operator of `wait`. It returns its input; torch's rule for the meta device, once imported, makes a new tensor."""


def wait(x: Tensor) -> Tensor:
    return torch.ops._c10d_functional.wait_tensor(x)


def group_rank(group: str) -> int:
    """This process's rank in the group with this name, resolved as functional collectives do (torch 2.11 to 2.14)."""
    return torch._C._distributed_c10d._resolve_process_group(cast(Any, group)).rank()


def register_group_name(name: str, group: dist.ProcessGroup) -> str:
    """Register a second name for a group and return it (torch 2.11 to 2.14).

    torch numbers its groups, so ranks of one stage would have different graphs; with a name chosen by the caller they
    have the same. If the name belongs to a group of other ranks, as after an earlier Trainer in this process, a suffix
    is added.
    """
    ranks = dist.get_process_group_ranks(group)
    for suffix in count(1):
        candidate: Any = name if suffix == 1 else f"{name}.{suffix}"
        try:
            existing = torch._C._distributed_c10d._resolve_process_group(candidate)
        except RuntimeError:
            torch._C._distributed_c10d._register_process_group(candidate, group)
            return str(candidate)
        if dist.get_process_group_ranks(existing) == ranks:
            return str(candidate)
    raise AssertionError


def new_unsorted_group(ranks: list[int], timeout: timedelta) -> dist.ProcessGroup:
    """Create a process group that keeps the order of its ranks (`sort_ranks`, torch 2.13 and 2.14)."""
    return dist.new_group(ranks, timeout=timeout, sort_ranks=False)


def init_fake_process_group(backend: str, rank: int, world_size: int) -> None:
    """Make this process one rank of a fake world: groups exist, but messages go nowhere (torch 2.11 to 2.14)."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group(backend, store=FakeStore(), rank=rank, world_size=world_size)


def completed_work() -> Any:
    """The handle of a collective that is already complete (torch 2.11 to 2.14)."""
    from torch._C._distributed_c10d import FakeWork

    return FakeWork().boxed()
