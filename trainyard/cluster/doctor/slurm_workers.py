"""The doctor's workers on nodes of Slurm: the allocation that they run in, and the step of srun that they talk through.

The nodes are those of the allocation around the command, or of a new one. Workers read requests from srun's input and
answer on its output. srun ends a whole step if one node does not start its task; the step is then started again
without that node.
"""

import json
import os
import queue
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from types import FrameType
from typing import IO, Any, NamedTuple, NoReturn

from trainyard.cluster import slurm
from trainyard.cluster.doctor.node_findings import NodeFinding
from trainyard.cluster.doctor.node_worker import MessageReader
from trainyard.core.errors import UserError
from trainyard.core.finding import Finding
from trainyard.core.quantities import counted

REASON_INTERVAL_S = 3.0
CANCEL_LIMIT_S = 10.0
TIME_LIMIT = "10"
"""Minutes after which Slurm ends an allocation that this process could not give back."""
USELESS_STATES = {"DOWN", "DRAIN", "DRAINED", "FAIL", "FAILING"}
"""Not NOT_RESPONDING: such a node comes back or is DOWN after Slurm's SlurmdTimeout."""
POWER_STATES = {"POWERED_DOWN", "POWERING_UP", "POWERING_DOWN"}
"""States of cloud nodes that start when a job needs them."""
START_LIMIT_S = 90.0
"""For the first answer of all nodes. Python may be on a slow file system."""
END_LIMIT_S = 3.0
POLL_S = 0.2
MAX_STARTS = 3
LAUNCH_FAILURE = re.compile(r"srun: error: .*launch for .* failed on node (\S+): (.*)")
NODE_FAILURE = re.compile(r"srun: error: (Node failure) on (\S+)")
TASK_END = re.compile(r"srun: error: (\S+): tasks? [\d,-]+: (.*)")
"""srun's messages about a node that cannot start its task, is lost, or whose task has ended."""


class Allocation(NamedTuple):
    """Nodes that this process may use."""

    job_id: str
    nodes: list[str]


@contextmanager
def allocated_nodes(
    count: int, partition: str | None, options: Sequence[str], report: Callable[[str], None]
) -> Iterator[Allocation]:
    """Use `count` nodes: of the allocation that this process is in, or of a new one, which ends with the block."""
    if job_id := os.environ.get("SLURM_JOB_ID"):
        nodes = slurm.expand_hosts(os.environ.get("SLURM_JOB_NODELIST", ""))
        if len(nodes) < count:
            raise UserError(f"--nodes {count}: job {job_id} has {len(nodes)}; nearest: --nodes {len(nodes)}")
        yield Allocation(job_id, nodes[:count])
        return
    if partition:
        slurm.check_partition(partition)
    _check_usable_nodes(count, partition)
    with _interrupt_on_sigterm():
        job_id = _allocate(count, partition, options, report)
        try:
            info = slurm.job_info(job_id)
            yield Allocation(job_id, slurm.expand_hosts(info.nodes if info else ""))
        finally:
            slurm.cancel([job_id])


def _check_usable_nodes(count: int, partition: str | None) -> None:
    """Raise UserError if so few nodes work that the allocation would wait until somebody repairs one."""
    chosen = ["--partition", partition] if partition else []
    nodes = slurm.run_command(["sinfo", "--noheader", "--Node", "--format", "%N", *chosen]).split()
    lines = slurm.run_command(["scontrol", "--oneliner", "show", "node", ",".join(dict.fromkeys(nodes))]).splitlines()
    fields = [slurm.parse_fields(line) for line in lines]
    useless = {field["NodeName"]: field["State"] for field in fields if field and is_useless(field["State"])}
    left = len(fields) - len(useless)
    if left < count:
        states = [f"{name} is {state}" for name, state in useless.items()]
        why = f" ({', '.join(states)})" if states else ""
        nearest = f"; nearest: --nodes {left}" if left else ""
        raise UserError(f"--nodes {count}: {left} of {counted(len(fields), 'node')} can be used{why}{nearest}")


def is_useless(state: str) -> bool:
    """True for the state of a node that no job can use before somebody repairs it, such as DOWN* or IDLE+DRAIN."""
    words = {word.rstrip("*~#!%$@^-") for word in state.split("+")}
    return bool(words & USELESS_STATES) and not words & POWER_STATES


def _allocate(count: int, partition: str | None, options: Sequence[str], report: Callable[[str], None]) -> str:
    """Wait for a new allocation and return its job. Slurm cancels it if this process is interrupted meanwhile."""
    report(f"waiting for {counted(count, 'node')} of Slurm")
    command = ["salloc", "--no-shell", f"--nodes={count}", "--ntasks-per-node=1", "--exclusive", "--no-kill"]
    command += ["--wait-all-nodes=1", f"--time={TIME_LIMIT}", "--job-name=trainyard-doctor"]
    command += [f"--partition={partition}"] if partition else []
    command += ["--mem=0"] if not any(option.startswith("--mem") for option in options) else []
    with tempfile.TemporaryFile("a+") as messages:
        process = subprocess.Popen(
            [*command, *options], stdin=subprocess.DEVNULL, stdout=messages, stderr=messages, start_new_session=True
        )
        try:
            while (code := _wait(process, REASON_INTERVAL_S)) is None:
                _check_usable_nodes(count, partition)  # one may fail meanwhile
                pending = re.search(r"Pending job allocation (\d+)", _read(messages))
                if pending and (info := slurm.job_info(pending[1])):
                    state = f"job {info.job_id} is {info.state}: {info.reason}"
                    report(f"waiting for {counted(count, 'node')} of Slurm ({state})")
        except BaseException:
            process.terminate()  # salloc cancels the job then
            if _wait(process, CANCEL_LIMIT_S) is None:
                process.kill()
            raise
        text = _read(messages)
    granted = re.search(r"Granted job allocation (\d+)", text)
    if code or not granted:
        if granted:
            slurm.cancel([granted[1]])
        lines = [re.sub(r"^salloc: (error: )?", "", line) for line in text.splitlines()]
        raise UserError(f"--nodes {count}: salloc: {'; '.join(dict.fromkeys(lines))}")
    return granted[1]


def _wait(process: subprocess.Popen[bytes], limit_s: float) -> int | None:
    """The exit code of a process; None if it runs on after `limit_s`."""
    try:
        return process.wait(limit_s)
    except subprocess.TimeoutExpired:
        return None


def _read(file: IO[str]) -> str:
    """All that another process has appended to a file so far."""
    file.seek(0)
    return file.read()


@contextmanager
def _interrupt_on_sigterm() -> Iterator[None]:
    """Let SIGTERM end the block as Ctrl-C does, so that the allocation is given back."""

    def interrupt(signum: int, frame: FrameType | None) -> NoReturn:
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


class SlurmWorkers:
    """The workers on several nodes."""

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
def started_workers(
    allocation: Allocation, report: Callable[[str], None]
) -> Iterator[tuple[SlurmWorkers, dict[str, Any], list[NodeFinding]]]:
    """Start workers on all nodes that can run one. Yields the step, the address of each node, and a list of findings
    about nodes that are lost, which is complete after the block."""
    nodes, findings = list(allocation.nodes), list[NodeFinding]()
    for start in range(1, MAX_STARTS + 1):
        report(f"starting on {counted(len(nodes), 'node')}")
        step = SlurmWorkers(allocation.job_id, nodes)
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
