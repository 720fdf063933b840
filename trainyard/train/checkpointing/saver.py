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
from datetime import UTC, datetime
from functools import cached_property, partial
from importlib.metadata import version
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trainyard import __version__
from trainyard.checkpoint.io.safetensors_file import CODES
from trainyard.checkpoint.io.storage import Place
from trainyard.checkpoint.native import checkpoint
from trainyard.checkpoint.native.partition import Box, share_of_rows, written
from trainyard.checkpoint.native.shard_file import Broken, write_shard
from trainyard.config.schema import Config
from trainyard.core.errors import RunStopped, UserError, one_line
from trainyard.devices import Device
from trainyard.models.blueprint import Blueprint
from trainyard.parallel.mesh import Mesh, local_rank
from trainyard.train.checkpointing import rng_state
from trainyard.train.optim.optimizer import Optimizer

PROBE = ".probe.part"
SLACK = 2**20
"""Bytes that a checkpoint may need beyond its tensors, and for each rank."""


class Words(NamedTuple):
    """What a rank says of its saves with each step; summed, what all said."""

    due: float = 0.0
    """By rank 0's clock it is time for a checkpoint."""
    written: float = 0.0
    """This rank's file is there."""
    sealed: float = 0.0
    """The marker is there."""
    failed: float = 0.0


@dataclass
class Save:
    step: int
    place: Place
    body: dict[str, Any]
    started: float
    stalled: float = 0.0
    """Seconds that the steps waited for it."""
    own: dict[str, Tensor] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)
    """Random generators of this rank."""
    updates: Tensor = field(default_factory=lambda: torch.zeros(()))
    skipped: Tensor = field(default_factory=lambda: torch.zeros(2, dtype=torch.int32))
    thread: threading.Thread | None = None
    written: bool = False
    sealed: bool = False
    sealing: bool = False
    bytes: int = 0
    error: str = ""
    note: str = ""
    """What went wrong after it was complete."""

    def join(self) -> None:
        if self.thread:
            self.thread.join()

    def run(self, work: Callable[[], None]) -> None:
        """In a thread of its own; what goes wrong is kept as one line."""

        def guarded() -> None:
            try:
                work()
            except Exception as error:  # a thread's traceback would go nowhere
                self.error = _line(error)

        self.thread = threading.Thread(target=guarded, daemon=True)
        self.thread.start()


