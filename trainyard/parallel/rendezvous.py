"""The ranks of a run meet at the store of rank 0, before any of them creates a process group."""

import os
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from trainyard.core.errors import UserError
from trainyard.core.world import World

RENDEZVOUS_TIMEOUT = timedelta(minutes=10)
"""Limit of the wait for ranks that have not started yet."""


def meet_all_ranks(world: World) -> Any:
    """Return the run's torch.distributed store. Raises UserError if ranks do not arrive, or if two processes have one
    rank."""
    os.environ |= world.torchrun_variables()  # torch, packages of devices and user functions read these
    place = f"MASTER_ADDR={world.master_addr} MASTER_PORT={world.master_port}"
    try:
        store: Any = next(rendezvous("env://", world.rank, world.size, timeout=RENDEZVOUS_TIMEOUT))[0]
        claims = store.add(f"trainyard/rank {world.rank}", 1)
    except (dist.DistNetworkError, dist.DistStoreError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"{place}: rank {world.rank} of {world.size} cannot meet the others: {reason}") from None
    if claims > 1:
        raise UserError(f"{place}: another process is rank {world.rank} too, of this run or of another one")
    return store
