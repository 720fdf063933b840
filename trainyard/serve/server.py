"""The process that serves: its socket, its signals, and an orderly end."""

import asyncio
import errno
import ipaddress
import logging
import signal
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI

from trainyard.core.errors import UserError
from trainyard.serve.errors import ApiError
from trainyard.serve.worker import SchedulerWorker

DRAIN_S = 3.0
"""Seconds that requests in flight may take after a stop signal."""
STOP_S = 3.0
"""Seconds to wait for connections, and for the engine's current step, after that."""


def is_loopback(host: str) -> bool:
    """True if only this machine can reach `host`. Raises UserError if there is no such host."""
    return all(ipaddress.ip_address(info[4][0]).is_loopback for info in _addresses(host, 0))


def bind_socket(host: str, port: int) -> socket.socket:
    """A socket bound to host and port. Raises UserError if that is not possible."""
    family, kind, protocol, _, address = _addresses(host, port)[0]
    bound = socket.socket(family, kind, protocol)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind(address)
    except OSError as error:
        bound.close()
        if error.errno == errno.EADDRINUSE:
            raise UserError(f"--port {port}: in use; choose another one, or 0 for any free port") from None
        if error.errno == errno.EADDRNOTAVAIL:
            raise UserError(f"--host {host}: not an address of this machine") from None
        raise UserError(f"--host {host} --port {port}: {error.strerror}") from None
    return bound


def _addresses(host: str, port: int) -> Sequence[tuple[socket.AddressFamily, socket.SocketKind, int, str, Any]]:
    try:
        return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError):
        raise UserError(f"--host {host}: no such host") from None


def base_url(bound: socket.socket) -> str:
    host, port = bound.getsockname()[:2]
    return f"http://[{host}]:{port}/v1" if ":" in host else f"http://{host}:{port}/v1"


class ModelServer(uvicorn.Server):
    """uvicorn that owns the worker: it starts and ends with the server, and SIGINT and SIGTERM end both in order."""

    def __init__(self, app: FastAPI, worker: SchedulerWorker, on_ready: Callable[[], None]) -> None:
        """`on_ready` is called when requests are accepted."""
        super().__init__(
            uvicorn.Config(
                app,
                loop="asyncio",
                http="h11",
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_graceful_shutdown=int(STOP_S),
            )
        )
        self.worker, self.on_ready = worker, on_ready
        worker.on_dead = self.stop

    def stop(self) -> None:
        """End the server, from any thread."""
        self.should_exit = True

    def run_on(self, bound: socket.socket) -> None:
        """Serve until a signal or `stop`."""
        asyncio.run(self.serve(sockets=[bound]))
        self.worker.stop(STOP_S)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self.worker.start()
        await super().startup(sockets)
        self.on_ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept nothing more, let requests in flight finish for DRAIN_S seconds, and cancel the others."""
        for server in self.servers:
            server.close()
        self.worker.drain()
        deadline = time.monotonic() + DRAIN_S
        while self.worker.num_pending and time.monotonic() < deadline and not self.force_exit:
            await asyncio.sleep(0.05)
        self.worker.fail_all(ApiError(503, "the server is shutting down", code="shutting_down"))
        # A client that never sends the rest of its request, or never reads its answer, is no error of the server.
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
        await super().shutdown(sockets)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Stop on SIGINT and SIGTERM. uvicorn would raise them again at the end, which is not a clean exit."""
        try:
            previous = {number: signal.signal(number, self._on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
        except ValueError:  # not the main thread, which alone gets signals
            previous = {}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.force_exit = self.should_exit  # the second signal does not wait
        self.should_exit = True
