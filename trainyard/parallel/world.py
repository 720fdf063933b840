"""World: this process's rank among the processes of a run.

Only commands and the Trainer's default read the launcher's environment variables. Everything below takes a World, so
that several dry runs of different ranks can live in one process.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from trainyard.core.errors import UserError


@dataclass(frozen=True)
class World:
    """Rank and size as the launcher assigned them; by default a single process."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    """Index among the ranks of this host, which is also the index of its device."""
    local_size: int = 1
    """Ranks on this host, as far as the launcher says."""

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] = os.environ) -> Self:
        """Read RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE, which torchrun and our launcher set."""
        defaults = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        values = {name: environ.get(name) or default for name, default in defaults.items()}
        try:
            return cls(*(int(value) for value in values.values()))
        except ValueError:
            variables = " ".join(f"{name}={value}" for name, value in values.items())
            raise UserError(f"{variables}: must be integers") from None
