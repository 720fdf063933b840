"""Copies of the training state in host memory: every K steps, each rank writes its shard to a file system in memory and
sends it to a rank of the next host. The loss of one host then costs at most K steps, and no shared storage is read.

A thread of each rank stores and sends. Its progress rides on the all-reduce of every step, as that of a checkpoint
does; when all ranks have stored a copy, the one before it is removed.
"""

import logging
import shutil
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from trainyard.checkpoint.native import checkpoint
from trainyard.checkpoint.native.file_names import shard_name, step_directory
from trainyard.config.schema import Config
from trainyard.core.errors import UserError
from trainyard.core.quantities import shortage_text
from trainyard.core.world import World
from trainyard.devices import Device
from trainyard.families.blueprint import Blueprint
from trainyard.parallel.mesh import Mesh
from trainyard.remote.storage import LocalStorage
from trainyard.train.checkpointing.memory_files import (
    FileTransfer,
    host_identity,
    run_storage,
    transfer_files,
    write_manifest,
)
from trainyard.train.checkpointing.pending_save import PendingSave
from trainyard.train.checkpointing.rng_state import capture_rng_state
from trainyard.train.checkpointing.state_writer import StateWriter
from trainyard.train.optim.optimizer import Optimizer
from trainyard.train.status import StepStatus

COPIES_PER_HOST = 4
"""Shards of each rank that its host holds at most: of two steps, its own and that of another host."""
TIMEOUT = timedelta(minutes=30)
logger = logging.getLogger(__name__)


class MemoryCopies:
    """Starts, tracks and removes the copies of a run. At most one is in progress."""

    def __init__(
        self,
        config: Config,
        run_id: str,
        blueprint: Blueprint,
        optimizer: Optimizer,
        device: Device,
        mesh: Mesh,
        world: World,
        make_metadata: Callable[[int], dict[str, Any]],
        first_step: int,
    ) -> None:
        """`make_metadata` gives the content of the manifest of a step. A copy of `first_step`, from which this run may
        have resumed, stays until there is a newer one; all others are removed."""
        self.config, self.device, self.mesh, self.world = config, device, mesh, world
        self.make_metadata = make_metadata
        self.state_writer = StateWriter(blueprint, optimizer, device, mesh)
        self.storage = run_storage(config.checkpoint.memory_directory, run_id)
        self.successor, self.predecessor = self._neighbors()
        self.group: Any = None
        if self.successor != world.rank:
            self.group = dist.new_group(backend="gloo", timeout=TIMEOUT)
        self.current: PendingSave | None = None
        self.reported: dict[int, PendingSave | None] = {}
        """The copy whose status this rank reported with a step, until the reduced status of that step is known."""
        self._remove_except(first_step)
        self._check_space()

    def _neighbors(self) -> tuple[int, int]:
        """The global ranks with this one's position on the next host and on the previous one; itself on one host."""
        hosts = self.mesh.all_gather_object(host_identity(self.storage))
        ranks_by_host: dict[str, list[int]] = {}
        for rank, host in sorted(zip(self.mesh.rank_order, hosts, strict=True)):
            ranks_by_host.setdefault(host, []).append(rank)
        groups = list(ranks_by_host.values())
        if len({len(ranks) for ranks in groups}) > 1:
            raise UserError("checkpoint.memory_every: needs the same number of ranks on every host; nearest: 0")
        index = next(index for index, ranks in enumerate(groups) if self.world.rank in ranks)
        position = groups[index].index(self.world.rank)
        return groups[(index + 1) % len(groups)][position], groups[index - 1][position]

    def _check_space(self) -> None:
        """Raise UserError on all ranks if a host lacks memory."""
        shard = sum(piece.numel for piece in self.state_writer.slices) * self.state_writer.bytes_per_weight
        need, free = COPIES_PER_HOST * shard * self.world.local_size, self.storage.free_bytes() or 0
        problem = ""
        if free < need:
            where = self.config.checkpoint.memory_directory
            problem = f"{where}: copies of the state: {shortage_text(need, free)}"
        for line in self.mesh.all_gather_object(problem):
            if line:
                raise UserError(f"checkpoint.memory_every={self.config.checkpoint.memory_every}: {line}")

    def due(self, step: int) -> bool:
        """True if a copy of this step is to be made. A copy in progress is not overtaken."""
        return step % self.config.checkpoint.memory_every == 0 and self.current is None

    def begin(self, step: int) -> None:
        """Copy the state after `step`. All ranks call this after the same step."""
        directory = self.storage / step_directory(step)
        save = self.current = PendingSave(step, directory, self.make_metadata(step), time.monotonic())
        copies = self.state_writer.start_copy(save, capture_rng_state(self.device))
        save.run_in_thread(partial(self._store, save, directory, copies))

    def add_status(self, step: int, status: StepStatus) -> StepStatus:
        """Add this rank's flags to those that it sends with `step`."""
        save = self.reported[step] = self.current
        if not save:
            return status
        return status._replace(copy_stored=float(save.shard_written), copy_failed=float(bool(save.error)))

    def on_step_status(self, step: int, status: StepStatus) -> None:
        """Handle the flags of `step` summed over all ranks."""
        save = self.reported.pop(step, None)
        if not save or save is not self.current:
            return
        if status.copy_failed:
            save.join()
            self.current = None
            self.storage.remove(step_directory(save.step))
            line = next(filter(None, self.mesh.all_gather_object(save.error)))
            logger.warning("copy of step %s in host memory failed: %s", save.step, line)
        elif status.copy_stored == self.world.size:
            self.current = None
            self._remove_except(save.step)

    def finish(self) -> None:
        """Remove the copies at the orderly end of a run. All ranks call this."""
        if self.current:
            self.current.join()
        self.mesh.all_gather_object(None)  # no thread of this host writes any more
        if self.mesh.local_rank == 0:
            shutil.rmtree(self.storage.path, ignore_errors=True)

    def _store(self, save: PendingSave, directory: LocalStorage, wait_for_copies: Callable[[], None]) -> None:
        directory.mkdir()
        self.state_writer.write(save, wait_for_copies)
        counters = {"updates": int(save.update_count), "skipped": save.skip_counts.tolist()}
        write_manifest(directory, {**save.metadata, **counters, "world_size": self.world.size})
        if self.group:
            self._exchange(directory.path)
        save.shard_written = True

    def _exchange(self, directory: Path) -> None:
        """Send this rank's shard to the next host, and store one of the previous host."""
        own = directory / shard_name(self.mesh.layout_rank)
        numbers = torch.tensor([self.mesh.layout_rank, own.stat().st_size])
        received = torch.empty_like(numbers)
        pending = dist.isend(numbers, dst=self.successor, group=self.group)
        dist.recv(received, src=self.predecessor, group=self.group)
        if pending:
            pending.wait()
        index, file_size = received.tolist()
        other = directory / shard_name(index)
        sent, kept = (
            FileTransfer(own, self.successor, own.stat().st_size),
            FileTransfer(other, self.predecessor, file_size),
        )
        transfer_files(sent, kept, self.group)

    def _remove_except(self, step: int) -> None:
        for other in checkpoint.list_steps(self.storage):
            if other != step:
                self.storage.remove(step_directory(other))
