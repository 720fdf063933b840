"""Command lines and output of neuron_parallel_compile, which comes with torch-neuronx for XLA.

The tool runs a short training whose graphs are collected but not executed (losses are meaningless), compiles them in
parallel into the cache, and prints a report. The training must be the real one except for its number of steps.
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
"""Enough steps for every graph to appear."""
SHORT_RUN_OVERRIDES = (
    f"train.steps={TRACE_STEPS}",
    "checkpoint.every=0",
    "checkpoint.every_minutes=0",
    "checkpoint.export_hf=false",
    "log.name=precompile",
    "log.tensorboard=false",
)
"""Overrides for a training that is run only for its graphs and writes nothing."""
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
    """Progress that the tool prints between graphs."""

    remaining: int
    locked: int
    failed: int
    done: int
    total: int


@dataclass(frozen=True)
class NeuronGraph:
    """The result of compiling one graph."""

    path: str
    compiled: bool
    retries: int
    seconds: float | None
    """Compile time; None if not reported."""


@dataclass(frozen=True)
class NeuronCompileReport:
    """The tool's final report. Without new graphs it prints no totals, and `graphs` is 0."""

    graphs: int
    compiled: int
    failed: int
    results: tuple[NeuronGraph, ...]

    @property
    def failures(self) -> list[str]:
        return [graph.path for graph in self.results if not graph.compiled]


def short_train_command(source: str, overrides: Sequence[str], ranks: int) -> list[str]:
    """The training whose graphs are collected: the same file and overrides, few steps, no checkpoints."""
    command = [sys.executable, "-m", "trainyard", "train", source, *overrides, *SHORT_RUN_OVERRIDES]
    return [*command, "--nproc", str(ranks)] if ranks > 1 else command


def collect_command(run: Sequence[str]) -> list[str]:
    """Trace `run` and put its uncompiled graphs into the cache."""
    return [TOOL, "--command", "collect", *run]


def compile_command(workers: int | None = None) -> list[str]:
    """Compile the uncompiled graphs of the cache; by default with one worker per 64 GiB of host memory."""
    return [TOOL, "--command", "compile", *(["--num_parallel", str(workers)] if workers else [])]


def parse_progress(line: str) -> CompileProgress | None:
    match = PROGRESS_LINE.search(line)
    return CompileProgress(*map(int, match.groups())) if match else None


def parse_report(output: str) -> NeuronCompileReport:
    """Parse the last report in an output that contains arbitrary other lines."""
    results = _parse_graphs(output)
    totals = {name: [int(number) for number in pattern.findall(output)] for name, pattern in TOTAL_LINES.items()}
    compiled = sum(graph.compiled for graph in results)
    fallback = {"graphs": len(results), "compiled": compiled, "failed": len(results) - compiled}
    counts = {name: values[-1] if values else fallback[name] for name, values in totals.items()}
    return NeuronCompileReport(**counts, results=results)


def _parse_graphs(output: str) -> tuple[NeuronGraph, ...]:
    """Parse the JSON, which starts in the middle of a log line and may be truncated."""
    for start in reversed([match.start() for match in REPORT_START.finditer(output)]):
        try:
            report, _ = json.JSONDecoder().raw_decode(output, start)
        except ValueError:
            continue
        if isinstance(report, dict) and isinstance(report.get("compilation_report"), dict):
            return tuple(_parse_graph(path, entry) for path, entry in report["compilation_report"].items())
    return ()


def _parse_graph(path: str, entry: object) -> NeuronGraph:
    fields = entry if isinstance(entry, dict) else {}
    seconds = fields.get("compile_time")
    retry = fields.get("retry")
    return NeuronGraph(
        path,
        fields.get("status") is True,
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
    """Collect the graphs of `run` and compile them; `on_line` receives each output line of both commands."""
    collected = run_command(collect_command(run), environ, on_line)
    if collected.returncode:
        last = (collected.output.strip().splitlines() or ["no output"])[-1]
        raise RunStopped(f"collecting graphs: exit code {collected.returncode}; {last}")
    return parse_report(run_command(compile_command(workers), environ, on_line).output)


def run_command(command: Sequence[str], environ: Mapping[str, str], on_line: Callable[[str], None]) -> CommandResult:
    """Run a command to its end. An exception, such as Ctrl-C, terminates it and everything it started."""
    if shutil.which(command[0], path=environ.get("PATH")) is None:
        raise UserError(f"{command[0]}: not installed; torch-neuronx 2.9.* on a trn1 provides it (device.name=xla)")
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
