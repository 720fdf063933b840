"""The thread that owns the scheduler, and the queues through which the event loop talks to it.

The scheduler is not thread-safe and a step blocks for as long as the model computes, so one thread calls all of its
methods. Commands reach it through a queue; the tokens of a step go back to the event loop in one call.
"""

import asyncio
import itertools
import logging
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Protocol

from trainyard.core.errors import UserError, one_line
from trainyard.core.quantities import counted
from trainyard.inference.requests import Request, SamplingOptions, SchedulerLoad, TokenEvent
from trainyard.inference.serve.errors import ApiError
from trainyard.inference.serve.metrics import ServerMetrics

MAX_FAULTS = 3
"""Failed steps in a row after which the server ends: an engine that cannot step does not recover."""
RETRY_AFTER_S = 1
logger = logging.getLogger("trainyard.inference.serve")

Command = Request | int | None
"""A request to add, the id of one to cancel, or None: stop."""


class StepScheduler(Protocol):
    """What the worker needs of a scheduler: RequestScheduler has it, and BroadcastScheduler."""

    def add(self, request: Request) -> None:
        """Queue a request. Raises UserError if the model cannot continue it."""

    def cancel(self, request_id: int) -> None:
        """Drop a request. No event follows. Unknown ids are ignored."""

    @property
    def has_work(self) -> bool: ...

    @property
    def load(self) -> SchedulerLoad: ...

    def step(self) -> list[TokenEvent]:
        """Compute one token of every request in the batch, and return the tokens that are known."""


class Subscription:
    """The tokens of the sequences that one HTTP request asked for. Lives in the event loop."""

    def __init__(self, worker: "SchedulerWorker") -> None:
        self.request_ids: dict[int, int] = {}
        """Index of each unfinished sequence by its request id."""
        self._worker = worker
        self._queue: asyncio.Queue[tuple[int, TokenEvent] | ApiError] = asyncio.Queue()
        self._next: tuple[int, TokenEvent] | None = None

    async def next_token(self) -> tuple[int, TokenEvent]:
        """Index of a sequence and its next token. Raises ApiError if the request fails."""
        await self.wait_for_token()
        assert self._next
        item, self._next = self._next, None
        return item

    async def wait_for_token(self) -> None:
        """Wait until there is a token, which stays the next one. Raises ApiError if the request fails."""
        if self._next is None:
            item = await self._queue.get()
            if isinstance(item, ApiError):
                raise item
            self._next = item

    def cancel(self, index: int) -> None:
        """End one sequence before its last token."""
        for request_id in [known for known, number in self.request_ids.items() if number == index]:
            self._worker.cancel(request_id)

    def close(self) -> None:
        """End all sequences that have not finished."""
        for request_id in list(self.request_ids):
            self._worker.cancel(request_id)

    def put(self, item: tuple[int, TokenEvent] | ApiError) -> None:
        self._queue.put_nowait(item)


