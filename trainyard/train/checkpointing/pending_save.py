"""One checkpoint while it is being written: host copies, the thread that writes them, and its progress."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from trainyard.core.errors import RunStopped, UserError, one_line
from trainyard.remote.storage import Storage
from trainyard.train.status import StepStatus


@dataclass
class PendingSave:
    """State of a save on this rank."""

    step: int
    storage: Storage
    """Directory of this checkpoint."""
    metadata: dict[str, Any]
    """Content of the manifest that is known when the save starts."""
    started_at: float
    stall_s: float = 0.0
    """Seconds that training has waited for this save."""
    rng_tensors: dict[str, Tensor] = field(default_factory=dict)
    rng_texts: dict[str, str] = field(default_factory=dict)
    """Random generator states of this rank."""
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
    def status(self) -> StepStatus:
        return StepStatus(
            shard_written=float(self.shard_written),
            committed=float(self.committed),
            save_failed=float(bool(self.error)),
        )

    def join(self) -> None:
        if self.thread:
            self.thread.join()

    def run_in_thread(self, work: Callable[[], None]) -> None:
        """Run `work` in a thread and keep an exception as one line in `error`."""

        def run_and_catch() -> None:
            try:
                work()
            except Exception as error:  # nobody would see the traceback of a thread
                self.error = error_line(error)

        self.thread = threading.Thread(target=run_and_catch, daemon=True)
        self.thread.start()


def error_line(error: Exception) -> str:
    """One line that names the file of an OSError, or the type of an unexpected exception."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return (
        one_line(error) if isinstance(error, UserError | RunStopped) else f"{type(error).__name__}: {one_line(error)}"
    )
