"""Saves the training state of a rank while training continues, wherever it goes: to a directory, to a directory at a
deadline, or to the memory of this host and the next.

The device copies this rank's slices to host memory during the next forward and backward pass; only the next update
changes them, and it waits for the copy. A thread writes the copy as a shard file.
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from trainyard.checkpoint import checkpoint
from trainyard.checkpoint.file_names import shard_name, step_directory
from trainyard.checkpoint.partition import owned_slices
from trainyard.checkpoint.shard_file import write_shard
from trainyard.checkpoint.weights import BaseWeights, frozen_tensors
from trainyard.config.schema import Config
from trainyard.core.errors import RunStopped, UserError, one_line
from trainyard.data.loading.fingerprint import Fingerprints
from trainyard.metrics.run_directory import RunDirectory
from trainyard.parallel.rank_context import RankContext
from trainyard.remote.storage import Storage
from trainyard.run.callbacks import Part
from trainyard.run.checkpointing.data_check import FINGERPRINTS_KEY
from trainyard.run.checkpointing.directory_owner import owner_record
from trainyard.run.checkpointing.rng_state import RngState
from trainyard.train.optim.gather_full import slice_view
from trainyard.train.optim.optimizer import Optimizer
from trainyard.train.status import HostStatus, StepStatus


@dataclass
class PendingSave:
    """A save in progress on this rank."""

    step: int
    storage: Storage
    """Directory of this checkpoint."""
    metadata: dict[str, Any]
    """Content of the manifest that is known when the save starts."""
    started_at: float
    stall_s: float = 0.0
    """Seconds that training has waited for this save."""
    update_count: Tensor = field(default_factory=lambda: torch.zeros(()))
    skip_counts: Tensor = field(default_factory=lambda: torch.zeros(2, dtype=torch.int32))
    thread: threading.Thread | None = None
    shard_written: bool = False
    committing: bool = False
    committed: bool = False
    total_bytes: int = 0
    """Size of the committed checkpoint over all ranks."""
    error: str = ""
    """One line if the save failed on this rank."""
    warning: str = ""
    """One line if something failed after the commit."""

    @property
    def manifest(self) -> dict[str, Any]:
        """All of the manifest but the files, once the copy is on the host."""
        return {**self.metadata, "updates": int(self.update_count), "skipped": self.skip_counts.tolist()}

    def join(self) -> None:
        if self.thread:
            self.thread.join()

    def write_in_thread(self, write: Callable[[], None]) -> None:
        """Run `write` in a thread; then this rank's shard is written."""

        def write_shard() -> None:
            write()
            self.shard_written = True

        self.run_in_thread(write_shard)

    def run_in_thread(self, work: Callable[[], None]) -> None:
        """Run `work` in a thread and keep an exception as one line in `error`."""

        def run_and_catch() -> None:
            try:
                work()
            except Exception as error:  # nobody would see the traceback of a thread
                self.error = error_line(error)

        self.thread = threading.Thread(target=run_and_catch, daemon=True)
        self.thread.start()


