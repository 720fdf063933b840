"""The server of a model, which starts and ends the worker in order; its event streams, and clients that go away."""

import asyncio
import json
import socket
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, TypeVar

from fastapi import FastAPI
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from trainyard.core.web_server import STOP_S, SignalServer
from trainyard.inference.serve.errors import ApiError
from trainyard.inference.serve.worker import SchedulerWorker

Result = TypeVar("Result")
DRAIN_S = 3.0
"""Seconds that requests in flight may take after a stop signal. After that, connections, and the engine's current step,
have STOP_S seconds."""


class ModelServer(SignalServer):
    """A server that owns the worker: it starts and ends with the server."""

    def __init__(self, app: FastAPI, worker: SchedulerWorker, on_ready: Callable[[], None]) -> None:
        """`on_ready` is called when requests are accepted."""
        super().__init__(app, on_ready)
        self.worker = worker
        worker.on_dead = self.stop

    def run_on(self, bound: socket.socket) -> None:
        """Serve until a signal or `stop`."""
        super().run_on(bound)
        self.worker.stop(STOP_S)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self.worker.start()
        await super().startup(sockets)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept nothing more, let requests in flight finish for DRAIN_S seconds, and cancel the others."""
        for server in self.servers:
            server.close()
        self.worker.drain()
        deadline = time.monotonic() + DRAIN_S
        while self.worker.num_pending and time.monotonic() < deadline and not self.force_exit:
            await asyncio.sleep(0.05)
        self.worker.fail_all(ApiError(503, "the server is shutting down", code="shutting_down"))
        await super().shutdown(sockets)


class ClientDisconnect(Exception):
    """The client closed the connection before the answer was complete."""


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """Do `work`, or cancel it and raise ClientDisconnect if the client disconnects first."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_wait_for_disconnect(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Sends each JSON text as an event, then `[DONE]`; an error after the first event is the last event."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[str], close: Callable[[], None]) -> None:
        """`close` is called when the stream ends for any reason."""
        super().__init__(headers={"Cache-Control": "no-cache"})
        del self.headers["content-length"]
        self._events, self._close = events, close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await until_disconnect(receive, self._send_all(send))
        except (ClientDisconnect, OSError):
            pass
        finally:
            self._close()

    async def _send_all(self, send: Send) -> None:
        async def send_event(text: str) -> None:
            await send({"type": "http.response.body", "body": f"data: {text}\n\n".encode(), "more_body": True})

        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        try:
            async for text in self._events:
                await send_event(text)
            await send_event("[DONE]")
        except ApiError as error:
            await send_event(json.dumps(error.body()))
        await send({"type": "http.response.body", "body": b"", "more_body": False})
