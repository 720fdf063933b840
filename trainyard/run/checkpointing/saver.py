"""Writes checkpoints into a directory while training continues.

A save has three phases. Every rank copies its slices to host memory (state_writer.py). A thread of each rank writes the
copy to the rank's shard file. When all shards are written, rank 0 writes the manifest that commits the checkpoint. The
ranks learn of each other's progress with every step, so no thread ever communicates with another rank.
"""

import logging
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cached_property, partial
from typing import Any

import torch

from trainyard.checkpoint import checkpoint
from trainyard.checkpoint.file_names import step_directory
from trainyard.checkpoint.shard_file import CorruptCheckpoint
from trainyard.core.errors import NotWritable, RunStopped, UserError, is_not_writable
from trainyard.core.quantities import shortage_text
from trainyard.metrics.span_recorder import SpanRecorder
from trainyard.remote.storage import LocalStorage, Storage
from trainyard.run.callbacks import TrainerView
from trainyard.run.checkpointing.directory_owner import DirectoryClaim, check_owner, find_owner
from trainyard.run.checkpointing.rank_agreement import SIGNAL_TIMEOUT, WRITE_TIMEOUT, RankAgreement
from trainyard.run.checkpointing.rng_state import RngState, capture_rng_state
from trainyard.run.checkpointing.state_writer import PendingSave, StateSaver, StateWriter, error_line
from trainyard.train.status import HostStatus, StepStatus

PROBE_FILE = ".probe.part"
SLACK_BYTES = 2**20
"""Allowance for a checkpoint beyond its tensors, once and for each rank."""
LAST_SAVE_PAUSES_S = (1.0, 2.0, 5.0, 10.0, 20.0, 20.0)
"""Pauses before the save of the last step is repeated, the same on all ranks."""
logger = logging.getLogger(__name__)


