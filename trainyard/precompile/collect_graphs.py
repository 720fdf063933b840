"""The graphs of one rank: this process becomes that rank, with no memory behind its tensors, and takes its first step.

    python -m trainyard.precompile.collect_graphs < request.json

Twice: first every graph that is not in the cache is compiled beside it (`workers.py`) while it goes on with shapes; how
a graph's outputs lie in memory, which its backward pass depends on, inductor says long before it has compiled. The
second time all are found, and what torch keeps about forward and backward passes together is stored too. Compiled code
is never called: it would write to memory that is not there.

Requests and answers are JSON, a line each. The process ends with its parent.
"""

import json
import os
import signal
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
from trainyard.compile import inductor_cache
from trainyard.config.load import parse
from trainyard.config.schema import Config
from trainyard.dryrun.dry_run import fake_rank, without_io
from trainyard.parallel.layout import Layout
from trainyard.precompile.compile_workers import CompileResult, ForkPool
from trainyard.train.checkpointing.saver import SaveStatus
from trainyard.train.evaluate import evaluate
from trainyard.train.step import StagedBatch
from trainyard.train.trainer import Trainer

AUTOGRAD_INDEX = "aotautograd"
"""Where torch keeps what it knows about forward and backward passes together."""


@dataclass(frozen=True)
class CollectRequest:
    config: dict[str, Any]
    rank: int
    world_size: int
    local_rank: int
    workers: int


SendMessage = Callable[[dict[str, Any]], None]
OnMiss = Callable[[compat.GraphRequest, Callable[[], Any]], Any]


