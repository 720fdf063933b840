"""Agreement between threads of all ranks, through the store where the ranks met. The main threads take no part in it:
their collectives may never end."""

import time
from datetime import timedelta
from typing import Any

from trainyard.core.world import World

SIGNAL_TIMEOUT = timedelta(seconds=10)
"""Limit of the wait for other ranks after a signal, which all of them get at the same time."""
LAST_ANSWER_S = 1.0
"""Time for the other ranks to read the last answer of the store."""
WRITE_TIMEOUT = timedelta(minutes=30)
"""Limit of the wait for other ranks that write files."""


class RankAgreement:
    """Lets a thread of each rank wait for those of all others."""

    def __init__(self, store: Any, world: World) -> None:
        """`store` is a connection of its own, which the main thread does not use; None for one rank."""
        self.store, self.world = store, world

    @property
    def possible(self) -> bool:
        """False if a caller created the process group, and kept its store."""
        return self.world.size == 1 or self.store is not None

    def wait_for_all(self, name: str, timeout: timedelta, error: str = "") -> str:
        """Wait until all ranks have called this with `name`. Returns the error of one of them, if any."""
        if self.world.size == 1:
            return error
        key = f"trainyard/deadline/{name}"
        if error:
            self.store.set(f"{key}/error", error)
        if self.store.add(f"{key}/count", 1) == self.world.size:
            self.store.set(f"{key}/all", "1")
        self.store.wait([f"{key}/all"], timeout)
        return self.store.get(f"{key}/error").decode() if self.store.check([f"{key}/error"]) else ""

    def latest_step(self, step: int) -> int:
        """The largest step of all ranks. Ranks differ by one at most: an update needs all of them."""
        if self.world.size > 1:
            self.store.add(f"trainyard/deadline/step/{step}", 1)
            self.wait_for_all("hold", SIGNAL_TIMEOUT)
            return step + bool(self.store.check([f"trainyard/deadline/step/{step + 1}"]))
        return step

    def leave(self) -> None:
        """Wait until all ranks are about to exit. The first one, which has the store, exits last."""
        self.wait_for_all("exit", SIGNAL_TIMEOUT)
        if self.world.size > 1 and self.world.rank == 0:
            time.sleep(LAST_ANSWER_S)
