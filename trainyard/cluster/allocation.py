"""Nodes of Slurm for a command that waits for them: those of the allocation it runs in, or of a new one."""

import os
import re
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import IO, NamedTuple, NoReturn

from trainyard.cluster import slurm
from trainyard.core.errors import UserError
from trainyard.core.quantities import counted

REASON_INTERVAL_S = 3.0
CANCEL_LIMIT_S = 10.0
TIME_LIMIT = "10"
"""Minutes after which Slurm ends an allocation that this process could not give back."""
USELESS_STATES = {"DOWN", "DRAIN", "DRAINED", "FAIL", "FAILING"}
"""Not NOT_RESPONDING: such a node comes back or is DOWN after Slurm's SlurmdTimeout."""
POWER_STATES = {"POWERED_DOWN", "POWERING_UP", "POWERING_DOWN"}
"""States of cloud nodes that start when a job needs them."""


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
                    report(
                        f"waiting for {counted(count, 'node')} of Slurm (job {info.job_id} is "
                        f"{info.state}: {info.reason})"
                    )
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
