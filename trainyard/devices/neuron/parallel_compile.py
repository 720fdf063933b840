"""neuron_parallel_compile, which comes with torch-neuronx for XLA: its command lines, and what it says.

It runs a short training whose graphs are collected and not executed (losses mean nothing), compiles them side by side
into the cache, and prints how each went. The training must be the real one in all but its number of steps.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from trainyard.core.errors import RunStopped, UserError

TOOL = "neuron_parallel_compile"
TRACE_STEPS = 10
"""In which every graph appears."""
SHORT_RUN_OVERRIDES = (
    f"train.steps={TRACE_STEPS}",
    "checkpoint.every=0",
    "checkpoint.every_minutes=0",
    "checkpoint.export_hf=false",
    "log.name=precompile",
    "log.tensorboard=false",
)
"""A training for its graphs alone; whatever it would write is worth nothing."""
PROGRESS_LINE = re.compile(
    r"Current remaining items are (\d+), locked are (\d+), failed are (\d+), done are (\d+), total is (\d+)"
)
TOTAL_LINES = {
    "graphs": re.compile(r"Total graphs: (\d+)"),
    "compiled": re.compile(r"Total successful compilations: (\d+)"),
    "failed": re.compile(r"Total failed compilations: (\d+)"),
}
REPORT_START = re.compile(r"\{\s*\"compilation_summary\"")


@dataclass(frozen=True)
class CompileProgress:
    """How far it is, as it says between two graphs."""

    remaining: int
    locked: int
    failed: int
    done: int
    total: int


@dataclass(frozen=True)
class NeuronGraph:
    path: str
    compiled: bool
    retries: int
    seconds: float | None
    """None where it does not say."""


@dataclass(frozen=True)
class NeuronCompileReport:
    """How it ended. Without a single new graph it prints no totals: `graphs` is 0 then."""

    graphs: int
    compiled: int
    failed: int
    results: tuple[NeuronGraph, ...]

    @property
    def failures(self) -> list[str]:
        return [graph.path for graph in self.results if not graph.compiled]


def short_train_command(source: str, overrides: Sequence[str], ranks: int) -> list[str]:
    """The training whose graphs are collected: the same file and overrides, a few steps, nothing saved."""
    ours = [sys.executable, "-m", "trainyard", "train", source, *overrides, *SHORT_RUN_OVERRIDES]
    return [*ours, "--nproc", str(ranks)] if ranks > 1 else ours


def collect_command(run: Sequence[str]) -> list[str]:
    """Trace `run` and put its graphs into the cache, uncompiled."""
    return [TOOL, "--command", "collect", *run]


def compile_command(workers: int | None = None) -> list[str]:
    """Compile what the cache holds uncompiled; by default one worker for each 64 GiB of the host's memory."""
    return [TOOL, "--command", "compile", *(["--num_parallel", str(workers)] if workers else [])]


def parse_progress(line: str) -> CompileProgress | None:
    found = PROGRESS_LINE.search(line)
    return CompileProgress(*map(int, found.groups())) if found else None


def parse_report(output: str) -> NeuronCompileReport:
    """The last report of an output, which holds whatever else was printed around it."""
    each = _parse_graphs(output)
    totals = {name: [int(number) for number in pattern.findall(output)] for name, pattern in TOTAL_LINES.items()}
    compiled = sum(graph.compiled for graph in each)
    counted = {"graphs": len(each), "compiled": compiled, "failed": len(each) - compiled}
    numbers = {name: found[-1] if found else counted[name] for name, found in totals.items()}
    return NeuronCompileReport(**numbers, results=each)


def _parse_graphs(output: str) -> tuple[NeuronGraph, ...]:
    """From the JSON, which is printed in the middle of a line of the log and may be broken off."""
    for start in reversed([found.start() for found in REPORT_START.finditer(output)]):
        try:
            report, _ = json.JSONDecoder().raw_decode(output, start)
        except ValueError:
            continue
        if isinstance(report, dict) and isinstance(report.get("compilation_report"), dict):
            return tuple(_parse_graph(path, how) for path, how in report["compilation_report"].items())
    return ()


def _parse_graph(path: str, how: object) -> NeuronGraph:
    said = how if isinstance(how, dict) else {}
    seconds = said.get("compile_time")
    retry = said.get("retry")
    return NeuronGraph(
        path,
        said.get("status") is True,
        retry if isinstance(retry, int) else 0,
        float(seconds) if isinstance(seconds, int | float) else None,
    )


class CommandResult(NamedTuple):
    returncode: int
    output: str


def precompile(
    run: Sequence[str],
    workers: int | None = None,
    environ: Mapping[str, str] = os.environ,
    on_line: Callable[[str], None] = lambda line: None,
) -> NeuronCompileReport:
    """Collect the graphs of `run` and compile them; `see` gets each line of both as it comes."""
    collected = run_command(collect_command(run), environ, on_line)
    if collected.returncode:
        last = (collected.output.strip().splitlines() or ["it said nothing"])[-1]
        raise RunStopped(f"collecting graphs: exit code {collected.returncode}; {last}")
    return parse_report(run_command(compile_command(workers), environ, on_line).output)


def run_command(command: Sequence[str], environ: Mapping[str, str], on_line: Callable[[str], None]) -> CommandResult:
    """One of the commands, to its end. An exception here, Ctrl-C, ends it and all that it started."""
    if shutil.which(command[0], path=environ.get("PATH")) is None:
        raise UserError(f"{command[0]}: not installed; it comes with torch-neuronx 2.9.* on a trn1 (device.name=xla)")
    lines: list[str] = []
    with subprocess.Popen(
        command,
        env=dict(environ),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                lines.append(line)
                on_line(line.rstrip("\n"))
        except BaseException:
            os.killpg(process.pid, signal.SIGTERM)
            raise
    return CommandResult(process.returncode, "".join(lines))
