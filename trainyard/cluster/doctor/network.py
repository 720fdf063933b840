"""Measures the network between two nodes: bandwidth of one TCP stream, and the difference of their clocks.

Plain sockets, on the address that gloo would use. They need no torch and no process group, which would hang as a whole
if one node cannot be reached; here every wait has a limit.
"""

import os
import socket
import struct
import time
from collections.abc import Callable
from contextlib import suppress

import psutil

CONNECT_S = 2.0
"""Longest wait for a connection: one lost SYN packet is sent again after a second."""
TRANSFER_S = 0.1
"""How long a node sends."""
TRANSFER_LIMIT_S = 0.3
"""How long the other one receives at most: a slow link drains the buffers of the sender slowly."""
STALL_S = 1.0
"""Longest wait for the next bytes on an open connection."""
CHUNK = bytes(1 << 18)
TOKEN_BYTES = 16
CLOCK_SAMPLES = 10
PING = b"?"
TIME_FORMAT = "!d"


def open_listener() -> socket.socket:
    """A socket on a free port of all addresses of this node."""
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=1024)
    return socket.create_server(("", 0), backlog=1024)


def own_address(node: str) -> str:
    """The address of this node for others, chosen as gloo does: that of the interface GLOO_SOCKET_IFNAME, or of the
    host name. The node's name in Slurm, which the others look up, if the host name means this host only."""
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    for address in psutil.net_if_addrs().get(interface, []):
        if address.family == socket.AF_INET:
            return address.address
    try:
        found = socket.gethostbyname(socket.gethostname())
    except OSError:
        return node
    return node if found.startswith("127.") else found


def send_stream(address: tuple[str, int], token: bytes) -> None:
    """Send as much as possible for TRANSFER_S. Raises OSError if the other node cannot be reached."""
    with socket.create_connection(address, CONNECT_S) as connection:
        connection.settimeout(STALL_S)
        connection.sendall(token)
        end = time.perf_counter() + TRANSFER_S
        with suppress(OSError):  # the receiver closes a slow stream early
            while time.perf_counter() < end:
                connection.send(CHUNK)


def receive_stream(listener: socket.socket, token: bytes) -> float:
    """Accept the stream that starts with `token` and return its rate in bytes per second. Raises OSError if it does
    not come."""
    with _accept(listener, token, time.perf_counter() + CONNECT_S + STALL_S) as connection:
        buffer, total = bytearray(1 << 20), 0
        start = end = time.perf_counter()
        with suppress(TimeoutError, ConnectionResetError):
            while end < start + TRANSFER_LIMIT_S and (count := connection.recv_into(buffer)):
                total += count
                end = time.perf_counter()
    if not total:
        raise TimeoutError("connected, but nothing arrived")
    return total / max(end - start, 1e-6)


def _accept(listener: socket.socket, token: bytes, end: float) -> socket.socket:
    """The connection that starts with `token`. Others are late ones of an earlier measurement, or strangers."""
    while True:
        listener.settimeout(max(end - time.perf_counter(), 1e-3))
        connection, _ = listener.accept()
        connection.settimeout(STALL_S)
        with suppress(OSError):
            if connection.recv(TOKEN_BYTES, socket.MSG_WAITALL) == token:
                return connection
        connection.close()


def serve_clock(listener: socket.socket, token: bytes, clients: int, clock: Callable[[], float] = time.time) -> None:
    """Tell the time to `clients` nodes, one after another. Returns early if some do not come."""
    end = time.perf_counter() + CONNECT_S + STALL_S
    for _ in range(clients):
        try:
            with _accept(listener, token, end) as connection:
                while connection.recv(len(PING)):
                    connection.sendall(struct.pack(TIME_FORMAT, clock()))
        except OSError:
            continue


def clock_offset(address: tuple[str, int], token: bytes, clock: Callable[[], float] = time.time) -> float:
    """Seconds by which the clock here is ahead of the one there. As in NTP, the sample with the shortest round trip
    counts: its error is at most half of that."""
    with socket.create_connection(address, CONNECT_S) as connection:
        connection.settimeout(CONNECT_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.sendall(token)
        samples = []
        for _ in range(CLOCK_SAMPLES):
            start = time.perf_counter()
            before = clock()
            connection.sendall(PING)
            reply = connection.recv(struct.calcsize(TIME_FORMAT), socket.MSG_WAITALL)
            after = clock()
            if len(reply) != struct.calcsize(TIME_FORMAT):
                raise ConnectionResetError("the connection was closed")
            samples.append((time.perf_counter() - start, (before + after) / 2 - struct.unpack(TIME_FORMAT, reply)[0]))
    return float(min(samples)[1])
