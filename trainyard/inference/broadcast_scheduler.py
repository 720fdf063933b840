"""Tensor-parallel ranks that serve requests: the first rank decides what each step computes, and the others follow.

All ranks have a scheduler. They make the same decisions if they get the same requests before the same steps, so the
leader sends those through the store where the ranks met, a message per step.
"""

import json
from dataclasses import asdict
from datetime import timedelta
from typing import Any

from trainyard.core.errors import UserError
from trainyard.inference.requests import Request, SamplingOptions, SchedulerLoad, TokenEvent
from trainyard.inference.scheduler import RequestScheduler

KEPT_MESSAGES = 64
"""Messages that stay in the store; followers are at most a few steps behind."""
POLL = timedelta(minutes=1)
"""How long a follower waits for a message before it asks again. A server may have nothing to do for days."""


class BroadcastScheduler:
    """The scheduler of the first rank, which sends every command to the others. It has the methods of
    RequestScheduler."""

    def __init__(self, scheduler: RequestScheduler, store: Any) -> None:
        self.scheduler, self.store = scheduler, store
        self.max_seq_len = scheduler.max_seq_len
        self.steps = 0
        self.commands: list[Any] = []
        """What all ranks do before the next step: add a request (its fields), or cancel one (its number)."""

    def add(self, request: Request) -> None:
        """Queue a request. Raises UserError as RequestScheduler does."""
        self.scheduler.check(request)
        self.commands.append(asdict(request))

    def cancel(self, request_id: int) -> None:
        self.commands.append(request_id)

    @property
    def has_work(self) -> bool:
        return bool(self.commands) or self.scheduler.has_work

    @property
    def load(self) -> SchedulerLoad:
        return self.scheduler.load

    def step(self) -> list[TokenEvent]:
        self._send(self.commands)  # first: the collectives of the step below wait for the other ranks
        _apply(self.scheduler, self.commands)
        self.commands = []
        return self.scheduler.step()

    def close(self) -> None:
        """Let the other ranks return."""
        self._send(None)

    def _send(self, message: Any) -> None:
        self.store.set(_key(self.steps), json.dumps(message, default=sorted))  # end_ids are a set
        if self.steps >= KEPT_MESSAGES:
            self.store.delete_key(_key(self.steps - KEPT_MESSAGES))
        self.steps += 1


def follow(scheduler: RequestScheduler, store: Any) -> None:
    """Do what the leader does, until it closes."""
    step = 0
    while True:
        try:
            store.wait([_key(step)], POLL)
        except RuntimeError as error:
            if "timeout" not in str(error).lower():
                raise
            continue
        message = json.loads(store.get(_key(step)))
        if message is None:
            return
        _apply(scheduler, message)
        scheduler.step()
        step += 1


def _key(step: int) -> str:
    return f"trainyard/inference/serve/{step}"


def _apply(scheduler: RequestScheduler, commands: list[Any]) -> None:
    for command in commands:
        if isinstance(command, int):
            scheduler.cancel(command)
            continue
        options = SamplingOptions(**command["options"] | {"end_ids": frozenset(command["options"]["end_ids"])})
        try:
            scheduler.add(Request(**command | {"options": options}))
        except UserError as error:
            raise AssertionError(f"the leader accepted a request that is refused: {error}") from error
