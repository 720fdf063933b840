"""Copies of the training state in host memory: every K steps, each rank writes its shard to a file system in memory and
sends it to a rank of the next host. The loss of one host then costs at most K steps, and no shared storage is read.

A thread of each rank stores and sends. Its progress rides on the all-reduce of every step, as that of a checkpoint
does; when all ranks have stored a copy, the one before it is removed.
"""

import logging
import shutil
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from trainyard.checkpoint import checkpoint
from trainyard.checkpoint.file_names import shard_name, step_directory
from trainyard.core.errors import UserError
from trainyard.core.quantities import shortage_text
from trainyard.core.world import World
from trainyard.run.checkpointing.memory_files import (
    TIMEOUT,
    FileTransfer,
    host_identity,
    run_storage,
    transfer_files,
    write_manifest,
)
from trainyard.run.checkpointing.rng_state import capture_rng_state
from trainyard.run.checkpointing.saver import Saver
from trainyard.run.checkpointing.state_writer import PendingSave, StateSaver, StateWriter
from trainyard.train.status import StepStatus

COPIES_PER_HOST = 4
"""Shards of each rank that its host holds at most: of two steps, its own and that of another host."""
logger = logging.getLogger(__name__)


class InMemorySaver(StateSaver):
    """Starts, tracks and removes the copies of a run in host memory."""

    def __init__(self, saver: Saver, state_writer: StateWriter, world: World, completed_steps: int) -> None:
        """A copy of step `completed_steps`, from which this run may have resumed, stays until there is a newer one; all
        others are removed. A step that `saver` saves is not copied as well."""
        super().__init__(state_writer)
        self.saver, self.spans, self.world = saver, saver.spans, world
        self.section = state_writer.config.checkpoint
        self.device, self.mesh = state_writer.context.device, state_writer.context.mesh
        self.storage = run_storage(self.section.memory_directory, state_writer.run.run_id)
        self.successor, self.predecessor = self._neighbors()
        self.group: Any = None
        if self.successor != world.rank:
            self.group = dist.new_group(backend="gloo", timeout=TIMEOUT)
        self._remove_except(completed_steps)
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
            where = self.section.memory_directory
            problem = f"{where}: copies of the state: {shortage_text(need, free)}"
        for line in self.mesh.all_gather_object(problem):
            if line:
                raise UserError(f"checkpoint.memory_every={self.section.memory_every}: {line}")

    def complete_step(self, step: int) -> None:
        """Copy the state after `step`, if that is due. All ranks decide alike. A copy in progress is not overtaken."""
        if self.saver.save_due(step) or step % self.section.memory_every or self.current:
            return
        with self.spans("save"):
            save = self.current = self.state_writer.new_save(self.storage, step, time.monotonic())
            write_shard = self.state_writer.start_copy(save, capture_rng_state(self.device))
            save.write_in_thread(partial(self._store, save, write_shard))

    def flags(self, save: PendingSave) -> dict[str, float]:
        return {"copy_stored": float(save.shard_written), "copy_failed": float(bool(save.error))}

    def advance(self, save: PendingSave, status: StepStatus) -> None:
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

    def _store(self, save: PendingSave, write_shard: Callable[[], None]) -> None:
        directory = self.storage / step_directory(save.step)
        directory.mkdir()
        write_shard()
        write_manifest(directory, {**save.manifest, "world_size": self.world.size})
        if self.group:
            self._exchange(directory.path)

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
