"""uvicorn with the settings and the end that all servers of this package have."""

import asyncio
import logging
import signal
import socket
from asyncio import TimerHandle, Transport
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

STOP_S = 3.0
"""Seconds to wait for connections after a stop signal."""
REQUEST_S = 30.0
"""Seconds in which a client must send a complete request, from its first byte, or from opening a connection."""
TIMEOUT_ANSWER = b"HTTP/1.1 408 Request Timeout\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"


class TimedProtocol(H11Protocol):
    """uvicorn's protocol, which by itself waits forever for the rest of a request."""

    request_timer: TimerHandle | None = None

    def connection_made(self, transport: Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._start_timer()

    def handle_events(self) -> None:
        super().handle_events()
        state, (unread, _) = self.conn.their_state, self.conn.trailing_data
        if state is h11.SEND_BODY or (state is h11.IDLE and unread):
            self._start_timer()
        else:
            self._stop_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def _start_timer(self) -> None:
        self.request_timer = self.request_timer or self.loop.call_later(REQUEST_S, self._on_timeout)

    def _stop_timer(self) -> None:
        if self.request_timer:
            self.request_timer.cancel()
            self.request_timer = None

    def _on_timeout(self) -> None:
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):  # no answer has begun
            self.transport.write(TIMEOUT_ANSWER)
        self.transport.close()


class SignalServer(uvicorn.Server):
    """A server that SIGINT and SIGTERM end in order, with exit code 0."""

    def __init__(self, app: ASGIApp, on_ready: Callable[[], None]) -> None:
        """`on_ready` is called when requests are accepted."""
        super().__init__(
            uvicorn.Config(
                app,
                loop="asyncio",
                http=TimedProtocol,
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_graceful_shutdown=int(STOP_S),
            )
        )
        self.on_ready = on_ready

    def stop(self) -> None:
        """End the server, from any thread."""
        self.should_exit = True

    def run_on(self, bound: socket.socket) -> None:
        """Serve until a signal or `stop`."""
        asyncio.run(self.serve(sockets=[bound]))

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.on_ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
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
