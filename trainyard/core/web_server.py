"""What the HTTP servers of this package share: uvicorn with their settings and their end, a check of the Host header, a
limit of the body."""

import asyncio
import ipaddress
import logging
import signal
import socket
from asyncio import TimerHandle, Transport
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

import h11
import uvicorn
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from trainyard.core.constants import MIB

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


REFUSAL = "this server does not answer to that name (Host header); use its address"


class CheckHost:
    """Refuses requests with a foreign Host header: a page of another site whose name now resolves to this machine
    sends its own name (DNS rebinding)."""

    def __init__(self, app: ASGIApp, host: str, refusal: ASGIApp) -> None:
        """`host`: the address that the server listens on. `refusal`: the answer to other names."""
        self.app, self.refusal = app, refusal
        self.names = {"localhost", host.lower()}
        self.only_loopback = True
        try:
            self.only_loopback = ipaddress.ip_address(host).is_loopback
        except ValueError:
            self.only_loopback = host.lower() == "localhost"
        if not self.only_loopback:
            self.names |= {socket.gethostname().lower(), socket.getfqdn().lower()}

    def is_known(self, header: str) -> bool:
        """The port does not matter: it is another one behind `ssh -L`."""
        if header.startswith("["):
            name, bracket, port = header[1:].partition("]")
            is_valid = bool(bracket) and (not port or port.startswith(":"))
        else:
            name, _, port = header.partition(":")
            is_valid = ":" not in port
        if not is_valid:
            return False
        try:
            address = ipaddress.ip_address(name)
        except ValueError:
            return name.lower() in self.names
        # An address is no name that somebody else could point here.
        return address.is_loopback or not self.only_loopback

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            hosts = Headers(scope=scope).getlist("host")
            if len(hosts) != 1 or not self.is_known(hosts[0]):
                await self.refusal(scope, receive, send)
                return
        await self.app(scope, receive, send)


MAX_BODY_BYTES = 4 * MIB
MAX_DISCARDED_BYTES = 64 * MIB
"""Of a body that is too large, this much is read before the answer: most clients read it only after sending all."""


class LimitBody:
    """Answers 413 to a body of more than `limit` bytes, whether its length is announced or not."""

    def __init__(self, app: ASGIApp, limit: int = MAX_BODY_BYTES) -> None:
        self.app, self.limit = app, limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        received = 0

        async def limited_receive() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > self.limit:
                while message.get("more_body") and received < MAX_DISCARDED_BYTES:
                    message = await receive()
                    received += len(message.get("body", b""))
                raise HTTPException(413, f"the body has more than {self.limit} bytes")
            return message

        await self.app(scope, limited_receive, send)
