"""The network between nodes: bandwidth of one TCP stream and difference of clocks between two of them, the order in
which pairs are measured, and what the figures say about nodes and links.

Plain sockets, on the address that gloo would use. They need no torch and no process group, which would hang as a whole
if one node cannot be reached; here every wait has a limit.
"""

import os
import socket
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from statistics import median

import psutil

from trainyard.cluster.doctor.node_findings import compress_hosts
from trainyard.core.finding import Finding
from trainyard.core.quantities import counted

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
CLOCK_ROUND_TRIPS = 10
PING = b"?"
TIME_FORMAT = "!d"
Link = tuple[str, str]
"""Sender and receiver."""
Rates = Mapping[Link, float | None]
"""Bytes per second; None where the receiver could not be reached."""
SLOW = 0.5
"""Part of the typical rate below which a link is slow."""
MAX_SLOW_LINKS = 8
"""Slow links that are listed; further ones are only counted."""
FAILURES_TO_GIVE_UP = 2
LINKS_OF_THREE_NODES = 6


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
    """Seconds by which the clock here is ahead of the one there. As in NTP, the shortest round trip
    counts: its error is at most half of that."""
    with socket.create_connection(address, CONNECT_S) as connection:
        connection.settimeout(CONNECT_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.sendall(token)
        readings = []
        for _ in range(CLOCK_ROUND_TRIPS):
            start = time.perf_counter()
            before = clock()
            connection.sendall(PING)
            reply = connection.recv(struct.calcsize(TIME_FORMAT), socket.MSG_WAITALL)
            after = clock()
            if len(reply) != struct.calcsize(TIME_FORMAT):
                raise ConnectionResetError("the connection was closed")
            readings.append((time.perf_counter() - start, (before + after) / 2 - struct.unpack(TIME_FORMAT, reply)[0]))
    return float(min(readings)[1])


def tournament(nodes: Sequence[str]) -> list[list[Link]]:
    """Rounds in which every node meets every other one once, and is in one pair at a time (the circle method).

    N-1 rounds, or N if N is odd: one node rests in each.
    """
    ring: list[str | None] = [*nodes] if len(nodes) % 2 == 0 else [*nodes, None]
    rounds = []
    for _ in range(len(ring) - 1):
        half = len(ring) // 2
        pairs = zip(ring[:half], reversed(ring[half:]), strict=True)
        rounds.append([(one, other) for one, other in pairs if one is not None and other is not None])
        ring = [ring[0], ring[-1], *ring[1:-1]]
    return rounds


def typical_rate(rates: Rates) -> float:
    """The rate of a healthy link: the median; between three nodes the upper quartile, because a slow node is part of
    four of their six links. 0 if no link works."""
    good = sorted(rate for rate in rates.values() if rate is not None)
    position = len(good) * 3 // 4 if len(good) <= LINKS_OF_THREE_NODES else len(good) // 2
    return good[position] if good else 0.0


def slow_links(rates: Rates) -> list[Link]:
    limit = SLOW * typical_rate(rates)
    return [link for link, rate in rates.items() if rate is not None and rate < limit]


def hopeless_nodes(rates: Rates) -> set[str]:
    """Nodes that are not worth another timeout: no link of theirs works, and several of their partners reach others."""
    connected = connected_nodes(rates)
    partners: dict[str, set[str]] = {}
    for (sender, receiver), rate in rates.items():
        if rate is None:
            partners.setdefault(sender, set()).add(receiver)
            partners.setdefault(receiver, set()).add(sender)
    return {
        node
        for node, failed in partners.items()
        if node not in connected and len(failed & connected) >= FAILURES_TO_GIVE_UP
    }


def connected_nodes(rates: Rates) -> set[str]:
    """Nodes with a link that works."""
    return {node for link, rate in rates.items() if rate is not None for node in link}


def link_findings(nodes: Sequence[str], rates: Rates) -> list[Finding]:
    """What the rates of all links say about nodes and links."""
    if not rates:
        return []
    connected = connected_nodes(rates)
    fix = "open all TCP ports between the nodes (firewall, security group); check GLOO_SOCKET_IFNAME and /etc/hosts"
    if not connected:
        return [Finding("network", "error", f"none of {compress_hosts(nodes)} reaches another one", fix)]
    findings = [
        Finding("network", "error", f"{node} reaches no other node, and none reaches it", fix)
        for node in nodes
        if node not in connected
    ]
    failed = [link for link, rate in rates.items() if rate is None and set(link) <= connected]
    findings += [Finding("network", "error", f"{sender} does not reach {receiver}", fix) for sender, receiver in failed]
    named, slow = _slow_nodes(nodes, rates)
    findings += named
    typical = typical_rate(rates)
    for sender, receiver in slow[:MAX_SLOW_LINKS]:
        figure = format_rate(rates[sender, receiver] or 0.0)
        text = f"{sender} sends to {receiver} at {figure}, where {format_rate(typical)} is typical"
        findings.append(Finding("bandwidth", "warning", text, "check the path between them (switches, cables, routes)"))
    if len(slow) > MAX_SLOW_LINKS:
        text = f"and {counted(len(slow) - MAX_SLOW_LINKS, 'more slow link')}"
        findings.append(Finding("bandwidth", "warning", text, "--json lists all links"))
    return [_summary(rates), *findings]


def _slow_nodes(nodes: Sequence[str], rates: Rates) -> tuple[list[Finding], list[Link]]:
    """Nodes that send or receive slowly on all their links, and the slow links that they do not explain."""
    slow = slow_links(rates)
    findings: list[Finding] = []
    explained: set[Link] = set()
    for node in nodes:
        verbs = []
        links: list[Link] = []
        for verb, end in (("sends", 0), ("receives", 1)):
            own = [link for link, rate in rates.items() if link[end] == node and rate is not None]
            if len(own) > 1 and set(own) <= set(slow):
                verbs.append(verb)
                links += own
        if links:
            explained |= set(links)
            figures = sorted(rate for link in links if (rate := rates[link]) is not None)
            figure = " to ".join(dict.fromkeys(map(format_rate, (figures[0], figures[-1]))))
            typical = format_rate(typical_rate(rates))
            text = f"{node} {' and '.join(verbs)} at {figure} on all its links, where {typical} is typical"
            fix = f"check its cable, port and adapter (ethtool); run without it: --sbatch=--exclude={node}"
            findings.append(Finding("bandwidth", "warning", text, fix))
    return findings, [link for link in slow if link not in explained]


def _summary(rates: Rates) -> Finding:
    good = {link: rate for link, rate in rates.items() if rate is not None}
    sender, receiver = slowest = min(good, key=lambda link: good[link])
    text = (
        f"{counted(len(good), 'link')} (one TCP stream): median {format_rate(median(good.values()))}, "
        f"slowest {format_rate(good[slowest])}, {sender} to {receiver}"
    )
    return Finding("bandwidth", "ok", text)


def format_rate(bytes_per_second: float) -> str:
    gigabits = bytes_per_second * 8 / 1e9
    return f"{gigabits:.0f} Gbit/s" if gigabits >= 10 else f"{gigabits:.2g} Gbit/s"
