"""The doctor's workers on the nodes of an allocation: one step of srun, through whose input and output they talk.

srun ends a whole step if one node does not start its task. The step is then started again without that node.
"""

import json
import os
import queue
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import IO, Any

from trainyard.cluster import slurm
from trainyard.cluster.allocation import Allocation
from trainyard.cluster.doctor.messages import MessageReader
from trainyard.cluster.doctor.node_findings import NodeFinding
from trainyard.core.finding import Finding
from trainyard.core.quantities import counted

START_LIMIT_S = 90.0
"""For the first answer of all nodes. Python may be on a slow file system."""
END_LIMIT_S = 3.0
POLL_S = 0.2
MAX_STARTS = 3
LAUNCH_FAILURE = re.compile(r"srun: error: .*launch for .* failed on node (\S+): (.*)")
NODE_FAILURE = re.compile(r"srun: error: (Node failure) on (\S+)")
TASK_END = re.compile(r"srun: error: (\S+): tasks? [\d,-]+: (.*)")
"""srun's messages about a node that cannot start its task, is lost, or whose task has ended."""


class NodeStep:
    """Workers on several nodes."""

    def __init__(self, job_id: str, nodes: list[str]) -> None:
        self.nodes = list(nodes)
        """Those that still answer."""
        self.lost: dict[str, str] = {}
        """Why others do not."""
        self.launch_failures: dict[str, str] = {}
        """Nodes that srun could not start its task on, and why."""
        self.troubles: dict[str, str] = {}
        """Nodes of which srun says that no answer will come, and why."""
        self.last_error = ""
        """The last line that a task, or srun about the whole step, printed on standard error."""
        self.requests = 0
        self.answers: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        command = ["srun", f"--jobid={job_id}", f"--nodes={len(nodes)}", f"--nodelist={','.join(nodes)}"]
        command += [f"--ntasks={len(nodes)}", "--ntasks-per-node=1", "--overlap", "--input=all", "--no-kill"]
        command += ["--kill-on-bad-exit=0", sys.executable, "-m", "trainyard.cluster.doctor.node_worker"]
        self.process = subprocess.Popen(
            command,
            env=worker_environment(os.environ),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        self.readers = [
            threading.Thread(target=target, args=(stream,), daemon=True)
            for target, stream in (
                (self._read_answers, self.process.stdout),
                (self._read_errors, self.process.stderr),
            )
        ]
        for reader in self.readers:
            reader.start()

    def _read_answers(self, stream: IO[str]) -> None:
        reader = MessageReader()
        for line in stream:
            if message := reader.read_line(line):
                self.answers.put(message)

    def _read_errors(self, stream: IO[str]) -> None:
        for line in map(str.strip, stream):
            if match := LAUNCH_FAILURE.match(line):
                self.launch_failures[match[1]] = self.troubles[match[1]] = match[2]
            elif match := NODE_FAILURE.match(line):
                self.troubles[match[2]] = match[1]
            elif match := TASK_END.match(line):
                for node in slurm.expand_hosts(match[1]):
                    self.troubles[node] = f"{match[2]}; {self.last_error}".removesuffix("; ")
            elif line:
                self.last_error = line

    def ask(self, name: str, limit_s: float, **arguments: Any) -> dict[str, Any]:
        """The result of a request from each node; an OSError from nodes where it failed. Nodes that do not answer
        within `limit_s` are left out here and from then on."""
        self.requests += 1
        assert self.process.stdin
        with suppress(OSError):  # srun has ended: nobody answers
            self.process.stdin.write(json.dumps({"id": self.requests, "name": name, "arguments": arguments}) + "\n")
            self.process.stdin.flush()
        results: dict[str, Any] = {}
        deadline = time.monotonic() + limit_s
        while len(results) < len(self.nodes) and time.monotonic() < deadline:
            try:
                node, answer = self.answers.get(timeout=POLL_S)
            except queue.Empty:
                if self.process.poll() is not None and self.answers.empty():
                    break
                if all(node in results or node in self.troubles for node in self.nodes):
                    break
                continue
            if node in self.nodes and answer["id"] == self.requests:
                results[node] = OSError(answer["error"]) if "error" in answer else answer["result"]
        for node in [node for node in self.nodes if node not in results]:
            self.nodes.remove(node)
            ended = f"srun ended; {self.last_error}" if self.process.poll() is not None else ""
            self.lost[node] = self.troubles.get(node) or ended or f"silent for {limit_s:.0f} s"
        return {node: results[node] for node in self.nodes}

    def close(self) -> None:
        """End the workers, which end with their input, and srun."""
        assert self.process.stdin
        with suppress(OSError):
            self.process.stdin.close()
        for end in (self.process.terminate, self.process.kill):
            try:
                self.process.wait(END_LIMIT_S)
                break
            except subprocess.TimeoutExpired:
                end()
        self.process.wait()
        for reader in self.readers:
            reader.join(END_LIMIT_S)


def worker_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment of srun: without options of a surrounding job, such as its number of tasks."""
    kept = ("SLURM_CONF", "SLURM_JWT")
    own = {name: value for name, value in environ.items() if not name.startswith(("SLURM_", "SRUN_")) or name in kept}
    return {**own, "PYTHONUNBUFFERED": "1"}


@contextmanager
def started_step(
    allocation: Allocation, report: Callable[[str], None]
) -> Iterator[tuple[NodeStep, dict[str, Any], list[NodeFinding]]]:
    """Start workers on all nodes that can run one. Yields the step, the address of each node, and a list of findings
    about nodes that are lost, which is complete after the block."""
    nodes, findings = list(allocation.nodes), list[NodeFinding]()
    for start in range(1, MAX_STARTS + 1):
        report(f"starting on {counted(len(nodes), 'node')}")
        step = NodeStep(allocation.job_id, nodes)
        try:
            addresses = step.ask("hello", START_LIMIT_S)
            failed = {node: reason for node, reason in step.launch_failures.items() if node in nodes}
            nodes = [node for node in nodes if node not in failed]
            if failed and step.process.poll() is not None and nodes and start < MAX_STARTS:
                findings += [_lost_node(node, reason) for node, reason in failed.items()]
                continue
            try:
                yield step, addresses, findings
            finally:
                findings += [_lost_node(node, reason) for node, reason in step.lost.items()]
            return
        finally:
            step.close()


def _lost_node(node: str, reason: str) -> NodeFinding:
    fix = f"check {node} (scontrol show node {node}, its cable, slurmd); run without it: --sbatch=--exclude={node}"
    return NodeFinding(Finding("node", "error", f"{node} does not answer: {reason}", fix), (node,))
