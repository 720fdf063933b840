"""The server of a model: uvicorn that starts and ends the worker in order."""

import asyncio
import socket
import time
from collections.abc import Callable

from fastapi import FastAPI

from trainyard.core.web_server import STOP_S, SignalServer
from trainyard.inference.serve.errors import ApiError
from trainyard.inference.serve.worker import SchedulerWorker

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