@dataclass
class StateWriter:
    """Makes the tensors and the manifest of every save. Owns the host buffers of one copy of the state, which stay
    allocated until `release`; saves that may be in progress at the same time have a writer each."""

    config: Config
    run: RunDirectory
    """The run that owns the checkpoints; each manifest names it."""
    context: RankContext
    optimizer: Optimizer
    data_files: Fingerprints
    """Fingerprints of the data, on the ranks that write a manifest."""
    base: BaseWeights | None
    """Where the weights are that the run does not train; None: its caller made them."""
    rank_tensors: Callable[[int], Mapping[str, Tensor]]
    """What this rank needs besides to go on after a step: tensors of the host that stay as they are. Their names end
    with its number."""
    host_slices: dict[str, list[Tensor]] = field(init=False, default_factory=dict)
    """Host copies of the slices, by kind of state; views of one buffer each."""

    def __post_init__(self) -> None:
        mesh, blueprint = self.context.mesh, self.context.blueprint
        self.slices = owned_slices(blueprint, mesh.layout, mesh.layout_rank, blueprint.trained_names())
        """What this rank writes."""
        self.state_buffers = self.optimizer.state.saved_buffers()

    @property
    def dtypes(self) -> dict[str, torch.dtype]:
        return {kind: buffer.dtype for kind, buffer in self.state_buffers.items()}

    @property
    def bytes_per_weight(self) -> int:
        return sum(dtype.itemsize for dtype in self.dtypes.values())

    def new_save(self, parent: Storage, step: int, started_at: float) -> PendingSave:
        """A save of `step` below the directory `parent`."""
        counters: dict[str, Any] = {"step": step, "consumed_samples": step * self.config.train.global_batch}
        counters[FINGERPRINTS_KEY] = self.data_files
        if self.base and frozen_tensors(self.config.model):
            counters["base"] = self.base._asdict()
        manifest = checkpoint.build_manifest(self.config.model_dump(mode="json"), self.dtypes, counters)
        return PendingSave(step, parent / step_directory(step), manifest | owner_record(self.run), started_at)

    def start_copy(self, save: PendingSave, rng: RngState) -> Callable[[], None]:
        """Start copying this rank's slices to host memory; the next update waits for that. Returns a function that
        waits for the copies and writes this rank's shard file."""
        device, mesh, state = self.context.device, self.context.mesh, self.optimizer.state
        rng_tensors, rng_texts = rng.encode(mesh.layout_rank)
        own = self.rank_tensors(save.step)
        counters = self.optimizer.guard.update_count, self.optimizer.guard.skip_counts
        save.update_count, save.skip_counts = (
            device.alloc_host_buffer(c.numel(), c.dtype).view(c.shape) for c in counters
        )
        pairs = [(counters[0], save.update_count), (counters[1], save.skip_counts)]
        sizes = [piece.numel for piece in self.slices]
        for kind, buffer in self.state_buffers.items():
            if kind not in self.host_slices:
                host_buffer = device.alloc_host_buffer(sum(sizes), buffer.dtype).zero_()
                parts = zip(host_buffer.split_with_sizes(sizes), self.slices, strict=True)
                self.host_slices[kind] = [part.view(piece.sizes) for part, piece in parts]
            # Parameters without a second moment (Muon) have zeros there, so that all files have one format.
            pairs += [
                (slice_view(state, mesh, state.shard_view(buffer, piece.param), piece), host)
                for piece, host in zip(self.slices, self.host_slices[kind], strict=True)
                if state.has(piece.param, kind)
            ]
        copies = device.start_host_copies(pairs)

        def fence() -> None:
            begin = time.monotonic()
            copies.fence()
            save.stall_s += time.monotonic() - begin

        def write() -> None:
            copies.wait()
            tensors: list[tuple[str, Sequence[int], Tensor]] = [
                (checkpoint.tensor_key(kind, piece.name), piece.offsets, values)
                for kind, host_slices in self.host_slices.items()
                for piece, values in zip(self.slices, host_slices, strict=True)
            ]
            tensors += [(name, [0], tensor) for name, tensor in {**rng_tensors, **own}.items()]
            write_shard(save.storage, shard_name(mesh.layout_rank), tensors, rng_texts)

        self.optimizer.fence_next_update(fence)
        return write

    def release(self) -> None:
        """Free the host buffers."""
        self.host_slices.clear()


class StateSaver(Part):
    """A part that saves the state, at most one step at a time. The progress of each rank rides on the all-reduce of
    every step (StepStatus), so all ranks see the same progress at the same step."""

    def __init__(self, state_writer: StateWriter) -> None:
        self.state_writer = state_writer
        self.current: PendingSave | None = None
        self.reported: dict[int, PendingSave | None] = {}
        """The save whose status this rank reported with a step, until the reduced status of that step is known."""

    def flags(self, save: PendingSave) -> dict[str, float]:
        """The fields of StepStatus that say how far this rank is."""
        raise NotImplementedError

    def advance(self, save: PendingSave, status: StepStatus) -> None:
        """Go to the next phase of a save once all ranks have completed the current one."""
        raise NotImplementedError

    def add_status(self, step: int, status: StepStatus) -> StepStatus:
        save = self.reported[step] = self.current
        return status._replace(**self.flags(save)) if save else status

    def handle_status(self, step: int, status: HostStatus, logged: bool) -> None:
        if (save := self.reported.pop(step, None)) and save is self.current:  # late flags of an older save say nothing
            self.advance(save, status.flags)


def error_line(error: Exception) -> str:
    """One line that names the file of an OSError, or the type of an unexpected exception."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return (
        one_line(error) if isinstance(error, UserError | RunStopped) else f"{type(error).__name__}: {one_line(error)}"
    )
