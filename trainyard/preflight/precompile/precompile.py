"""Compile every graph of a run before it starts: one process per kind of rank traces a step, and its forks compile.

Ranks of one stage have the same graphs, so a few ranks represent hundreds. A compiled graph is in the cache as soon as
its compiler ends; a failed one leaves a log and no entry, and is retried the next time.
"""

import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from trainyard import devices
from trainyard.config.schema import CompileSection, Config
from trainyard.core.atomic_files import atomic_write_text
from trainyard.core.errors import UserError
from trainyard.core.quantities import counted
from trainyard.devices.base import CompileOptions, Device
from trainyard.launch.launcher import threads_per_rank
from trainyard.parallel.layout import Layout
from trainyard.preflight.precompile.collect_graphs import CollectRequest
from trainyard.train.compile import inductor_cache

RUNS_DIR = "runs"
"""Directory with a record for each run: the graphs and files it needs."""


@dataclass
class PrecompiledGraph:
    """One graph of the run. These fields are also the format of the records."""

    key: str
    name: str
    state: str
    """compiling, compiled, cached or failed."""
    seconds: float = 0.0
    problem: str = ""
    log: str = ""


@dataclass
class PrecompileReport:
    """The result of a precompilation."""

    cache_dir: Path
    graphs: dict[str, PrecompiledGraph] = field(default_factory=dict)
    files: set[str] = field(default_factory=set)
    """Files that the run needs, relative to `cache_dir`; empty if something failed."""
    problems: list[str] = field(default_factory=list)
    """Reasons why ranks could not be traced."""
    seconds: float = 0.0

    @property
    def failed_graphs(self) -> list[PrecompiledGraph]:
        return [graph for graph in self.graphs.values() if graph.state not in ("compiled", "cached")]

    def summary(self) -> list[str]:
        """Lines for people. The three totals have the wording of neuron_parallel_compile."""
        states, failed = Counter(graph.state for graph in self.graphs.values()), len(self.failed_graphs)
        lines = [
            f"{states['cached']} found in the cache, {states['compiled']} compiled in {self.seconds:.1f} s: "
            f"{self.cache_dir}",
            f"Total graphs: {len(self.graphs)}",
            f"Total successful compilations: {len(self.graphs) - failed}",
            f"Total failed compilations: {failed}",
        ]
        for graph in self.failed_graphs:
            lines.append(f"failed: {graph.name}: {graph.problem or 'not finished'}")
            lines += [f"  log: {graph.log}"] * bool(graph.log)
        lines += [f"not collected: {problem}" for problem in self.problems]
        if failed or self.problems:
            lines.append(
                "Failed graphs are not in the cache: run precompile again to retry them, or train compiles them."
            )
        return lines


def precompile(
    config: Config,
    world_size: int,
    local_ranks: int,
    workers: int,
    on_status: Callable[[str], None] = lambda line: None,
    on_graph: Callable[[PrecompiledGraph], None] = lambda graph: None,
) -> PrecompileReport:
    """Compile all graphs of a run on `world_size` ranks, `local_ranks` per machine. `on_graph` receives each graph when
    its compilation starts and ends."""
    device = devices.select(config.device.name)
    check_precompile(config.compile, device)
    layout = Layout.from_config(config, world_size)
    report, start = PrecompileReport(inductor_cache.prepare_cache(device)), time.monotonic()
    # With stochastic rounding, each optimizer shard has a graph of its own.
    sharded_graphs = config.layout.zero > 0 and config.precision.kind == "bf16_sr"
    ranks = representative_ranks(layout, sharded_graphs, local_ranks if device.device_index_in_code else 1)
    for number, rank in enumerate(ranks, 1):
        on_status(f"tracing rank {rank} ({number} of {counted(len(ranks), 'kind')} of ranks)")
        request = CollectRequest(config.model_dump(mode="json"), rank, world_size, rank % local_ranks, workers)
        complete = False
        environment = _collector_environment(report.cache_dir, local_ranks, workers, device)
        for message in _run_collector(request, environment, report):
            if message["state"] == "complete":
                report.files.update(message["files"])
                complete = True
                continue
            graph = report.graphs.setdefault(
                message["key"], PrecompiledGraph(message["key"], message.get("name", "?"), "")
            )
            if message["state"] == "cached" and graph.state:
                continue  # an earlier rank compiled it
            for name in ("state", "seconds", "problem", "log"):
                setattr(graph, name, message.get(name) or getattr(graph, name))
            on_graph(graph)
        if not complete and not report.failed_graphs and not report.problems:
            report.problems.append(f"rank {rank}: ended early; see {_log_path(report.cache_dir, rank)}")
    report.seconds = time.monotonic() - start
    if not report.failed_graphs and not report.problems:
        write_record(report, config.log.name, world_size)
    return report


