"""Writes checkpoints while the steps go on.

A save has three phases. Every rank copies what it has to write to host memory, beside the next forward and backward
pass: nothing of it changes before the next update, which waits for the copy. A thread of each rank writes that copy to
its file. When all files are there, rank 0 writes the marker that makes them a checkpoint. How far a rank has come
travels with the numbers that ranks sum in every step anyway, so that all know the same at the same step and no thread
ever talks to another rank.
"""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trainyard.checkpoint.io.storage import Storage
from trainyard.checkpoint.native import checkpoint
from trainyard.checkpoint.native.partition import LocalSlice, owned_slices
from trainyard.checkpoint.native.shard_file import CorruptCheckpoint, write_shard
from trainyard.config.schema import Config
from trainyard.core.errors import RunStopped, UserError, one_line
from trainyard.devices import Device
from trainyard.models.blueprint import Blueprint
from trainyard.parallel.layout import shard_rows
from trainyard.parallel.mesh import Mesh
from trainyard.train.checkpointing import rng_state
from trainyard.train.optim.optimizer import Optimizer

PROBE_FILE = ".probe.part"
SLACK_BYTES = 2**20
"""Bytes that a checkpoint may need beyond its tensors, and for each rank."""


class SaveStatus(NamedTuple):
    """What a rank says of its saves with each step; summed, what all said."""

    due: float = 0.0
    """By rank 0's clock it is time for a checkpoint."""
    shard_written: float = 0.0
    """This rank's file is there."""
    committed: float = 0.0
    """The marker is there."""
    failed: float = 0.0


@dataclass
class PendingSave:
    step: int
    storage: Storage
    metadata: dict[str, Any]
    started_at: float
    stall_s: float = 0.0
    """Seconds that the steps waited for it."""
    rng_tensors: dict[str, Tensor] = field(default_factory=dict)
    rng_texts: dict[str, str] = field(default_factory=dict)
    """Random generators of this rank."""
    update_count: Tensor = field(default_factory=lambda: torch.zeros(()))
    skip_counts: Tensor = field(default_factory=lambda: torch.zeros(2, dtype=torch.int32))
    thread: threading.Thread | None = None
    shard_written: bool = False
    committed: bool = False
    committing: bool = False
    total_bytes: int = 0
    error: str = ""
    warning: str = ""
    """What went wrong after it was complete."""

    def join(self) -> None:
        if self.thread:
            self.thread.join()

    def run_in_thread(self, work: Callable[[], None]) -> None:
        """In a thread of its own; what goes wrong is kept as one line."""

        def guarded() -> None:
            try:
                work()
            except Exception as error:  # a thread's traceback would go nowhere
                self.error = _error_line(error)

        self.thread = threading.Thread(target=guarded, daemon=True)
        self.thread.start()