@dataclass
class Saver:
    config: Config
    place: Place
    blueprint: Blueprint
    optimizer: Optimizer
    device: Device
    mesh: Mesh
    tell: Callable[[dict[str, Any]], None]
    """Called on every rank when a checkpoint is complete, with what there is to say of it."""
    complain: Callable[[str], None]
    """Called when one could not be written."""
    current: Save | None = None
    boxes: list[Box] = field(init=False)
    memory: dict[str, Tensor] = field(init=False, default_factory=dict)
    """Host copies of what this rank writes, by kind."""
    sent: dict[int, Save | None] = field(init=False, default_factory=dict)
    """Of which save this rank spoke at a step that has not been heard yet."""
    last: float = field(init=False, default_factory=time.monotonic)
    reached: int = field(init=False, default=0)
    """The newest step of this run, and the newest whose save was begun."""
    begun: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self.boxes = written(self.blueprint, self.mesh.layout, self.mesh.rank)
        optimizer = self.optimizer
        ranks = self.config.checkpoint.window or self.mesh.layout.world
        self.window = local_rank() // ranks
        """When this rank's turn is: the ranks of a host take turns in so many windows."""
        self.windows = max(self.mesh.collect(self.window)) + 1
        self.rows = {"weights": optimizer.master, "first": optimizer.first, "second": optimizer.second}

    @cached_property
    def table(self) -> checkpoint.Table:
        """What all ranks write; takes seconds for thousands of them, once."""
        return checkpoint.table_of(self.blueprint, self.mesh.layout)

    @property
    def needed(self) -> int:
        """Bytes of a whole checkpoint, all ranks together."""
        each = sum(row.dtype.itemsize for row in self.rows.values())
        return self.blueprint.parameters() * each + SLACK * (1 + self.mesh.layout.world)

    def look_ahead(self) -> None:
        """Before the first step: can a checkpoint be written there at all?"""
        trouble = ""
        if self.mesh.rank == 0:
            try:
                self.place.prepare()
                checkpoint.clear(self.place)
                with self.place.write(PROBE) as file:
                    file.write(b"1")
                self.place.remove(PROBE)
                self._room()
            except Exception as error:
                trouble = _line(error)
        for line in self.mesh.collect(trouble):
            if line:
                raise UserError(f"checkpoint.directory={self.place}: cannot be written: {line}")

    def due(self, step: int, asked: bool) -> bool:
        """Whether to save after this step; `asked`: rank 0's clock said so."""
        every = self.config.checkpoint.every
        return asked or bool(every and step % every == 0)

    def begin(self, step: int) -> None:
        """Copy the state as it is after `step` and start to write it. All ranks call this after the same step."""
        begun = time.monotonic()
        if self.current:
            self._wait()  # the one before took longer than the time between two
        self.last, self.begun = time.monotonic(), step
        body = {
            "step": step,
            "consumed_samples": step * self.config.train.global_batch,
            "time": datetime.now(UTC).isoformat(timespec="seconds"),
            "versions": {"trainyard": __version__, "torch": version("torch")},
            "kinds": {kind: CODES[row.dtype] for kind, row in self.rows.items()},
            "config": self.config.model_dump(mode="json"),
        }
        save = Save(step, self.place / checkpoint.directory_name(step), body, begun)
        if self.mesh.rank == 0:
            try:
                self._make_way(step)
            except Exception as error:
                save.error = _line(error)
        self.current = save
        if self._together(Words(failed=float(bool(save.error)))).failed:  # also: no file before its directory
            self._give_up(save)
            return
        for number in range(self.windows):
            last = number == self.windows - 1
            if self.window == number:
                save.run(partial(self._write, save, self._copy(save)))
                if not last:
                    save.join()
                    self.memory.clear()
            if not last:
                self._together(Words())
        save.stalled += time.monotonic() - begun
        if self.config.checkpoint.blocking:
            self._wait()

    def words(self, step: int) -> Words:
        """What to say with this step."""
        self.reached = step
        save = self.sent[step] = self.current
        minutes = self.config.checkpoint.minutes
        due = bool(minutes) and self.mesh.rank == 0 and time.monotonic() - self.last > 60 * minutes
        return self._of(save)._replace(due=float(due))

    def heard(self, step: int, said: Words) -> None:
        """What all ranks said with a step."""
        if (save := self.sent.pop(step, None)) and save is self.current:
            self._go_on(save, said)

    def finish(self) -> None:
        """The run ends: a signal may have come when it was decided already not to save after the last step. Then wait
        for what is under way. All ranks call this together."""
        if self.begun < self.reached:
            self.begin(self.reached)
        self._wait()

    def _wait(self) -> None:
        waiting = time.monotonic()
        while save := self.current:
            save.join()
            save.stalled += time.monotonic() - waiting
            waiting = time.monotonic()
            self._go_on(save, self._together(self._of(save)))

    def _of(self, save: Save | None) -> Words:
        if not save:
            return Words()
        return Words(written=float(save.written), sealed=float(save.sealed), failed=float(bool(save.error)))

    def _go_on(self, save: Save, said: Words) -> None:
        if said.failed:
            save.join()
            self._give_up(save)
        elif said.sealed:
            self.current = None
            if save.note:
                self.complain(save.note)
            seconds = time.monotonic() - save.started
            record = {"step": save.step, "checkpoint": str(save.place), "checkpoint_seconds": seconds}
            self.tell({**record, "checkpoint_stall": save.stalled, "checkpoint_bytes": save.bytes})
        elif said.written == self.mesh.layout.world and self.mesh.rank == 0 and not save.sealing:
            save.sealing = True
            save.run(partial(self._seal, save))

    def _copy(self, save: Save) -> Callable[[], None]:
        """Start copying what this rank writes to host memory."""
        save.own, save.texts = rng_state.state(self.device, self.mesh.rank)
        counters = self.optimizer.updates, self.optimizer.skipped
        save.updates, save.skipped = (self.device.host_memory(c.numel(), c.dtype).view(c.shape) for c in counters)
        pairs = [(counters[0], save.updates), (counters[1], save.skipped)]
        for kind, row in self.rows.items():
            if kind not in self.memory:
                size = sum(box.count for box in self.boxes)
                self.memory[kind] = self.device.host_memory(size, row.dtype)
            at = 0
            for box in self.boxes:
                pairs.append((self._held(row, box), self.memory[kind][at : at + box.count].view(box.sizes)))
                at += box.count
        copying = self.device.copy_out(pairs)

        def fence() -> None:
            begun = time.monotonic()
            copying.fence()
            save.stalled += time.monotonic() - begun

        self.optimizer.fence = fence
        return copying.wait

    def _held(self, row: Tensor, box: Box) -> Tensor:
        """A box in this rank's memory."""
        mine = self.optimizer.view(row, box.name)
        data = self.mesh.data
        if self.optimizer.flat.shards == 1:
            rows = share_of_rows(len(mine), data.size, data.rank)
            mine = mine[rows.start : rows.stop]
        return mine[tuple(slice(at, at + size) for at, size in zip(box.at, box.sizes, strict=True))]

    def _write(self, save: Save, wait: Callable[[], None]) -> None:
        wait()
        tensors: list[tuple[str, Sequence[int], Tensor]] = []
        for kind in self.rows:
            at = 0
            for box in self.boxes:
                piece = self.memory[kind][at : at + box.count].view(box.sizes)
                tensors.append((checkpoint.key_of(kind, box.part), box.offsets, piece))
                at += box.count
        tensors += [(name, [0], tensor) for name, tensor in save.own.items()]
        write_shard(save.place, checkpoint.file_name(self.mesh.rank), tensors, save.texts)
        save.written = True

    def _seal(self, save: Save) -> None:
        body = {**save.body, "updates": int(save.updates), "skipped": save.skipped.tolist()}
        save.bytes = checkpoint.seal(save.place, self.table, body)
        try:
            checkpoint.prune(self.place, save.step, self.config.checkpoint.keep)
        except Exception as error:
            save.note = f"old checkpoints in {self.place} could not be removed: {_line(error)}"
        save.sealed = True

    def _make_way(self, step: int) -> None:
        """Clear away what kills have left over, make the directory, see that there is room."""
        checkpoint.clear(self.place)
        place = self.place / checkpoint.directory_name(step)
        if checkpoint.is_complete(self.place, step):
            try:
                with checkpoint.Checkpoint(place) as there:
                    there.check(there.files)
            except Broken:  # resuming passed over it
                checkpoint.remove(self.place, step)
            else:
                raise UserError(f"{place}: is there already; it stays as it is")
        self._room()
        place.prepare()

    def _room(self) -> None:
        free = self.place.free()
        if free is not None and free < self.needed:
            raise UserError(
                f"{self.place}: a checkpoint needs {self.needed / 2**20:,.0f} MiB, {free / 2**20:,.0f} MiB are free"
            )

    def _give_up(self, save: Save) -> None:
        self.current = None
        line = next(filter(None, self.mesh.collect(save.error)))
        text = f"checkpoint of step {save.step} was not written: {line}"
        if self.config.checkpoint.on_failure == "stop":
            raise RunStopped(f"{text} (checkpoint.on_failure=stop)")
        self.complain(text)

    def _together(self, words: Words) -> Words:
        said = torch.tensor(words, dtype=torch.float32, device=self.device.handle)
        return Words(*self.mesh.everyone.sum(said).tolist())


def _line(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return one_line(error) if isinstance(error, UserError) else f"{type(error).__name__}: {one_line(error)}"
