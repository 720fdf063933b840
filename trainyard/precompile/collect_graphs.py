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
from trainyard.dryrun.dry_run import alone, pretended
from trainyard.parallel.layout import Layout
from trainyard.precompile.compile_workers import Ended, Pool
from trainyard.train.checkpointing.saver import Words
from trainyard.train.evaluate import evaluate
from trainyard.train.step import Prepared
from trainyard.train.trainer import Trainer

INDEX = "aotautograd"
"""Where torch keeps what it knows about forward and backward passes together."""


@dataclass(frozen=True)
class Request:
    config: dict[str, Any]
    rank: int
    ranks: int
    local_rank: int
    workers: int


Tell = Callable[[dict[str, Any]], None]
Miss = Callable[[compat.Asked, Callable[[], Any]], Any]


class Graphs:
    """What is done about each graph that the step asks for, and how that went."""

    def __init__(self, place: Path, workers: int, forks: bool, tell: Tell) -> None:
        self.place, self.tell, self.phase = place, tell, ""
        self.pool = Pool(workers, place / "logs", self.ended)
        self.forks = forks
        self.seen: set[str] = set()
        self.failed: set[str] = set()

    def miss(self, asked: compat.Asked, make: Callable[[], Any]) -> Any:
        if asked.key not in self.seen:
            if not self.forks:
                return self._here(asked, make)
            if self.pool.fork(asked.key):
                try:
                    return make()
                except BaseException as error:
                    self.pool.leave(f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")
            self._say(asked, "compiling")
        return only_shapes(asked, make)

    def found(self, asked: compat.Asked) -> None:
        if self.pool.is_child:
            stored = self.place / "fxgraph" / asked.key[1:3] / asked.key
            self.pool.leave(None if asked.key and stored.is_dir() else "compiled, but torch cannot keep it")
        if asked.key and asked.key not in self.seen:
            self._say(asked, "cached")

    def lost(self, asked: compat.Asked, make: Callable[[], Any]) -> Any:
        """Compiled a moment ago, and not there the second time."""
        self.ended(Ended(asked.key, 0.0, "compiled, and not found again", self.pool.log(asked.key)))
        return only_shapes(asked, make)

    def _here(self, asked: compat.Asked, make: Callable[[], Any]) -> Any:
        """Devices that do not survive a fork: torch compiles the kernels of a graph side by side instead."""
        self._say(asked, "compiling")
        start, log = time.monotonic(), self.pool.log(asked.key)
        try:
            made = make()
        except Exception as error:
            log.write_text(traceback.format_exc())
            self.ended(Ended(asked.key, time.monotonic() - start, f"{type(error).__name__}: {error}", log))
            raise compat.Unmade from None
        self.ended(Ended(asked.key, time.monotonic() - start, None, log))
        return made

    def _say(self, asked: compat.Asked, state: str) -> None:
        self.seen.add(asked.key)
        way = "backward" if asked.backward else "forward"
        self.tell({"key": asked.key, "state": state, "name": f"{self.phase}: {asked.origin}, {way}"})

    def ended(self, how: Ended) -> None:
        if how.problem:
            self.failed.add(how.key)
        state = "failed" if how.problem else "compiled"
        self.tell({"state": state, **asdict(how), "log": str(how.log)})


def only_shapes(asked: compat.Asked, make: Callable[[], Any]) -> NoReturn:
    """Always raises Unmade: how outputs lie is known then, or the graph will be told to have failed."""
    try:
        compat.lowered(make)
    except Exception:
        raise compat.Unmade from None
    raise compat.Unmade


def collect(request: Request, tell: Tell) -> None:
    config = parse(request.config)
    device = devices.traced(devices.select(config.device.name))
    place = inductor_cache.ready(device)
    graphs = Graphs(place, request.workers, device.forks, tell)
    if device.forks:
        compat.pick_instructions()
    mode = compat.shapes_only()
    blueprint = models.family(config.model).blueprint(config.model)
    with pretended(device.process_group, request.rank, request.ranks, request.local_rank):
        with mode:
            trainer = Trainer(
                without_files(config, request.ranks),
                weights=lambda name: torch.empty(blueprint.row(name).shape, device=device.handle),
                device=device,
            )
        ready = trainer.forward.prepare(trainer.loader.batch(0, trainer.rows))

        def batch() -> Prepared:
            """New tensors each time, as in a run: graphs leave marks on those that they have seen."""
            return Prepared([{name: mode.from_tensor(x.clone()) for name, x in part.items()} for part in ready.parts])

        def trace(miss: Miss) -> None:
            """All that a run compiles, in phases; what it will compile besides (generation) is another phase here."""
            with compat.compiling(miss, graphs.found), mode:
                for model in trainer.models:
                    model.train()
                graphs.phase = "train"
                trainer.step(batch(), 1, config.optimizer.lr, (0.0, *Words()))
                trainer.optimizer.settle()
                if config.evaluate.every and not config.evaluate.function:
                    graphs.phase = "evaluate"
                    metrics = trainer.metrics
                    evaluate(trainer.forward, trainer.loss, metrics, [batch()], device, trainer.mesh, 1)  # type: ignore[list-item]

        with compat.without_autograd_cache():
            trace(graphs.miss)
        graphs.pool.wait()
        if graphs.failed:
            return
        torch.compiler.reset()
        with empty_index(place) as index, compat.unread_autograd_cache():
            trace(graphs.lost)
    if not graphs.failed:
        tell({"state": "sealed", "keys": sorted(graphs.seen), "files": used(place, graphs.seen, index)})


def without_files(config: Config, ranks: int) -> Config:
    """The run with as few micro batches as have all graphs, and no files; what is evaluated is a training batch."""
    layout = Layout.of(config, ranks)
    sections = alone(parse({**config.model_dump(mode="json"), "evaluate": {}})).model_dump(mode="json")
    sections["train"]["global_batch"] = config.train.micro_batch * layout.dp * min(layout.pp, layout.micro_batches)
    sections["evaluate"]["metrics"] = config.evaluate.metrics
    return parse(sections)


@contextmanager
def empty_index(place: Path) -> Iterator[list[Path]]:
    """All that is kept, seen through links, but for the index: what torch finds there it would call. What it writes
    goes to its place at the end, and is told then."""
    written: list[Path] = []
    with tempfile.TemporaryDirectory(dir=place, prefix=f".sealing-{os.getpid()}-") as name:
        seen = Path(name)
        for path in place.iterdir():
            if path.name != INDEX and not path.name.startswith("."):
                (seen / path.name).symlink_to(path)
        os.environ[inductor_cache.TORCH_PLACE] = name
        try:
            yield written
            for path in inductor_cache.files(seen):
                target = place / path.relative_to(seen)
                target.parent.mkdir(parents=True, exist_ok=True)
                os.replace(path, target)
                written.append(target)
        finally:
            os.environ[inductor_cache.TORCH_PLACE] = str(place)


def used(place: Path, keys: set[str], index: list[Path]) -> list[str]:
    """Files that the graphs need, relative: their entries, and the code that this process has loaded for them."""
    real = place.resolve()
    loaded = {
        Path(module.__file__ or "").resolve() for module in list(sys.modules.values()) if hasattr(module, "__file__")
    }
    maps = Path("/proc/self/maps")
    if maps.exists():
        loaded |= {Path(line.split(maxsplit=5)[5]) for line in maps.read_text().splitlines() if line.count("/")}
    found = {path for path in {*loaded, *(path.resolve() for path in index)} if path.is_relative_to(real)}
    for path in inductor_cache.files(real):
        names = path.relative_to(real).parts
        entry = names[0] == "fxgraph" and names[-2] in keys
        probe = path.suffix == ".so" and not path.name.endswith(".main.so")  # which instructions the CPU has
        if entry or probe:
            found.add(path)
    return sorted(str(path.relative_to(real)) for path in found)


def _end_with_parent() -> None:
    """Nothing comes after the request: the read returns when the parent is gone."""
    os.read(0, 1)
    os.killpg(os.getpgrp(), signal.SIGKILL)


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever else is printed goes to the log
    line = b""
    while not line.endswith(b"\n"):
        line += os.read(0, 1)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    parent = os.getpid()

    def tell(message: dict[str, Any]) -> None:
        if os.getpid() == parent:
            print(json.dumps(message), file=answers, flush=True)

    collect(Request(**json.loads(line)), tell)


if __name__ == "__main__":
    main()
