"""Refuses requests that were sent to the name of another server."""

import ipaddress
import socket

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

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
