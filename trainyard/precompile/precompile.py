"""Every graph of a run compiled before it starts: one process for each kind of rank collects, its forks compile.

Ranks of one stage have the same graphs (`parallel/tensor_parallel.py`), so a handful of ranks stands for hundreds.
What was compiled is in the cache when its graph ends;
what fails leaves a log and no entry, and is tried again next time.
"""

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from trainyard import devices
from trainyard.compile import inductor_cache
from trainyard.config.schema import Config
from trainyard.core.atomic_files import write_whole
from trainyard.core.errors import UserError
from trainyard.devices import Compiling, Device
from trainyard.launch.launcher import threads
from trainyard.parallel.layout import Layout
from trainyard.precompile.collect_graphs import Request

RUNS = "runs"
"""Directory of the records of what each run needs."""


@dataclass
class Graph:
    key: str
    name: str
    state: str
    """compiling, compiled, cached or failed."""
    seconds: float = 0.0
    problem: str = ""
    log: str = ""


@dataclass
class Report:
    place: Path
    graphs: dict[str, Graph] = field(default_factory=dict)
    files: set[str] = field(default_factory=set)
    """What the run needs, relative to `place`; empty where something failed."""
    problems: list[str] = field(default_factory=list)
    """Why a rank could not be collected."""
    seconds: float = 0.0

    def count(self, *states: str) -> int:
        return sum(graph.state in states for graph in self.graphs.values())

    @property
    def failed(self) -> list[Graph]:
        return [graph for graph in self.graphs.values() if graph.state not in ("compiled", "cached")]


def precompile(
    config: Config,
    ranks: int,
    here: int,
    workers: int,
    say: Callable[[str], None] = lambda line: None,
    see: Callable[[Graph], None] = lambda graph: None,
) -> Report:
    """Compile all graphs of a run on `ranks` ranks, `here` of them on each machine. `see` is told of each graph when it
    begins and when it ends."""
    device = devices.select(config.device.name)
    check(config, device)
    layout = Layout.of(config, ranks)
    report, start = Report(inductor_cache.ready(device)), time.monotonic()
    chosen = representatives(config, layout, device, here)
    for number, rank in enumerate(chosen, 1):
        say(f"collecting the graphs of rank {rank} ({number} of {len(chosen)} kinds)")
        request = Request(config.model_dump(mode="json"), rank, ranks, rank % here, workers)
        sealed = False
        for message in _answers(request, _environment(report.place, here, workers, device), report):
            if message["state"] == "sealed":
                report.files.update(message["files"])
                sealed = True
                continue
            graph = report.graphs.setdefault(message["key"], Graph(message["key"], message.get("name", "?"), ""))
            if message["state"] == "cached" and graph.state:
                continue  # a rank before has compiled it
            for name in ("state", "seconds", "problem", "log"):
                setattr(graph, name, message.get(name) or getattr(graph, name))
            see(graph)
        if not sealed and not report.failed and not report.problems:
            report.problems.append(f"rank {rank}: ended early; see {_log(report.place, rank)}")
    report.seconds = time.monotonic() - start
    if not report.failed and not report.problems:
        record(report, config, ranks)
    return report


def check(config: Config, device: Device) -> None:
    how = device.compiling()
    if how is None or how.backend != Compiling().backend:
        raise UserError(f"device.name={device.name}: its graphs are compiled by its own tools; see docs/trainium.md")
    if not config.compile.enabled:
        raise UserError("compile.enabled=false: this run compiles nothing; nearest: compile.enabled=true")


def representatives(config: Config, layout: Layout, device: Device, here: int) -> list[int]:
    """The first rank of each kind: of each pipeline rank, on each of a machine's devices where they have numbers, and
    with stochastic rounding of each shard, whose pieces differ."""
    shards = config.layout.zero > 0 and config.precision.kind == "bf16_sr"
    found: dict[tuple[int, ...], int] = {}
    for rank in range(layout.world):
        place = layout.place(rank)
        shard = (place["dp"], place["cp"]) if shards else ()
        found.setdefault((place["pp"], *shard, rank % here if device.numbered else 0), rank)
    return sorted(found.values())


def record(report: Report, config: Config, ranks: int) -> Path:
    """Note what this run needs, for `trainyard cache`."""
    place = report.place / RUNS
    place.mkdir(exist_ok=True)
    graphs = [asdict(graph) for graph in report.graphs.values()]
    old = {graph["key"]: graph["seconds"] for found in records(report.place) for graph in found["graphs"]}
    for graph in graphs:  # what was found in the cache took its time once
        graph["seconds"] = graph["seconds"] or old.get(graph["key"], 0.0)
    found = {"name": config.log.name, "ranks": ranks, "graphs": graphs, "files": sorted(report.files)}
    digest = hashlib.sha256(json.dumps(sorted(report.graphs)).encode()).hexdigest()[:8]
    path = place / f"{config.log.name}-{digest}.json"
    write_whole(path, json.dumps(found, indent=1) + "\n")
    return path


def records(place: Path) -> list[dict[str, Any]]:
    """What has been precompiled; a record that cannot be read is none."""
    found = []
    for path in sorted((place / RUNS).glob("*.json")):
        with suppress(OSError, ValueError):
            found.append({"path": str(path), **json.loads(path.read_text())})
    return found


def _log(place: Path, rank: int) -> Path:
    return place / "logs" / f"collect-{rank}.log"


def _environment(place: Path, here: int, workers: int, device: Device) -> dict[str, str]:
    """As a rank's: torch's keys hold the number of threads. In a fork a graph is compiled by one thread."""
    own = {"OMP_NUM_THREADS": str(threads(here))} if here > 1 else {}
    compilers = "1" if device.forks else str(workers)
    return {**own, **os.environ, inductor_cache.TORCH_PLACE: str(place), "TORCHINDUCTOR_COMPILE_THREADS": compilers}


def _answers(request: Request, environment: dict[str, str], report: Report) -> Iterator[dict[str, Any]]:
    log = _log(report.place, request.rank)
    log.parent.mkdir(exist_ok=True)
    with log.open("wb") as errors, _collector(environment, errors) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps(asdict(request)).encode() + b"\n")
        process.stdin.flush()
        for line in process.stdout:
            yield json.loads(line)
        code = process.wait()
    if code:
        last = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
        report.problems.append(f"rank {request.rank}: {last[-1] if last else f'ended with {code}'} (log: {log})")
    else:
        log.unlink(missing_ok=True)


@contextmanager
def _collector(environment: dict[str, str], errors: Any) -> Iterator[subprocess.Popen[bytes]]:
    """In a session of its own, which is ended with this block; it ends by itself when we do."""
    command = [sys.executable, "-m", "trainyard.precompile.collect_graphs"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": errors}
    with subprocess.Popen(command, env=environment, start_new_session=True, **pipes) as process:
        try:
            yield process
        finally:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
