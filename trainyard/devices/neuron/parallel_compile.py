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
from typing import NamedTuple

from trainyard.core.errors import RunStopped, UserError
from trainyard.core.quantities import counted
from trainyard.devices.neuron.compile_cache import cache_location, clear_locks, list_entries, remove_entries

TOOL = "neuron_parallel_compile"
TRACE_STEPS = 10
"""Enough steps for every graph to appear."""
SHORT_RUN_OVERRIDES = (
    f"train.steps={TRACE_STEPS}",
    "profile.steps=[]",
    "checkpoint.every=0",
    "checkpoint.every_minutes=0",
    "checkpoint.export_hf=false",
    "log.name=precompile",
    "log.loggers=[]",
    "log.spans=false",
)
"""Overrides for a training that is run only for its graphs and writes nothing."""
TOTAL_NAMES = "graphs", "successful compilations", "failed compilations"
REPORT_START = re.compile(r"\{\s*\"compilation_summary\"")


class NeuronCompileReport(NamedTuple):
    """The tool's final report. Without new graphs it prints no totals, and `graphs` is 0."""

    graphs: int
    compiled: int
    failed: int
    failures: list[str]
    """Paths of the graphs that the report names as failed."""


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


def parse_report(output: str) -> NeuronCompileReport:
    """Parse the last report in an output that contains arbitrary other lines."""
    results = _parse_results(output)
    failures = [path for path, compiled in results.items() if not compiled]
    counts = [len(results), len(results) - len(failures), len(failures)]
    for index, name in enumerate(TOTAL_NAMES):
        if totals := re.findall(rf"Total {name}: (\d+)", output):
            counts[index] = int(totals[-1])
    graphs, compiled, failed = counts
    return NeuronCompileReport(graphs, compiled, failed, failures)


def _parse_results(output: str) -> dict[str, bool]:
    """Whether each graph was compiled, from the JSON, which starts in the middle of a log line and may be truncated."""
    for start in reversed([match.start() for match in REPORT_START.finditer(output)]):
        try:
            report, _ = json.JSONDecoder().raw_decode(output, start)
        except ValueError:
            continue
        results = report.get("compilation_report")
        if isinstance(results, dict):
            return {path: isinstance(graph, dict) and graph.get("status") is True for path, graph in results.items()}
    return {}


def precompile(
    run: Sequence[str],
    workers: int | None = None,
    environ: Mapping[str, str] = os.environ,
    on_line: Callable[[str], None] = lambda line: None,
) -> NeuronCompileReport:
    """Collect the graphs of `run` and compile them; `on_line` receives each output line of both commands."""
    repair_cache(environ, on_line)
    exit_code, output = run_command(collect_command(run), environ, on_line)
    if exit_code:
        last = (output.strip().splitlines() or ["no output"])[-1]
        raise RunStopped(f"collecting graphs: exit code {exit_code}; {last}")
    return parse_report(run_command(compile_command(workers), environ, on_line)[1])


def repair_cache(environ: Mapping[str, str], on_line: Callable[[str], None]) -> None:
    """Remove what earlier runs left and the tool would wait for or skip: stale locks, and cached failures."""
    location = cache_location(environ)
    if "://" in location:
        return
    if locks := clear_locks(list_entries(location)):
        on_line(f"{location}: {counted(len(locks), 'stale lock')} removed")
    if failed := remove_entries(entry for entry in list_entries(location) if entry.state == "failed"):
        on_line(f"{location}: {counted(len(failed), 'failed graph')} removed, to be compiled again")


def run_command(command: Sequence[str], environ: Mapping[str, str], on_line: Callable[[str], None]) -> tuple[int, str]:
    """Run a command to its end and return its exit code and output. An exception, such as Ctrl-C, terminates it and
    everything it started."""
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
    return process.returncode, "".join(lines)
