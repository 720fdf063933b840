"""Trace the graphs of one rank: this process becomes that rank of a fake world, without memory, and runs one step.

    python -m trainyard.preflight.precompile.collect_graphs < request.json

The step runs twice. In the first pass, every graph that is not in the cache is compiled in a fork (compile_workers.py)
while tracing continues with shapes only; inductor knows the strides of a graph's outputs, which the backward graph
depends on, long before it has compiled. In the second pass all graphs are cache hits, and torch writes its index of
forward and backward graphs together. Compiled code is never called: it would write to memory that does not exist.

Requests and replies are JSON, one per line. The process dies with its parent.
"""

import json
import os
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch

from trainyard import compat, devices, models
from trainyard.config.load import parse
from trainyard.config.schema import Config
from trainyard.core.batch import Batch, map_batch
from trainyard.data.loading.loader import shortened
from trainyard.devices.meta import as_fake
from trainyard.parallel.layout import Layout
from trainyard.preflight.dryrun.dry_run import fake_rank, without_io
from trainyard.preflight.dryrun.meta_ops import fake_tensor_mode
from trainyard.preflight.precompile.compile_workers import CompileResult, ForkPool, die_with_parent
from trainyard.run.trainer import Trainer
from trainyard.train.compile import inductor_cache
from trainyard.train.evaluate import evaluate

STAGING_PREFIX = ".staging-"
"""Prefix of temporary directories in the cache, followed by the process id."""
AUTOGRAD_INDEX = "aotautograd"
"""torch's index of forward and backward graphs together."""


class AutogradIndex:
    """torch's index of forward and backward graphs, written during the second pass but never read.

    torch would call the compiled code of an entry that it finds, which fake tensors do not survive. So torch gets a
    directory with links to everything in the cache except the index, and whatever it writes to the index is set aside
    before the next graph. (torch 2.11 asks for one graph several times in a trace.)
    """

    def __init__(self, cache_dir: Path) -> None:
        self.cache_dir = cache_dir
        self.staging: Path | None = None
        self.written: list[Path] = []
        """Files of the index after `redirected`."""

    @contextmanager
    def redirected(self) -> Iterator[None]:
        with tempfile.TemporaryDirectory(dir=self.cache_dir, prefix=f"{STAGING_PREFIX}{os.getpid()}-") as name:
            self.staging = Path(name)
            for path in self.cache_dir.iterdir():
                if path.name != AUTOGRAD_INDEX and not path.name.startswith("."):
                    (self.staging / path.name).symlink_to(path)
            os.environ[inductor_cache.TORCH_CACHE_VARIABLE] = name
            try:
                yield
                self.set_aside()
                self._publish()
            finally:
                os.environ[inductor_cache.TORCH_CACHE_VARIABLE] = str(self.cache_dir)
                self.staging = None

    def set_aside(self) -> None:
        """Hide what torch has written so far from its lookups."""
        if self.staging and (self.staging / AUTOGRAD_INDEX).exists():
            aside = Path(tempfile.mkdtemp(dir=self.staging, prefix=".aside-"))
            (self.staging / AUTOGRAD_INDEX).rename(aside / AUTOGRAD_INDEX)

    def _publish(self) -> None:
        """Move everything that torch wrote into the cache."""
        assert self.staging is not None
        for path in inductor_cache.list_files(self.staging):
            parts = path.relative_to(self.staging).parts
            target = self.cache_dir.joinpath(*(parts[1:] if parts[0].startswith(".aside-") else parts))
            target.parent.mkdir(parents=True, exist_ok=True)
            os.replace(path, target)
            self.written.append(target)


@dataclass(frozen=True)
class CollectRequest:
    """The rank to trace, and how many graphs to compile at a time."""

    config: dict[str, Any]
    rank: int
    world_size: int
    local_rank: int
    workers: int


SendMessage = Callable[[dict[str, Any]], None]