def check_precompile(section: CompileSection, device: Device) -> None:
    options = device.compile_options()
    if options is None or options.backend != CompileOptions().backend:
        raise UserError(f"device.name={device.name}: its own tools compile its graphs; see docs/guides/trainium.md")
    if not section.enabled:
        raise UserError("compile.enabled=false: this run compiles nothing; nearest: compile.enabled=true")


def representative_ranks(layout: Layout, sharded_graphs: bool, device_indices: int) -> list[int]:
    """The first rank of each kind. Kinds differ by pipeline rank, by device index if compiled code contains it (one of
    `device_indices`), and by optimizer shard if `sharded_graphs`."""
    first_rank: dict[tuple[int, ...], int] = {}
    for rank in range(layout.world_size):
        coords = layout.coords(rank)
        shard = (coords["dp"], coords["cp"]) if sharded_graphs else ()
        first_rank.setdefault((coords["pp"], *shard, rank % device_indices), rank)
    return sorted(first_rank.values())


def write_record(report: PrecompileReport, name: str, world_size: int) -> Path:
    """Record what this run needs, for `trainyard cache`."""
    directory = report.cache_dir / RUNS_DIR
    directory.mkdir(exist_ok=True)
    graphs = [asdict(graph) for graph in report.graphs.values()]
    known_seconds = {
        graph["key"]: graph["seconds"] for record in read_records(report.cache_dir) for graph in record["graphs"]
    }
    for graph in graphs:  # a cached graph keeps the compile time of its first record
        graph["seconds"] = graph["seconds"] or known_seconds.get(graph["key"], 0.0)
    record = {"name": name, "ranks": world_size, "graphs": graphs, "files": sorted(report.files)}
    digest = hashlib.sha256(json.dumps(sorted(report.graphs)).encode()).hexdigest()[:8]
    path = directory / f"{name}-{digest}.json"
    atomic_write_text(path, json.dumps(record, indent=1) + "\n")
    return path


def read_records(cache_dir: Path) -> list[dict[str, Any]]:
    """Records of all precompiled runs; unreadable records are ignored."""
    records = []
    for path in sorted((cache_dir / RUNS_DIR).glob("*.json")):
        with suppress(OSError, ValueError):
            records.append({"path": str(path), **json.loads(path.read_text())})
    return records


def first_error(log: str) -> str | None:
    """The first exception in a log: the cause of those that followed, whose last line may be empty."""
    _, _, traces = log.partition("Traceback (most recent call last)")  # warnings come before it
    line = re.search(r"^(?:\[rank\d+\]: )?([\w.]*[A-Z]\w*: \S.*)$", traces, re.M)
    return line[1] if line else None


def _log_path(cache_dir: Path, rank: int) -> Path:
    return cache_dir / "logs" / f"collect-{rank}.log"


def _collector_environment(cache_dir: Path, local_ranks: int, workers: int, device: Device) -> dict[str, str]:
    """The environment of a rank: torch's keys contain the number of threads. A fork compiles with one thread."""
    threads_variable = {"OMP_NUM_THREADS": str(threads_per_rank(local_ranks))} if local_ranks > 1 else {}
    compile_threads = "1" if device.fork_safe else str(workers)
    return {
        **threads_variable,
        **os.environ,
        inductor_cache.TORCH_CACHE_VARIABLE: str(cache_dir),
        "TORCHINDUCTOR_COMPILE_THREADS": compile_threads,
    }


def _run_collector(
    request: CollectRequest, environment: dict[str, str], report: PrecompileReport
) -> Iterator[dict[str, Any]]:
    """The messages of a collector, which runs in its own session. The session is killed at the end, and the collector
    also dies with this process."""
    log = _log_path(report.cache_dir, request.rank)
    log.parent.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "trainyard.preflight.precompile.collect_graphs"]
    pipe = subprocess.PIPE
    with (
        log.open("wb") as errors,
        subprocess.Popen(
            command, env=environment, stdin=pipe, stdout=pipe, stderr=errors, start_new_session=True
        ) as process,
    ):
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(json.dumps(asdict(request)).encode() + b"\n")
            process.stdin.flush()
            for line in process.stdout:
                yield json.loads(line)
            code = process.wait()
        finally:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
    if code:
        cause = first_error(log.read_text(errors="replace"))
        report.problems.append(f"rank {request.rank}: {cause or f'exit code {code}'} (log: {log})")
    else:
        log.unlink(missing_ok=True)
