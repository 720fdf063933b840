"""A checkpoint that an evaluation reads on one rank."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from trainyard.checkpoint.registry import OpenedCheckpoint
from trainyard.config.schema import Config
from trainyard.core.world import World

OnProgress = Callable[[str, int, int], None]
"""Called with what is counted, how many are done, and their total."""


@dataclass(frozen=True)
class CheckpointSource:
    path: str | Path
    opened: OpenedCheckpoint
    config: Config
    """Of the evaluation."""
    world: World
    on_progress: OnProgress = lambda what, done, total: None
