"""The doctor's process on one node: `srun python -m trainyard.cluster.doctor.node_worker`.

It answers requests that arrive on standard input, which srun copies to all nodes, with messages on standard output:
these need no port between the nodes and the user's machine. It ends with its input, and after LIFETIME_S whatever
happens.

srun passes lines on whole only up to 1024 bytes; longer ones from several nodes get mixed. A message is therefore cut
into short lines that name their node. Lines that something else prints on a node are ignored.
"""

import json
import os
import signal
import socket
import sys
from collections.abc import Iterable
from dataclasses import asdict, replace
from itertools import chain
from pathlib import Path
from typing import Any

from trainyard.cluster.doctor.file_system import SharedDirectoryProbe, file_system_findings
from trainyard.cluster.doctor.host import host_findings, leftover_findings
from trainyard.cluster.doctor.network import (
    clock_offset,
    open_listener,
    own_address,
    receive_stream,
    send_stream,
    serve_clock,
)
from trainyard.core.finding import Finding
from trainyard.devices.health import device_findings

PREFIX = "@trainyard"
MAX_CHUNK = 700
"""Characters of a message in one line."""
LIFETIME_S = 600


def encode_message(node: str, message: Any) -> str:
    """The lines of a message; the last one is marked."""
    text = json.dumps(message)
    chunks = [text[start : start + MAX_CHUNK] for start in range(0, len(text), MAX_CHUNK)]
    marks = ["more"] * (len(chunks) - 1) + ["end"]
    return "".join(f"{PREFIX} {node} {mark} {chunk}\n" for mark, chunk in zip(marks, chunks, strict=True))


class MessageReader:
    """Puts the messages of all nodes together again."""

    def __init__(self) -> None:
        self.parts: dict[str, str] = {}

    def read_line(self, line: str) -> tuple[str, Any] | None:
        """The node and its message, if this line completes one."""
        words = line.rstrip("\n").split(" ", 3)
        if len(words) != 4 or words[0] != PREFIX:
            return None
        _, node, mark, chunk = words
        text = self.parts.pop(node, "") + chunk
        if mark == "more":
            self.parts[node] = text
            return None
        return node, json.loads(text)


def local_findings(directory: Path) -> list[Finding]:
    """All checks of one machine."""
    sources = (host_findings(), device_findings(), file_system_findings(directory), leftover_findings())
    return list(chain.from_iterable(sources))


def finding_record(finding: Finding) -> dict[str, str]:
    """A finding as JSON."""
    record = asdict(replace(finding, repair=None))
    del record["repair"]
    return record


class NodeWorker:
    """One method for each request. They return something that JSON can hold; an OSError becomes an answer, too."""

    def __init__(self, node: str) -> None:
        self.node = node
        self.listener = open_listener()
        self.shared = SharedDirectoryProbe()

    def hello(self) -> list[Any]:
        """The address at which other nodes reach this one."""
        return [own_address(self.node), self.listener.getsockname()[1]]

    def check(self, directory: str) -> list[dict[str, str]]:
        return [finding_record(finding) for finding in local_findings(Path(directory))]

    def share(self, first: str, directory: str) -> str | None:
        return self.shared.create(directory) if self.node == first else None

    def look(self, first: str, last: str, path: str) -> dict[str, bool] | None:
        return self.shared.look(path, self.node == last) if self.node != first else None

    def unshare(self, first: str) -> dict[str, bool] | None:
        return self.shared.finish() if self.node == first else None

    def transfer(self, links: dict[str, str], addresses: dict[str, list[Any]], token: str) -> float | None:
        """Send to or receive from another node. `links` has the receiver of each sender. The receiver returns the
        rate in bytes per second."""
        if receiver := links.get(self.node):
            send_stream(_address(addresses[receiver]), bytes.fromhex(token))
        elif self.node in links.values():
            return receive_stream(self.listener, bytes.fromhex(token))
        return None

    def clock(self, first: str, address: list[Any], clients: int, token: str) -> float | None:
        """Seconds by which this node's clock is ahead of that of the first one."""
        if self.node == first:
            serve_clock(self.listener, bytes.fromhex(token), clients)
            return 0.0
        return clock_offset(_address(address), bytes.fromhex(token))


def _address(pair: list[Any]) -> tuple[str, int]:
    return str(pair[0]), int(pair[1])


def answer_requests(worker: NodeWorker, requests: Iterable[str]) -> None:
    for line in requests:
        request = json.loads(line)
        try:
            answer = {"result": getattr(worker, request["name"])(**request["arguments"])}
        except OSError as error:
            answer = {"error": error.strerror or str(error)}
        sys.stdout.write(encode_message(worker.node, {"id": request["id"], **answer}))
        sys.stdout.flush()


def main() -> None:
    signal.alarm(LIFETIME_S)
    worker = NodeWorker(os.environ.get("SLURMD_NODENAME") or socket.gethostname())
    try:
        answer_requests(worker, sys.stdin)
    finally:
        worker.shared.close()


if __name__ == "__main__":
    main()
