"""What a step tells the host: flags of all ranks, which ride on the all-reduce of the loss, and the step's numbers."""

from typing import NamedTuple


class StepStatus(NamedTuple):
    """Per-rank flags (0 or 1), all-reduced with every step; after the reduce each field counts ranks."""

    stop_requested: float = 0.0
    """A signal asked this rank to stop after the step."""
    save_due: float = 0.0
    """Rank 0's clock says that checkpoint.every_minutes have passed."""
    shard_written: float = 0.0
    """This rank has written its shard of the checkpoint in progress."""
    committed: float = 0.0
    """Rank 0 has committed the checkpoint in progress."""
    save_failed: float = 0.0
    """This rank could not write its part of the checkpoint in progress."""
    copy_stored: float = 0.0
    """This rank has stored its part of the copy in host memory that is in progress, and that of another host."""
    copy_failed: float = 0.0
    """This rank could not store its part of the copy in host memory."""


class HostStatus(NamedTuple):
    """The host copy of a step's status, the same on all ranks. It is read while the next step runs."""

    skipped_total: int
    skipped_in_a_row: int
    """Above 0 if the step was skipped."""
    loss: float
    grad_norm: float
    label_count: float
    flags: StepStatus
    """Summed over all ranks."""

    def skip_reason(self) -> str:
        """Why the step was skipped."""
        if not self.label_count > 0:
            return "no label of the batch counts"
        return f"not finite: loss {self.loss}, gradient norm {self.grad_norm}"


NO_FLAGS = StepStatus()
