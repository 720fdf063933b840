"""Merges the findings of all nodes: what is the same is said once, what differs names its nodes."""

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from trainyard.core.finding import Finding
from trainyard.core.quantities import counted

FIGURES_DIFFER = re.compile(r"memory|disk|host name|gpu \d+")
"""Subjects whose figures differ between healthy nodes. Their lines are merged, with a range of figures."""
NUMBER = re.compile(r"(?<![\w.])(\d+(?:\.\d+)*)")
"""A number or an address, but not the digits of a name such as H200."""


@dataclass(frozen=True)
class NodeFinding:
    """A finding, and the nodes that it holds for; no nodes if it is about all of them together."""

    finding: Finding
    nodes: tuple[str, ...] = ()


def merge_findings(by_node: Mapping[str, Sequence[Finding]]) -> list[NodeFinding]:
    """The findings of all nodes in the order of the first one, equal ones merged."""
    groups: dict[tuple[str, ...], list[tuple[str, Finding]]] = defaultdict(list)
    for node, findings in by_node.items():
        for finding in findings:
            groups[_merge_key(node, finding)].append((node, finding))
    merged = [NodeFinding(_merge_texts(group), tuple(dict(group))) for group in groups.values()]
    subjects = list(dict.fromkeys(item.finding.subject for item in merged))
    merged += [*_different_versions(by_node), *_missing_subjects(by_node)]
    subjects += [item.finding.subject for item in merged]
    return sorted(merged, key=lambda item: subjects.index(item.finding.subject))


def _merge_key(node: str, finding: Finding) -> tuple[str, ...]:
    """Findings with equal keys are shown as one."""
    text = finding.text
    if finding.level == "ok" and FIGURES_DIFFER.fullmatch(finding.subject):
        text = NUMBER.sub("#", _without_name(node, text))
    return finding.subject, finding.level, text, finding.fix


def _without_name(node: str, text: str) -> str:
    return re.sub(rf"^{re.escape(node)}\b", "each node", text)


def _merge_texts(group: list[tuple[str, Finding]]) -> Finding:
    """One finding for a group: the text that all share, with ranges such as 20.6 to 23.1 where figures differ."""
    first = group[0][1]
    if len({finding.text for _, finding in group}) == 1:
        return first
    texts = [_without_name(node, finding.text) for node, finding in group]
    columns = zip(*(NUMBER.findall(text) for text in texts), strict=True)
    figures = iter([_range(sorted(set(column), key=_numbers)) for column in columns])
    return replace(first, text=NUMBER.sub(lambda match: next(figures), texts[0]), repair=None)


def _range(figures: list[str]) -> str:
    return figures[0] if len(figures) == 1 else f"{figures[0]} to {figures[-1]}"


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(".")]


def _different_versions(by_node: Mapping[str, Sequence[Finding]]) -> Iterator[NodeFinding]:
    """A warning for the nodes whose versions are not those of most."""
    versions = {
        node: frozenset(finding.text.split(", "))
        for node, findings in by_node.items()
        for finding in findings
        if finding.subject == "versions"
    }
    if not versions:
        return
    usual = Counter(versions.values()).most_common(1)[0][0]
    for unusual in dict.fromkeys(found for found in versions.values() if found != usual):
        nodes = tuple(node for node, found in versions.items() if found == unusual)
        here, there = (", ".join(sorted(found)) or "nothing" for found in (unusual - usual, usual - unusual))
        text = f"{compress_hosts(nodes)} has {here}, where most nodes have {there}"
        fix = "install the same environment on all nodes, or share one file system with it"
        yield NodeFinding(Finding("versions", "warning", text, fix), nodes)


def _missing_subjects(by_node: Mapping[str, Sequence[Finding]]) -> Iterator[NodeFinding]:
    """A warning for nodes without something that most have, such as the last GPU."""
    subjects = {node: {finding.subject for finding in findings} for node, findings in by_node.items()}
    counts = Counter(subject for found in subjects.values() for subject in found)
    good = {finding.subject for findings in by_node.values() for finding in findings if finding.level == "ok"}
    for subject, count in counts.items():
        if subject in good and len(by_node) / 2 < count < len(by_node):
            nodes = tuple(node for node, found in subjects.items() if subject not in found)
            text = (
                f"not found on {compress_hosts(nodes)}; {counted(count, 'node')} {'has' if count == 1 else 'have'} it"
            )
            yield NodeFinding(
                Finding(subject, "warning", text, f"compare `trainyard doctor` on {nodes[0]} with another node"), nodes
            )


def compress_hosts(hosts: Sequence[str]) -> str:
    """Hosts in Slurm's notation, such as n[1-3,7],login."""
    split = [re.fullmatch(r"(.*?)(\d*)", host) for host in hosts]
    words = [(match[1], match[2]) for match in split if match]
    padded_widths = {(prefix, len(digits)) for prefix, digits in words if len(digits) > 1 and digits[0] == "0"}
    groups: dict[tuple[str, int], list[int]] = defaultdict(list)
    names = [prefix for prefix, digits in words if not digits]
    for prefix, digits in words:
        if digits:
            groups[prefix, len(digits) if (prefix, len(digits)) in padded_widths else 0].append(int(digits))
    for (prefix, padded), numbers in groups.items():
        runs = list(_runs(sorted(set(numbers))))
        parts = [f"{low:0{padded}}" if low == high else f"{low:0{padded}}-{high:0{padded}}" for low, high in runs]
        single = len(runs) == 1 and runs[0][0] == runs[0][1]
        names.append(f"{prefix}{parts[0]}" if single else f"{prefix}[{','.join(parts)}]")
    return ",".join(names)


def _runs(numbers: list[int]) -> Iterator[tuple[int, int]]:
    """First and last of each run of consecutive numbers."""
    start = previous = numbers[0]
    for number in numbers[1:]:
        if number != previous + 1:
            yield start, previous
            start = number
        previous = number
    yield start, previous