class SchedulerWorker:
    """Runs a scheduler in a thread. All public methods except those of the thread belong to the event loop."""

    def __init__(
        self,
        scheduler: StepScheduler,
        max_pending: int,
        max_faults: int = MAX_FAULTS,
        close: Callable[[], None] = lambda: None,
    ) -> None:
        """`max_pending`: sequences that may wait or run. `close`: called in the thread after the last step."""
        self.scheduler, self.max_pending, self.max_faults, self.close = scheduler, max_pending, max_faults, close
        self.on_dead: Callable[[], None] = lambda: None
        """Called in the event loop when the engine is given up."""
        self.metrics = ServerMetrics()
        self.failure: str | None = None
        """Why the engine was given up."""
        self._draining = False
        self._subscriptions: dict[int, Subscription] = {}
        self._ids = itertools.count()
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="scheduler", daemon=True)
        self._active: set[int] = set()  # owned by the thread, as is the next
        self._faults = 0

    def start(self) -> None:
        """Start the thread. Called inside the event loop that serves the requests."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    @property
    def num_pending(self) -> int:
        return len(self._subscriptions)

    def submit(self, sequences: Sequence[tuple[list[int], SamplingOptions]], adapter: int = 0) -> Subscription:
        """Queue sequences for an adapter, by its number. Raises ApiError if the queue is full or the server ends."""
        if self.failure:
            raise ApiError(500, f"the engine failed: {self.failure}", code="engine_error")
        if self._draining:
            raise ApiError(503, "the server is shutting down", code="shutting_down")
        if len(sequences) > self.max_pending:
            raise ApiError(400, f"{counted(len(sequences), 'choice')}: the queue holds {self.max_pending}", "n")
        if self.num_pending + len(sequences) > self.max_pending:
            headers = {"Retry-After": str(RETRY_AFTER_S)}
            message = f"the queue is full: {self.num_pending} of {self.max_pending} sequences wait or run"
            raise ApiError(503, message, code="queue_full", headers=headers)
        subscription = Subscription(self)
        for index, (prompt, options) in enumerate(sequences):
            request = Request(next(self._ids), prompt, options, adapter)
            subscription.request_ids[request.request_id] = index
            self._subscriptions[request.request_id] = subscription
            self.metrics.on_submit(request.request_id, len(prompt))
            self._commands.put(request)
        return subscription

    def cancel(self, request_id: int) -> None:
        if self._forget(request_id, "abort"):
            self._commands.put(request_id)

    def drain(self) -> None:
        """Accept no more requests."""
        self._draining = True

    def fail_all(self, error: ApiError) -> None:
        """Answer all requests in flight with `error`."""
        self._fail(list(self._subscriptions), error)

    def stop(self, timeout_s: float) -> bool:
        """End the thread. False if the engine does not return from a step in time."""
        self._commands.put(None)
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _forget(self, request_id: int, reason: str) -> Subscription | None:
        subscription = self._subscriptions.pop(request_id, None)
        if subscription:
            self.metrics.on_end(request_id, reason)
            del subscription.request_ids[request_id]
        return subscription

    def _deliver(self, events: list[TokenEvent]) -> None:
        for event in events:
            self.metrics.on_token(event.request_id, event.cached_tokens)
            subscription = self._subscriptions.get(event.request_id)
            if subscription is None:  # cancelled meanwhile
                continue
            subscription.put((subscription.request_ids[event.request_id], event))
            if event.finish_reason:
                self._forget(event.request_id, event.finish_reason)

    def _fail(self, request_ids: list[int], error: ApiError) -> None:
        for request_id in request_ids:
            if subscription := self._subscriptions.get(request_id):
                subscription.put(error)
                subscription.close()

    def _give_up(self, failure: str) -> None:
        self.failure = failure
        self.fail_all(ApiError(500, f"the engine failed: {failure}", code="engine_error"))
        self.on_dead()

    # What follows runs in the thread.

    def _run(self) -> None:
        while self._faults < self.max_faults:
            if not self._take_commands():
                self.close()
                return
            if not self._active:
                continue
            try:
                if not self.scheduler.has_work:
                    raise RuntimeError(f"the scheduler lost {counted(len(self._active), 'request')}")
                events = self.scheduler.step()
            except BaseException as error:  # also SystemExit, which would end this thread silently
                self._on_fault(error)
                continue
            self._faults = 0
            self._active -= {event.request_id for event in events if event.finish_reason}
            if events:
                self._call(self._deliver, events)

    def _take_commands(self) -> bool:
        """Hand all commands to the scheduler; wait for one if nothing runs. False: stop."""
        wait = not self._active
        while True:
            try:
                command = self._commands.get(block=wait)
            except queue.Empty:
                return True
            wait = False
            if command is None:
                return False
            try:
                self._apply(command)
            except BaseException as error:
                self._on_fault(error)
                return True

    def _apply(self, command: Request | int) -> None:
        if isinstance(command, int):
            self._active.discard(command)
            self.scheduler.cancel(command)
            return
        self._active.add(command.request_id)
        try:
            self.scheduler.add(command)
        except UserError as error:
            self._active.discard(command.request_id)
            self._call(self._fail, [command.request_id], ApiError(400, str(error), "prompt"))

    def _on_fault(self, error: BaseException) -> None:
        """Answer everything in flight with 500 and go on with an empty batch, or give up after several faults."""
        self._faults += 1
        logger.error("the engine failed", exc_info=error)
        failure = f"{type(error).__name__}: {one_line(error)}"
        request_ids, self._active = sorted(self._active), set()
        for request_id in request_ids:
            try:
                self.scheduler.cancel(request_id)
            except BaseException:
                self._faults = self.max_faults
        if self._faults >= self.max_faults:
            self._call(self._give_up, failure)
        else:
            self._call(self._fail, request_ids, ApiError(500, f"the engine failed: {failure}", code="engine_error"))

    def _call(self, function: Callable[..., None], *args: object) -> None:
        assert self._loop
        try:
            self._loop.call_soon_threadsafe(function, *args)
        except RuntimeError:  # the event loop has ended; so does the process
            self._faults = self.max_faults