class GraphCollector:
    """Compiles each graph that a traced step needs and reports the results."""

    def __init__(self, cache_dir: Path, workers: int, fork_safe: bool, send: SendMessage) -> None:
        self.cache_dir, self.send, self.fork_safe = cache_dir, send, fork_safe
        self.phase = ""
        """Phase that is being traced, for the names of graphs."""
        self.second_pass = False
        """True if every graph must be in the cache."""
        self.index = AutogradIndex(cache_dir)
        self.backend = compat.TracingBackend(self.index.set_aside, self.on_miss, self.on_hit)
        self.pool = ForkPool(workers, cache_dir / "logs", self.on_finished)
        self.seen_keys: set[str] = set()
        self.failed_keys: set[str] = set()
        self.key_parts: set[str] = set()
        """What the keys of the first pass were computed from."""

    def on_miss(self, request: compat.GraphRequest, compile_graph: Callable[[], Any]) -> Any:
        if self.second_pass:
            self.report_unknown_key(request)
        elif request.cache_key not in self.seen_keys:
            self.key_parts.update(request.key_parts)
            if not self.fork_safe:
                return self._compile_in_process(request, compile_graph)
            if self.pool.fork(request.cache_key):
                try:
                    return compile_graph()
                except BaseException as error:
                    self.pool.exit_child(f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")
            self._report(request, "compiling")
        return lower_without_compiling(compile_graph)

    def on_hit(self, request: compat.GraphRequest) -> None:
        if self.pool.is_child:
            stored = self.cache_dir / "fxgraph" / request.cache_key[1:3] / request.cache_key
            self.pool.exit_child(
                None if request.cache_key and stored.is_dir() else "compiled, but torch cannot cache it"
            )
        if request.cache_key and request.cache_key not in self.seen_keys:
            self._report(request, "cached")

    def _compile_in_process(self, request: compat.GraphRequest, compile_graph: Callable[[], Any]) -> Any:
        """Compile here, on a device that does not survive a fork: torch compiles the kernels of a graph in parallel."""
        self._report(request, "compiling")
        start, log = time.monotonic(), self.pool.log_path(request.cache_key)
        try:
            compiled = compile_graph()
        except Exception as error:
            log.write_text(traceback.format_exc())
            problem = f"{type(error).__name__}: {error}"
            self.on_finished(CompileResult(request.cache_key, time.monotonic() - start, problem, log))
            raise compat.GraphNotCompiled from None
        self.on_finished(CompileResult(request.cache_key, time.monotonic() - start, None, log))
        return compiled

    def report_unknown_key(self, request: compat.GraphRequest) -> None:
        """A graph of the second pass that the first one did not have: a run might not find it either."""
        log = self.pool.log_path(request.cache_key)
        unknown = [part for part in request.key_parts if part not in self.key_parts]
        log.write_text("\n".join(("not in the first pass, among what torch's cache key depends on:", *unknown, "")))
        self._report(request, "compiling")
        problem = "traced differently the second time: a run would compile it again"
        self.on_finished(CompileResult(request.cache_key, 0.0, problem, log))

    def _report(self, request: compat.GraphRequest, state: str) -> None:
        self.seen_keys.add(request.cache_key)
        direction = "backward" if request.is_backward else "forward"
        self.send({"key": request.cache_key, "state": state, "name": f"{self.phase}: {request.origin}, {direction}"})

    def on_finished(self, result: CompileResult) -> None:
        if result.problem:
            self.failed_keys.add(result.key)
        state = "failed" if result.problem else "compiled"
        self.send({"state": state, **asdict(result), "log": str(result.log)})


def lower_without_compiling(compile_graph: Callable[[], Any]) -> NoReturn:
    """Record the strides of the outputs and raise GraphNotCompiled. If lowering fails, so does the compiling fork."""
    try:
        compat.lower_for_strides(compile_graph)
    except Exception:
        raise compat.GraphNotCompiled from None
    raise compat.GraphNotCompiled


def collect_graphs(request: CollectRequest, send: SendMessage) -> None:
    config = parse(request.config)
    device = devices.select(config.device.name)
    cache_dir = inductor_cache.prepare_cache(device)
    graphs = GraphCollector(cache_dir, request.workers, device.fork_safe, send)
    device = as_fake(device, graphs.backend)
    if device.fork_safe:
        compat.probe_cpu_isa()
    mode = fake_tensor_mode()
    blueprint = models.blueprint_of(config.model)
    with fake_rank(device.process_group_backend, request.rank, request.world_size, request.local_rank) as world:
        with mode:
            trainer = Trainer(
                minimal_config(config, request.world_size),
                weights=lambda name: torch.empty(blueprint.spec(name).shape, device=device.torch_device),
                device=device,
                world=world,
            )
        samples = trainer.loader.batch(0, trainer.batch_slice)
        lengths = config.data.buckets
        staged = [trainer.runner.stage_batch(shortened(samples, length)) for length in lengths] or [
            trainer.runner.stage_batch(samples)
        ]

        def batch(parts: list[Batch]) -> list[Batch]:
            """New tensors for each step, as in a run: graphs mark the tensors that they have seen."""
            return [map_batch(lambda x: mode.from_tensor(x.clone()), part) for part in parts]

        def trace() -> None:
            """Everything that a run compiles, in phases."""
            with graphs.backend.active(), mode:
                for model in trainer.models:
                    model.train()
                graphs.phase = "train"
                for parts in staged:
                    trainer.train_step(batch(parts), 1, config.optimizer.lr)
                    trainer.optimizer.wait_for_weights()
                if config.samples.every or (config.evaluate.every and not config.evaluate.function):
                    graphs.phase = "evaluate"
                    evaluate(trainer.runner, trainer.loss_fn, trainer.metrics, [batch(staged[-1])], 1)

        with compat.disable_autograd_cache():
            trace()
        graphs.pool.wait_all()
        if graphs.failed_keys:
            return
        torch.compiler.reset()
        graphs.second_pass = True
        with graphs.index.redirected():
            trace()
    if not graphs.failed_keys:
        files = files_of_graphs(cache_dir, graphs.seen_keys, graphs.index.written)
        send({"state": "complete", "keys": sorted(graphs.seen_keys), "files": files})


def minimal_config(config: Config, world_size: int) -> Config:
    """The run without files, with the fewest micro batches that have all graphs. Evaluation uses a training batch."""
    layout = Layout.from_config(config, world_size)
    sections = without_io(parse({**config.model_dump(mode="json"), "evaluate": {}})).model_dump(mode="json")
    sections["train"]["global_batch"] = config.train.micro_batch * layout.dp * min(layout.pp, layout.micro_batches)
    sections["evaluate"]["metrics"] = config.evaluate.metrics
    return parse(sections)


def files_of_graphs(cache_dir: Path, keys: set[str], index: list[Path]) -> list[str]:
    """Files that the graphs need, relative to the cache: their entries, and the code that this process has loaded."""
    root = cache_dir.resolve()
    loaded = {
        Path(module.__file__ or "").resolve() for module in list(sys.modules.values()) if hasattr(module, "__file__")
    }
    maps = Path("/proc/self/maps")
    if maps.exists():
        loaded |= {Path(line.split(maxsplit=5)[5]) for line in maps.read_text().splitlines() if line.count("/")}
    files = {path for path in {*loaded, *(path.resolve() for path in index)} if path.is_relative_to(root)}
    for path in inductor_cache.list_files(root):
        parts = path.relative_to(root).parts
        is_entry = parts[0] == "fxgraph" and parts[-2] in keys
        is_probe = path.suffix == ".so" and not path.name.endswith(".main.so")  # a probe of the CPU's instruction set
        if is_entry or is_probe:
            files.add(path)
    return sorted(str(path.relative_to(root)) for path in files)


def main() -> None:
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # all other output goes to the log
    line = b""
    while not line.endswith(b"\n"):
        line += os.read(0, 1)
    threading.Thread(target=die_with_parent, args=(0,), daemon=True).start()  # stdin closes when the parent dies
    parent = os.getpid()

    def send(message: dict[str, Any]) -> None:
        if os.getpid() == parent:
            print(json.dumps(message), file=replies, flush=True)

    collect_graphs(CollectRequest(**json.loads(line)), send)


if __name__ == "__main__":
    main()
