"""Saves the last completed step although the main thread is inside a step that takes too long.

A signal asks for the end of the run, and the step in progress does not end in time: it has many micro batches, it
compiles, or another rank hangs. Forward and backward change nothing that a checkpoint holds; only the update does. A
thread therefore holds the next update, agrees with the other ranks on a step through the store where they met (the main
threads may be inside a collective), saves it, and ends the process.
"""

import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress

from trainyard.core.constants import EXIT_INTERRUPTED
from trainyard.devices import Device
from trainyard.run.callbacks import Part, TrainerView
from trainyard.run.checkpointing.rank_agreement import RankAgreement
from trainyard.run.checkpointing.rng_state import RngState, capture_rng_state
from trainyard.run.checkpointing.saver import Saver
from trainyard.run.checkpointing.state_writer import error_line

DEADLINE_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
"""Schedulers send them some time before they kill. Somebody who presses Ctrl-C can wait, or press it again."""
THREAD_END_S = 1.0
logger = logging.getLogger(__name__)


class UpdateGate:
    """Where the main thread stands, and a limit to the updates that it may start."""

    def __init__(self, completed: int, rng: RngState | None) -> None:
        self._changed = threading.Condition()
        self.started = self.completed = completed
        """The last update that was started, and the last step that is complete."""
        self.rng = rng
        """The random generators after the last completed step; None if the device cannot be asked at any time."""
        self.in_step = self.closed = False
        self.limit: int | None = None

    def begin_step(self) -> None:
        with self._changed:
            self.in_step = True
            self._changed.notify_all()

    def begin_update(self, step: int) -> None:
        """Called before the update of `step`. Waits while the update is held."""
        with self._changed:
            self._changed.wait_for(lambda: self.limit is None or step <= self.limit)
            self.started = step

    def end_step(self, step: int, rng: RngState | None) -> None:
        """Called when `step` is complete and logged. Waits while its state is being saved."""
        with self._changed:
            self.completed, self.rng, self.in_step = step, rng, False
            self._changed.notify_all()
            self._changed.wait_for(lambda: self.limit is None or step < self.limit)

    def hold(self) -> int | None:
        """Hold all updates that have not started. Returns the last one that has; None if no step follows. Waits for a
        step: between steps, the main thread logs, evaluates and saves itself."""
        with self._changed:
            self._changed.wait_for(lambda: self.in_step or self.closed)
            if self.closed:
                return None
            self.limit = self.started
            return self.started

    def run_to(self, step: int) -> None:
        """Let the main thread complete `step`, and no more."""
        with self._changed:
            self.limit = step
            self._changed.notify_all()
            self._changed.wait_for(lambda: self.completed == step)

    def release(self) -> None:
        with self._changed:
            self.limit = None
            self._changed.notify_all()

    def close(self) -> None:
        """No step follows."""
        with self._changed:
            self.closed, self.limit = True, None
            self._changed.notify_all()


class DeadlineSaver(Part):
    """Watches for signals during a run, in a thread."""

    def __init__(
        self,
        grace_s: float,
        saver: Saver | None,
        device: Device,
        agreement: RankAgreement,
        completed: int,
        before_exit: Callable[[], None],
    ) -> None:
        """`before_exit` closes files that the main thread cannot close. Without a `saver`, nothing is saved."""
        self.grace_s, self.saver, self.device, self.agreement = grace_s, saver, device, agreement
        self.before_exit, self.first_step = before_exit, completed
        self.gate = UpdateGate(completed, self._capture_rng_state())
        self.saving = False
        """True while the thread saves; the main thread must then not end the process."""
        self.ended = threading.Event()
        """The steps ended by themselves."""
        self.thread = threading.Thread(target=self._watch, daemon=True)
        self.bind_thread = device.thread_binder()

    def open(self) -> None:
        if not self.agreement.possible:
            return
        self.reader, self.writer = os.pipe()
        os.set_blocking(self.writer, False)
        try:
            # Python's own handlers run in the main thread, which may be inside a C function for minutes.
            self.previous_fd = signal.set_wakeup_fd(self.writer, warn_on_full_buffer=False)
        except ValueError:  # not in the main thread: the caller handles signals
            os.close(self.reader)
            os.close(self.writer)
            return
        os.register_at_fork(after_in_child=_forget_wakeup_fd)  # a signal to a child is none to this process
        self.thread.start()

    def begin_step(self, step: int, logged: bool) -> None:
        self.gate.begin_step()

    def on_gradients_ready(self, trainer: TrainerView) -> None:
        self.gate.begin_update(trainer.completed_steps + 1)

    def complete_step(self, step: int) -> None:
        """Does not return while the state of `step` is being saved."""
        self.gate.end_step(step, self._capture_rng_state())

    def on_last_step(self, trainer: TrainerView) -> None:
        self._stop()

    def close(self) -> None:
        if not self.thread.ident:
            return
        if self.saving:  # an error of the main thread follows from the end of other ranks, which have saved
            self.thread.join()
        self._stop()
        signal.set_wakeup_fd(self.previous_fd)
        os.close(self.writer)
        self.thread.join(THREAD_END_S)
        if not self.thread.is_alive():
            os.close(self.reader)

    def _stop(self) -> None:
        """No step follows: the main thread saves."""
        self.ended.set()
        self.gate.close()

    def _capture_rng_state(self) -> RngState | None:
        return capture_rng_state(self.device) if self.device.copies_during_steps else None

    def _watch(self) -> None:
        received = os.read(self.reader, 1)  # it stays open: signals come again
        while received and received[0] not in DEADLINE_SIGNALS:
            received = os.read(self.reader, 1)
        if not received or self.ended.wait(self.grace_s):
            return
        try:
            self._save_and_exit()
        except Exception as problem:  # the run continues, and stops after its step
            logger.warning("the state before this step could not be saved: %s", error_line(problem))
            self.saving = False
            self.gate.release()

    def _save_and_exit(self) -> None:
        held = self.gate.hold()
        if held is None:
            return
        step = self.agreement.latest_step(held)
        self.saving = not self.ended.is_set()
        if not self.saving:
            return
        self.bind_thread()
        self.gate.run_to(step)
        if self.saver and step > self.first_step:  # else it starts again as it did this time
            self.saver.save_held_state(step, self.gate.rng, self.agreement)
        logger.warning("stopped inside step %s, which did not end within %g s", step + 1, self.grace_s)
        self.before_exit()
        sys.stdout.flush()
        sys.stderr.flush()
        self.agreement.leave()
        os._exit(EXIT_INTERRUPTED)


def _forget_wakeup_fd() -> None:
    with suppress(ValueError):  # not in the main thread
        signal.set_wakeup_fd(-1)
