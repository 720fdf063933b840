"""The survey of several nodes: the checks of each one, the directory they share, the network and clocks between them.

A node that does not answer, or that others cannot reach, is a finding; the survey continues without it.
"""

import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median_low
from typing import Any

from trainyard.cluster.doctor.file_system import shared_directory_finding
from trainyard.cluster.doctor.network import (
    CONNECT_S,
    STALL_S,
    TOKEN_BYTES,
    TRANSFER_LIMIT_S,
    Link,
    hopeless_nodes,
    link_findings,
    slow_links,
    tournament,
)
from trainyard.cluster.doctor.node_findings import NodeFinding, merge_findings
from trainyard.cluster.doctor.slurm_workers import SlurmWorkers
from trainyard.core.finding import Finding
from trainyard.core.quantities import counted

CHECK_LIMIT_S = 60.0
"""For the checks of one node; nvidia-smi alone may take 20 s."""
ANSWER_LIMIT_S = 10.0
"""For an answer to a small request, through Slurm."""
TRANSFER_ANSWER_S = CONNECT_S + STALL_S + TRANSFER_LIMIT_S + 5.0
REPEATS = 3
"""Further measurements of a slow link. The best one counts: other traffic makes a link slow for a moment."""
MAX_CLOCK_OFFSET_S = 1.0


@dataclass
class Survey:
    """What was found on and between the nodes."""

    nodes: list[str]
    findings: list[NodeFinding] = field(default_factory=list)
    rates: dict[Link, float | None] = field(default_factory=dict)
    """Bytes per second of each link."""
    clock_offsets: dict[str, float] = field(default_factory=dict)
    """Seconds by which the clock of each node is ahead of that of the first."""

    @property
    def failed(self) -> bool:
        return any(item.finding.level == "error" for item in self.findings)


def survey_nodes(
    workers: SlurmWorkers, addresses: dict[str, Any], directory: Path, report: Callable[[str], None]
) -> Survey:
    """Check the nodes of `workers`. `addresses` are their answers to `hello`; `report` gets the current phase."""
    survey = Survey(list(workers.nodes))
    report(f"checking {counted(len(workers.nodes), 'node')}")
    answers = workers.ask("check", CHECK_LIMIT_S, directory=str(directory))
    by_node = {
        node: [Finding(**record) for record in answer]
        for node, answer in answers.items()
        if not isinstance(answer, OSError)
    }
    survey.findings += merge_findings(by_node)
    survey.findings += [
        NodeFinding(
            Finding("checks", "error", f"failed on {node}: {answer}", f"run trainyard doctor on {node}"), (node,)
        )
        for node, answer in answers.items()
        if isinstance(answer, OSError)
    ]
    if len(workers.nodes) > 1:
        report("looking for one node's files on the others")
        survey.findings += [NodeFinding(finding) for finding in _check_shared_directory(workers, directory)]
    survey.rates = _measure_links(workers, addresses, report)
    survey.findings += [NodeFinding(finding) for finding in link_findings(survey.nodes, survey.rates)]
    report("comparing clocks")
    survey.clock_offsets = _measure_clocks(workers, addresses, hopeless_nodes(survey.rates))
    survey.findings += [NodeFinding(finding) for finding in clock_findings(survey.clock_offsets)]
    return survey


def _check_shared_directory(workers: SlurmWorkers, directory: Path) -> list[Finding]:
    nodes = list(workers.nodes)
    first, last = nodes[0], nodes[-1]
    path = workers.ask("share", ANSWER_LIMIT_S, first=first, directory=str(directory)).get(first)
    if not isinstance(path, str):  # the checks of that node say why
        return []
    looks = workers.ask("look", ANSWER_LIMIT_S, first=first, last=last, path=path)
    end = workers.ask("unshare", ANSWER_LIMIT_S, first=first).get(first)
    answered = [first, *(node for node in nodes[1:] if isinstance(looks.get(node), dict))]
    sees_last = last not in answered or (isinstance(end, dict) and end["seen"])
    return [shared_directory_finding(str(Path(path).parent), answered, looks, sees_last)]


def _measure_links(
    workers: SlurmWorkers, addresses: dict[str, Any], report: Callable[[str], None]
) -> dict[Link, float | None]:
    """The rate of every link in both directions, and of slow ones again."""
    rounds = tournament(workers.nodes)
    rates: dict[Link, float | None] = {}
    for number, pairs in enumerate(rounds, 1):
        report(f"measuring bandwidth, round {number} of {len(rounds)}")
        for links in (pairs, [(other, one) for one, other in pairs]):
            left_out = hopeless_nodes(rates)
            rates |= _measure(workers, [link for link in links if not left_out & set(link)], addresses)
    for repeat in range(1, REPEATS + 1):
        slow = set(slow_links(rates))
        report(f"measuring {counted(len(slow), 'slow link')} again, {repeat} of {REPEATS}")
        for pairs in rounds:
            for links in (pairs, [(other, one) for one, other in pairs]):
                again = _measure(workers, [link for link in links if link in slow], addresses)
                rates |= {link: max(rate or 0.0, rates[link] or 0.0) for link, rate in again.items()}
    return rates


def _measure(workers: SlurmWorkers, links: list[Link], addresses: dict[str, Any]) -> dict[Link, float | None]:
    """Measure links that share no node, at the same time."""
    links = [link for link in links if set(link) <= set(workers.nodes)]
    if not links:
        return {}
    used = {receiver: addresses[receiver] for _, receiver in links}
    token = secrets.token_hex(TOKEN_BYTES)
    answers = workers.ask("transfer", TRANSFER_ANSWER_S, links=dict(links), addresses=used, token=token)
    rates = {(sender, receiver): answers.get(receiver) for sender, receiver in links}
    return {link: rate if isinstance(rate, float) else None for link, rate in rates.items()}


def _measure_clocks(workers: SlurmWorkers, addresses: dict[str, Any], left_out: set[str]) -> dict[str, float]:
    nodes = [node for node in workers.nodes if node not in left_out]
    if len(nodes) < 2:
        return {}
    limit = ANSWER_LIMIT_S + CONNECT_S + STALL_S
    answers = workers.ask(
        "clock",
        limit,
        first=nodes[0],
        address=addresses[nodes[0]],
        clients=len(nodes) - 1,
        token=secrets.token_hex(TOKEN_BYTES),
    )
    return {node: offset for node, offset in answers.items() if isinstance(offset, float) and node in nodes}


def clock_findings(offsets: dict[str, float]) -> list[Finding]:
    """Names the nodes whose clocks differ from those of most, whichever node they were compared with."""
    if len(offsets) < 2:
        return []
    usual = median_low(offsets.values())
    wrong = {node: offset - usual for node, offset in offsets.items() if abs(offset - usual) > MAX_CLOCK_OFFSET_S}
    if not wrong:
        largest = max(offsets.values()) - min(offsets.values())
        return [Finding("clocks", "ok", f"differ by {largest * 1e3:.1f} ms at most")]
    return [
        Finding(
            "clocks",
            "warning",
            f"{node} is {abs(offset):.1f} s {'ahead of' if offset > 0 else 'behind'} the other nodes",
            f"on {node}: sudo systemctl enable --now chrony && sudo chronyc makestep",
        )
        for node, offset in wrong.items()
    ]
