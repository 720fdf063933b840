"""A finding of `trainyard doctor`: something that works, or that will stop a run, and its fix."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

Level = Literal["ok", "warning", "error"]


@dataclass(frozen=True)
class Finding:
    """One checked fact."""

    subject: str
    level: Level
    text: str
    fix: str = ""
    """The command or change that helps, exactly."""
    repair: Callable[[], str] | None = field(default=None, compare=False)
    """Fixes it and returns what was done. Only for what this project left behind."""
