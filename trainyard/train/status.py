"""Flags that ranks share with every step: they ride on the all-reduce of the loss, so no extra message is needed."""

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


NO_FLAGS = StepStatus()
