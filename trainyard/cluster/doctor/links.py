"""Which node or link is slow: the order in which pairs of nodes are measured, and what the figures mean."""

from collections.abc import Mapping, Sequence
from statistics import median

from trainyard.cluster.doctor.node_findings import compress_hosts
from trainyard.core.finding import Finding
from trainyard.core.quantities import counted

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