@dataclass
class Saver:
    config: Config
    storage: Storage
    blueprint: Blueprint
    optimizer: Optimizer
    device: Device
    mesh: Mesh
    on_saved: Callable[[dict[str, Any]], None]
    """Called on every rank when a checkpoint is complete, with what there is to say of it."""
    warn: Callable[[str], None]
    """Called when one could not be written."""
    current: PendingSave | None = None
    slices: list[LocalSlice] = field(init=False)
    host_buffers: dict[str, Tensor] = field(init=False, default_factory=dict)
    """Host copies of what this rank writes, by kind."""
    reported: dict[int, PendingSave | None] = field(init=False, default_factory=dict)
    """Of which save this rank spoke at a step that has not been heard yet."""
    last_save_time: float = field(init=False, default_factory=time.monotonic)
    last_step: int = field(init=False, default=0)
    """The newest step of this run, and the newest whose save was begun."""
    last_saved_step: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self.slices = owned_slices(self.blueprint, self.mesh.layout, self.mesh.layout_rank)
        optimizer = self.optimizer
        ranks = self.config.checkpoint.writers_per_host or self.mesh.layout.world_size
        self.write_turn = self.mesh.local_rank // ranks
        """When this rank's turn is: the ranks of a host take turns in so many windows."""
        self.write_turns = max(self.mesh.all_gather_object(self.write_turn)) + 1
        self.state_buffers = {
            "weights": optimizer.master_weights,
            "first": optimizer.exp_avg,
            "second": optimizer.exp_avg_sq,
        }

    @cached_property
    def slice_table(self) -> checkpoint.ShardTable:
        """What all ranks write; takes seconds for thousands of them, once."""
        return checkpoint.build_shard_table(self.blueprint, self.mesh.layout)

    @property
    def required_bytes(self) -> int:
        """Bytes of a whole checkpoint, all ranks together."""
        each = sum(row.dtype.itemsize for row in self.state_buffers.values())
        return self.blueprint.parameter_count() * each + SLACK_BYTES * (1 + self.mesh.layout.world_size)

    def preflight(self) -> None:
        """Before the first step: can a checkpoint be written there at all?"""
        trouble = ""
        if self.mesh.layout_rank == 0:
            try:
                self.storage.mkdir()
                checkpoint.remove_incomplete(self.storage)
                with self.storage.write(PROBE_FILE) as file:
                    file.write(b"1")
                self.storage.remove(PROBE_FILE)
                self._check_disk_space()
            except Exception as error:
                trouble = _error_line(error)
        for line in self.mesh.all_gather_object(trouble):
            if line:
                raise UserError(f"checkpoint.directory={self.storage}: cannot be written: {line}")

    def save_due(self, step: int, clock_due: bool) -> bool:
        """Whether to save after this step; `asked`: rank 0's clock said so."""
        every = self.config.checkpoint.every
        return clock_due or bool(every and step % every == 0)

    def begin(self, step: int) -> None:
        """Copy the state as it is after `step` and start to write it. All ranks call this after the same step."""
        begun = time.monotonic()
        if self.current:
            self._wait()  # the one before took longer than the time between two
        self.last_save_time, self.last_saved_step = time.monotonic(), step
        counters = {"step": step, "consumed_samples": step * self.config.train.global_batch}
        dtypes = {kind: buffer.dtype for kind, buffer in self.state_buffers.items()}
        body = checkpoint.build_manifest(self.config, dtypes, counters)
        save = PendingSave(step, self.storage / checkpoint.step_directory(step), body, begun)
        if self.mesh.layout_rank == 0:
            try:
                self._prepare_directory(step)
            except Exception as error:
                save.error = _error_line(error)
        self.current = save
        if self._all_reduce_status(
            SaveStatus(failed=float(bool(save.error)))
        ).failed:  # also: no file before its directory
            self._abort(save)
            return
        for number in range(self.write_turns):
            last = number == self.write_turns - 1
            if self.write_turn == number:
                save.run_in_thread(partial(self._write_shard, save, self._copy_to_host(save)))
                if not last:
                    save.join()
                    self.host_buffers.clear()
            if not last:
                self._all_reduce_status(SaveStatus())
        save.stall_s += time.monotonic() - begun
        if self.config.checkpoint.blocking:
            self._wait()

    def step_status(self, step: int) -> SaveStatus:
        """What to say with this step."""
        self.last_step = step
        save = self.reported[step] = self.current
        minutes = self.config.checkpoint.every_minutes
        due = bool(minutes) and self.mesh.layout_rank == 0 and time.monotonic() - self.last_save_time > 60 * minutes
        return self._status(save)._replace(due=float(due))

    def on_step_status(self, step: int, status: SaveStatus) -> None:
        """What all ranks said with a step."""
        if (save := self.reported.pop(step, None)) and save is self.current:
            self._advance(save, status)

    def finish(self) -> None:
        """The run ends: a signal may have come when it was decided already not to save after the last step. Then wait
        for what is under way. All ranks call this together."""
        if self.last_saved_step < self.last_step:
            self.begin(self.last_step)
        self._wait()

    def _wait(self) -> None:
        waiting = time.monotonic()
        while save := self.current:
            save.join()
            save.stall_s += time.monotonic() - waiting
            waiting = time.monotonic()
            self._advance(save, self._all_reduce_status(self._status(save)))

    def _status(self, save: PendingSave | None) -> SaveStatus:
        if not save:
            return SaveStatus()
        return SaveStatus(
            shard_written=float(save.shard_written), committed=float(save.committed), failed=float(bool(save.error))
        )

    def _advance(self, save: PendingSave, status: SaveStatus) -> None:
        if status.failed:
            save.join()
            self._abort(save)
        elif status.committed:
            self.current = None
            if save.warning:
                self.warn(save.warning)
            seconds = time.monotonic() - save.started_at
            record = {"step": save.step, "checkpoint": str(save.storage), "checkpoint_seconds": seconds}
            self.on_saved({**record, "checkpoint_stall": save.stall_s, "checkpoint_bytes": save.total_bytes})
        elif status.shard_written == self.mesh.layout.world_size and self.mesh.layout_rank == 0 and not save.committing:
            save.committing = True
            save.run_in_thread(partial(self._commit, save))

    def _copy_to_host(self, save: PendingSave) -> Callable[[], None]:
        """Start copying what this rank writes to host memory."""
        save.rng_tensors, save.rng_texts = rng_state.capture_rng_state(self.device, self.mesh.layout_rank)
        counters = self.optimizer.update_count, self.optimizer.skip_counts
        save.update_count, save.skip_counts = (
            self.device.alloc_host_buffer(c.numel(), c.dtype).view(c.shape) for c in counters
        )
        pairs = [(counters[0], save.update_count), (counters[1], save.skip_counts)]
        for kind, row in self.state_buffers.items():
            if kind not in self.host_buffers:
                size = sum(box.numel for box in self.slices)
                self.host_buffers[kind] = self.device.alloc_host_buffer(size, row.dtype)
            at = 0
            for box in self.slices:
                pairs.append((self._slice_view(row, box), self.host_buffers[kind][at : at + box.numel].view(box.sizes)))
                at += box.numel
        copying = self.device.start_host_copies(pairs)

        def fence() -> None:
            begun = time.monotonic()
            copying.fence()
            save.stall_s += time.monotonic() - begun

        self.optimizer.fence = fence
        return copying.wait

    def _slice_view(self, row: Tensor, box: LocalSlice) -> Tensor:
        """A box in this rank's memory."""
        mine = self.optimizer.shard_view(row, box.param)
        data = self.mesh.dp_cp
        if self.optimizer.flat.num_shards == 1:
            rows = shard_rows(len(mine), data.size, data.rank)
            mine = mine[rows.start : rows.stop]
        return mine[box.local_index]

    def _write_shard(self, save: PendingSave, wait: Callable[[], None]) -> None:
        wait()
        tensors: list[tuple[str, Sequence[int], Tensor]] = []
        for kind in self.state_buffers:
            at = 0
            for box in self.slices:
                piece = self.host_buffers[kind][at : at + box.numel].view(box.sizes)
                tensors.append((checkpoint.tensor_key(kind, box.name), box.offsets, piece))
                at += box.numel
        tensors += [(name, [0], tensor) for name, tensor in save.rng_tensors.items()]
        write_shard(save.storage, checkpoint.shard_name(self.mesh.layout_rank), tensors, save.rng_texts)
        save.shard_written = True

    def _commit(self, save: PendingSave) -> None:
        body = {**save.metadata, "updates": int(save.update_count), "skipped": save.skip_counts.tolist()}
        save.total_bytes = checkpoint.commit(save.storage, self.slice_table, body)
        try:
            checkpoint.prune_checkpoints(self.storage, save.step, self.config.checkpoint.keep)
        except Exception as error:
            save.warning = f"old checkpoints in {self.storage} could not be removed: {_error_line(error)}"
        save.committed = True

    def _prepare_directory(self, step: int) -> None:
        """Clear away what kills have left over, make the directory, see that there is room."""
        checkpoint.remove_incomplete(self.storage)
        place = self.storage / checkpoint.step_directory(step)
        if checkpoint.is_committed(self.storage, step):
            try:
                with checkpoint.Checkpoint(place) as there:
                    there.verify(there.files)
            except CorruptCheckpoint:  # resuming passed over it
                checkpoint.remove_checkpoint(self.storage, step)
            else:
                raise UserError(f"{place}: is there already; it stays as it is")
        self._check_disk_space()
        place.mkdir()

    def _check_disk_space(self) -> None:
        free = self.storage.free_bytes()
        if free is not None and free < self.required_bytes:
            raise UserError(
                f"{self.storage}: a checkpoint needs {self.required_bytes / 2**20:,.0f} MiB, {free / 2**20:,.0f} MiB are free"
            )

    def _abort(self, save: PendingSave) -> None:
        self.current = None
        line = next(filter(None, self.mesh.all_gather_object(save.error)))
        text = f"checkpoint of step {save.step} was not written: {line}"
        if self.config.checkpoint.on_failure == "stop":
            raise RunStopped(f"{text} (checkpoint.on_failure=stop)")
        self.warn(text)

    def _all_reduce_status(self, status: SaveStatus) -> SaveStatus:
        said = torch.tensor(status, dtype=torch.float32, device=self.device.torch_device)
        return SaveStatus(*self.mesh.world.all_reduce_sum(said).tolist())


def _error_line(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return one_line(error) if isinstance(error, UserError) else f"{type(error).__name__}: {one_line(error)}"