class GraphCollector:
    """What is done about each graph that the step asks for, and how that went."""

    def __init__(self, cache_dir: Path, workers: int, fork_safe: bool, send: SendMessage) -> None:
        self.cache_dir, self.send, self.phase = cache_dir, send, ""
        self.pool = ForkPool(workers, cache_dir / "logs", self.on_finished)
        self.fork_safe = fork_safe
        self.seen_keys: set[str] = set()
        self.failed_keys: set[str] = set()

    def on_miss(self, asked: compat.GraphRequest, make: Callable[[], Any]) -> Any:
        if asked.cache_key not in self.seen_keys:
            if not self.fork_safe:
                return self._compile_in_process(asked, make)
            if self.pool.fork(asked.cache_key):
                try:
                    return make()
                except BaseException as error:
                    self.pool.exit_child(f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")
            self._report(asked, "compiling")
        return lower_without_compiling(asked, make)

    def on_hit(self, asked: compat.GraphRequest) -> None:
        if self.pool.is_child:
            stored = self.cache_dir / "fxgraph" / asked.cache_key[1:3] / asked.cache_key
            self.pool.exit_child(None if asked.cache_key and stored.is_dir() else "compiled, but torch cannot keep it")
        if asked.cache_key and asked.cache_key not in self.seen_keys:
            self._report(asked, "cached")

    def on_lost(self, asked: compat.GraphRequest, make: Callable[[], Any]) -> Any:
        """Compiled a moment ago, and not there the second time."""
        self.on_finished(
            CompileResult(asked.cache_key, 0.0, "compiled, and not found again", self.pool.log_path(asked.cache_key))
        )
        return lower_without_compiling(asked, make)

    def _compile_in_process(self, asked: compat.GraphRequest, make: Callable[[], Any]) -> Any:
        """Devices that do not survive a fork: torch compiles the kernels of a graph side by side instead."""
        self._report(asked, "compiling")
        start, log = time.monotonic(), self.pool.log_path(asked.cache_key)
        try:
            made = make()
        except Exception as error:
            log.write_text(traceback.format_exc())
            self.on_finished(
                CompileResult(asked.cache_key, time.monotonic() - start, f"{type(error).__name__}: {error}", log)
            )
            raise compat.GraphNotCompiled from None
        self.on_finished(CompileResult(asked.cache_key, time.monotonic() - start, None, log))
        return made

    def _report(self, asked: compat.GraphRequest, state: str) -> None:
        self.seen_keys.add(asked.cache_key)
        way = "backward" if asked.is_backward else "forward"
        self.send({"key": asked.cache_key, "state": state, "name": f"{self.phase}: {asked.origin}, {way}"})

    def on_finished(self, how: CompileResult) -> None:
        if how.problem:
            self.failed_keys.add(how.key)
        state = "failed" if how.problem else "compiled"
        self.send({"state": state, **asdict(how), "log": str(how.log)})


def lower_without_compiling(asked: compat.GraphRequest, make: Callable[[], Any]) -> NoReturn:
    """Always raises Unmade: how outputs lie is known then, or the graph will be told to have failed."""
    try:
        compat.lower_for_strides(make)
    except Exception:
        raise compat.GraphNotCompiled from None
    raise compat.GraphNotCompiled


def collect_graphs(request: CollectRequest, tell: SendMessage) -> None:
    config = parse(request.config)
    device = devices.as_fake(devices.select(config.device.name))
    place = inductor_cache.prepare_cache(device)
    graphs = GraphCollector(place, request.workers, device.fork_safe, tell)
    if device.fork_safe:
        compat.probe_cpu_isa()
    mode = compat.fake_tensor_mode()
    blueprint = models.family_of(config.model).blueprint(config.model)
    with fake_rank(device.process_group_backend, request.rank, request.world_size, request.local_rank) as world:
        with mode:
            trainer = Trainer(
                minimal_config(config, request.world_size),
                weights=lambda name: torch.empty(blueprint.spec(name).shape, device=device.torch_device),
                device=device,
                world=world,
            )
        ready = trainer.runner.stage_batch(trainer.loader.batch(0, trainer.batch_slice))

        def batch() -> StagedBatch:
            """New tensors each time, as in a run: graphs leave marks on those that they have seen."""
            return StagedBatch(
                [{name: mode.from_tensor(x.clone()) for name, x in part.items()} for part in ready.batches]
            )

        def trace(miss: OnMiss) -> None:
            """All that a run compiles, in phases; what it will compile besides (generation) is another phase here."""
            with compat.intercept_compilation(miss, graphs.on_hit), mode:
                for model in trainer.models:
                    model.train()
                graphs.phase = "train"
                trainer.train_step(batch(), 1, config.optimizer.lr, (0.0, *SaveStatus()))
                trainer.optimizer.wait_for_weights()
                if config.evaluate.every and not config.evaluate.function:
                    graphs.phase = "evaluate"
                    metrics = trainer.metrics
                    evaluate(trainer.runner, trainer.loss_fn, metrics, [batch()], device, trainer.mesh, 1)  # type: ignore[list-item]

        with compat.disable_autograd_cache():
            trace(graphs.on_miss)
        graphs.pool.wait_all()
        if graphs.failed_keys:
            return
        torch.compiler.reset()
        with redirect_autograd_index(place) as index, compat.write_only_autograd_cache():
            trace(graphs.on_lost)
    if not graphs.failed_keys:
        tell(
            {
                "state": "sealed",
                "keys": sorted(graphs.seen_keys),
                "files": files_of_graphs(place, graphs.seen_keys, index),
            }
        )


def minimal_config(config: Config, ranks: int) -> Config:
    """The run with as few micro batches as have all graphs, and no files; what is evaluated is a training batch."""
    layout = Layout.from_config(config, ranks)
    sections = without_io(parse({**config.model_dump(mode="json"), "evaluate": {}})).model_dump(mode="json")
    sections["train"]["global_batch"] = config.train.micro_batch * layout.dp * min(layout.pp, layout.micro_batches)
    sections["evaluate"]["metrics"] = config.evaluate.metrics
    return parse(sections)


@contextmanager
def redirect_autograd_index(place: Path) -> Iterator[list[Path]]:
    """All that is kept, seen through links, but for the index: what torch finds there it would call. What it writes
    goes to its place at the end, and is told then."""
    written: list[Path] = []
    with tempfile.TemporaryDirectory(dir=place, prefix=f".sealing-{os.getpid()}-") as name:
        seen = Path(name)
        for path in place.iterdir():
            if path.name != AUTOGRAD_INDEX and not path.name.startswith("."):
                (seen / path.name).symlink_to(path)
        os.environ[inductor_cache.TORCH_CACHE_VARIABLE] = name
        try:
            yield written
            for path in inductor_cache.list_files(seen):
                target = place / path.relative_to(seen)
                target.parent.mkdir(parents=True, exist_ok=True)
                os.replace(path, target)
                written.append(target)
        finally:
            os.environ[inductor_cache.TORCH_CACHE_VARIABLE] = str(place)


def files_of_graphs(place: Path, keys: set[str], index: list[Path]) -> list[str]:
    """Files that the graphs need, relative: their entries, and the code that this process has loaded for them."""
    real = place.resolve()
    loaded = {
        Path(module.__file__ or "").resolve() for module in list(sys.modules.values()) if hasattr(module, "__file__")
    }
    maps = Path("/proc/self/maps")
    if maps.exists():
        loaded |= {Path(line.split(maxsplit=5)[5]) for line in maps.read_text().splitlines() if line.count("/")}
    found = {path for path in {*loaded, *(path.resolve() for path in index)} if path.is_relative_to(real)}
    for path in inductor_cache.list_files(real):
        names = path.relative_to(real).parts
        entry = names[0] == "fxgraph" and names[-2] in keys
        probe = path.suffix == ".so" and not path.name.endswith(".main.so")  # which instructions the CPU has
        if entry or probe:
            found.add(path)
    return sorted(str(path.relative_to(real)) for path in found)


def _die_with_parent() -> None:
    """Nothing comes after the request: the read returns when the parent is gone."""
    os.read(0, 1)
    os.killpg(os.getpgrp(), signal.SIGKILL)


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever else is printed goes to the log
    line = b""
    while not line.endswith(b"\n"):
        line += os.read(0, 1)
    threading.Thread(target=_die_with_parent, daemon=True).start()
    parent = os.getpid()

    def tell(message: dict[str, Any]) -> None:
        if os.getpid() == parent:
            print(json.dumps(message), file=answers, flush=True)

    collect_graphs(CollectRequest(**json.loads(line)), tell)


if __name__ == "__main__":
    main()