class Saver(StateSaver):
    """Starts, tracks and commits the checkpoints of a run."""

    def __init__(
        self,
        state_writer: StateWriter,
        storage: Storage,
        on_saved: Callable[[dict[str, Any]], None],
        spans: SpanRecorder,
        model_files: Mapping[str, bytes],
    ) -> None:
        """Checks that a checkpoint can be written in the directory `storage`. `on_saved` is called on every rank with
        the record of a committed checkpoint. `model_files` are those of the tokenizer, which the first rank adds to
        each checkpoint."""
        super().__init__(state_writer)
        self.storage, self.on_saved, self.spans, self.model_files = storage, on_saved, spans, model_files
        self.config, self.run = state_writer.config, state_writer.run
        self.section = self.config.checkpoint
        self.context = state_writer.context
        self.device, self.mesh = self.context.device, self.context.mesh
        self.clock_due = False
        """True if rank 0's clock asked for a checkpoint."""
        self.last_save_time = time.monotonic()
        self.last_step = self.last_saved_step = 0
        """`last_saved_step` is the last step whose save was started; 0 if that save failed."""
        self.failure = ""
        """Why the last save that failed did."""
        self.owners: dict[int, str | None] = {}
        """The runs of committed checkpoints, as far as they are known."""
        self.claim: DirectoryClaim | None = None
        """Held by the first rank if the storage has no locks."""
        self.write_turn = self.mesh.local_rank // (self.section.writers_per_host or self.mesh.layout.world_size)
        """Ranks of a host stage and write in turns, to bound its host memory."""
        self.write_turns = max(self.mesh.all_gather_object(self.write_turn)) + 1
        try:
            self._check_directory()
        except BaseException:
            self.close()
            raise

    @cached_property
    def slice_table(self) -> checkpoint.ShardTable:
        """What every rank writes. Takes seconds to compute for thousands of ranks."""
        blueprint = self.context.blueprint
        return checkpoint.build_shard_table(blueprint, self.mesh.layout, blueprint.trained_names())

    @property
    def required_bytes(self) -> int:
        """Size of a checkpoint over all ranks."""
        slack = SLACK_BYTES * (1 + self.mesh.layout.world_size)
        return self.context.blueprint.trained_count * self.state_writer.bytes_per_weight + slack

    def _check_directory(self) -> None:
        """Check before the first step that a checkpoint can be written."""
        failure: UserError | NotWritable | None = None
        if self.mesh.layout_rank == 0:
            try:
                self.storage.mkdir()
                if not isinstance(self.storage, LocalStorage):
                    self.claim = DirectoryClaim(self.storage, self.run, self.config)
                if self.section.directory:  # again: another run may have begun since
                    check_owner(find_owner(self.storage), str(self.storage), [self.run.run_id])
                checkpoint.remove_incomplete(self.storage)
                with self.storage.write(PROBE_FILE) as file:
                    file.write(b"1")
                self.storage.remove(PROBE_FILE)
                self._check_disk_space()
            except Exception as error:
                kind = NotWritable if isinstance(error, NotWritable) or is_not_writable(error) else UserError
                failure = kind(f"checkpoint.directory={self.storage}: cannot be written: {error_line(error)}")
        for problem in self.mesh.all_gather_object(failure):
            if problem:
                raise problem

    def close(self) -> None:
        """Let other processes save in the directory."""
        if self.current and self.current.committing:
            self.current.join()
        if self.claim:
            self.claim.release()

    def _owner(self, step: int) -> str | None:
        """The run of a committed checkpoint; None if its manifest does not name it or is corrupt."""
        if step not in self.owners:
            self.owners[step] = None
            with suppress(CorruptCheckpoint):
                self.owners[step] = checkpoint.read_commit_file(self.storage / step_directory(step)).get("run")
        return self.owners[step]

    def _is_own(self, step: int) -> bool:
        unnamed = self.section.directory is None and self._owner(step) is None
        return unnamed or self._owner(step) == self.run.run_id

    def save_due(self, step: int) -> bool:
        """True if this step is to be saved."""
        every = self.section.every
        return self.clock_due or bool(every and step % every == 0)

    def begin(self, step: int) -> None:
        """Copy the state after `step` and start to write it. All ranks call this after the same step."""
        started_at = time.monotonic()
        if self.current:
            self._wait()  # the previous save took longer than the interval between two saves
        save = self.current = self._new_save(step, started_at)
        # This all-reduce also keeps ranks from writing before rank 0 has created the directory.
        if self._all_reduce_flags(save).save_failed:
            self._abort(save)
            return
        for turn in range(self.write_turns):
            is_last = turn == self.write_turns - 1
            if self.write_turn == turn:
                save.write_in_thread(self.state_writer.start_copy(save, capture_rng_state(self.device)))
                if not is_last:
                    save.join()
                    self.state_writer.release()
            if not is_last:
                self._all_reduce_flags()  # the next ranks of the host begin when the memory of these is free
        save.stall_s += time.monotonic() - started_at
        if self.section.blocking:
            self._wait()

    def _new_save(self, step: int, started_at: float) -> PendingSave:
        """A save with its directory, which rank 0 creates; it may have failed already."""
        self.last_save_time, self.last_saved_step, self.clock_due = time.monotonic(), step, False
        save = self.state_writer.new_save(self.storage, step, started_at)
        if self.mesh.layout_rank == 0:
            try:
                self._prepare_directory(step)
            except Exception as error:
                save.error = error_line(error)
        return save

    def save_held_state(self, step: int, rng: RngState | None, agreement: RankAgreement) -> None:
        """Save the state after `step`, unless that is done, from a thread of every rank, while the main thread is
        inside a step whose update is held. Raises RunStopped if that fails."""
        save, is_leader, started_at = self.current, self.mesh.layout_rank == 0, time.monotonic()
        if save:
            save.join()
        exists = is_leader and checkpoint.is_committed(self.storage, step)
        if agreement.wait_for_all("begin", SIGNAL_TIMEOUT, "it is saved" if exists else ""):
            return
        if rng is None:
            raise RunStopped("this device cannot copy its state during a step")
        if save is None or save.step != step:
            save = self._new_save(step, started_at)
            for turn in range(self.write_turns):
                if error := agreement.wait_for_all(f"turn {turn}", WRITE_TIMEOUT, save.error):
                    raise RunStopped(error)
                if self.write_turn == turn:
                    save.write_in_thread(self.state_writer.start_copy(save, rng))
                    save.join()
        if not (error := agreement.wait_for_all("written", WRITE_TIMEOUT, save.error)) and is_leader:
            save.run_in_thread(partial(self._commit, save))
            save.join()
        if error := error or agreement.wait_for_all("committed", WRITE_TIMEOUT, save.error):
            raise RunStopped(error)
        self._report_saved(save)

    def flags(self, save: PendingSave) -> dict[str, float]:
        return {
            "shard_written": float(save.shard_written),
            "committed": float(save.committed),
            "save_failed": float(bool(save.error)),
        }

    def add_status(self, step: int, status: StepStatus) -> StepStatus:
        self.last_step = step
        minutes = self.section.every_minutes
        due = bool(minutes) and self.mesh.layout_rank == 0 and time.monotonic() - self.last_save_time > 60 * minutes
        return super().add_status(step, status)._replace(save_due=float(due))

    def handle_status(self, step: int, status: HostStatus, logged: bool) -> None:
        self.clock_due = self.clock_due or bool(status.flags.save_due)
        super().handle_status(step, status, logged)

    def complete_step(self, step: int) -> None:
        if self.save_due(step):  # `finish` saves the last step
            with self.spans("save"):
                self.begin(step)

    def on_checkpoint(self, trainer: TrainerView, record: dict[str, Any]) -> None:
        trainer.last_checkpoint = record["checkpoint"]

    def end_at_deadline(self, step: int) -> None:
        self.close()

    def finish(self) -> None:
        """Save the last step unless that is done (a signal may come after the decision not to save it), and wait for
        the save in progress. All ranks call this together at the end of a run. A disk may be full for a moment, so a
        failed save is repeated; a run without its last checkpoint has not succeeded, whatever checkpoint.on_failure."""
        for pause_s in (*LAST_SAVE_PAUSES_S, 0.0):
            if self.last_saved_step < self.last_step:
                self.begin(self.last_step)
            self._wait()
            if self.last_saved_step == self.last_step:
                return
            time.sleep(pause_s)
        raise NotWritable(f"the last checkpoint, of step {self.last_step}, could not be written: {self.failure}")

    def _wait(self) -> None:
        waiting_since = time.monotonic()
        while save := self.current:
            save.join()
            save.stall_s += time.monotonic() - waiting_since
            waiting_since = time.monotonic()
            self.advance(save, self._all_reduce_flags(save))

    def advance(self, save: PendingSave, status: StepStatus) -> None:
        if status.save_failed:
            save.join()
            self._abort(save)
        elif status.committed:
            self.current = None
            self._report_saved(save)
        elif status.shard_written == self.mesh.layout.world_size and self.mesh.layout_rank == 0 and not save.committing:
            save.committing = True
            save.run_in_thread(partial(self._commit, save))

    def _report_saved(self, save: PendingSave) -> None:
        if save.warning:
            logger.warning(save.warning)
        seconds = time.monotonic() - save.started_at
        record = {"step": save.step, "checkpoint": str(save.storage), "checkpoint_seconds": seconds}
        self.on_saved({**record, "checkpoint_stall": save.stall_s, "checkpoint_bytes": save.total_bytes})

    def _commit(self, save: PendingSave) -> None:
        if self.claim:
            self.claim.check()
        save.total_bytes = checkpoint.commit(save.storage, self.slice_table, save.manifest, self.model_files)
        self.owners[save.step] = self.run.run_id
        try:
            checkpoint.prune_checkpoints(self.storage, save.step, self.section.keep, self._is_own)
        except Exception as error:
            save.warning = f"old checkpoints in {self.storage} could not be removed: {error_line(error)}"
        save.committed = True

    def _prepare_directory(self, step: int) -> None:
        """Remove what killed runs have left behind, check the free space and create the checkpoint's directory."""
        if self.claim:
            self.claim.check()
        checkpoint.remove_incomplete(self.storage)
        directory = self.storage / step_directory(step)
        if checkpoint.is_committed(self.storage, step):
            try:
                with checkpoint.Checkpoint(directory) as existing:
                    existing.verify(existing.files)
            except CorruptCheckpoint:  # the run has resumed from an older one
                if self._owner(step) not in (None, self.run.run_id):
                    raise UserError(f"{directory} belongs to another run; refusing to overwrite it") from None
                checkpoint.remove_checkpoint(self.storage, step)
            else:
                raise UserError(f"{directory} already exists and is a valid checkpoint; refusing to overwrite it")
        self._check_disk_space()
        directory.mkdir()

    def _check_disk_space(self) -> None:
        free, required = self.storage.free_bytes(), self.required_bytes
        if free is not None and free < required:
            raise NotWritable(f"{self.storage}: a checkpoint {shortage_text(required, free)}")

    def _abort(self, save: PendingSave) -> None:
        self.current, self.last_saved_step = None, 0  # `finish` tries again
        self.failure = next(filter(None, self.mesh.all_gather_object(save.error)))
        text = f"checkpoint of step {save.step} was not written: {self.failure}"
        if self.section.on_failure == "stop":
            raise RunStopped(f"{text} (checkpoint.on_failure=stop)")
        logger.warning(text)

    def _all_reduce_flags(self, save: PendingSave | None = None) -> StepStatus:
        """The flags of a save summed over all ranks, between two steps. Without a save, a barrier."""
        status = StepStatus(**self.flags(save)) if save else StepStatus()
        flags = torch.tensor(status, dtype=torch.float32, device=self.device.torch_device)
        return StepStatus(*self.mesh.world.all_reduce_sum(flags).tolist())
