"""What a server of this package listens on, and the token that its clients must send."""

import errno
import hmac
import ipaddress
import os
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trainyard.core.errors import UserError


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


def base_url(bound: socket.socket, path: str = "") -> str:
    host, port = bound.getsockname()[:2]
    return f"http://[{host}]:{port}{path}" if ":" in host else f"http://{host}:{port}{path}"


def read_token(file: Path | None, variable: str) -> str | None:
    """The token in `file`, or else in an environment variable; None if there is none. Raises UserError if the file has
    no token."""
    if file is None:
        return os.environ.get(variable, "").strip() or None
    try:
        token = file.expanduser().read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not text"
        raise UserError(f"--token-file {file}: {reason}") from None
    if not token or len(token.split()) > 1:
        raise UserError(f"--token-file {file}: must hold one token without spaces")
    return token


def is_bearer(authorization: bytes, token: str) -> bool:
    """True if an Authorization header has the token. Takes the same time for all tokens of one length."""
    return hmac.compare_digest(authorization, f"Bearer {token}".encode())
