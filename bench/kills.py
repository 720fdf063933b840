"""Kills at random instants of everything that writes; nothing complete may be lost, and the next run must finish.

    python bench/kills.py [--kills 1000] [--seed 0] [--only NAME,...] [--out bench/results/kills-cpu.json]

Each command of bench/kill_writers.py runs in a fork of this process, which has imported everything, and is killed with
SIGKILL, with all of its processes: half of the time at a random moment between its start and its usual end, half of the
time right before one of its calls that change the file system (open for writing, rename, remove, mkdir, ...), so that
the short moments between two renames are hit too. After each kill:

- every complete output is, bit for bit, the one from before the command or the one of an undisturbed run, and the
  command that reads it accepts it; nothing else lies under a final name;
- the state is killed again, or the same command runs to its end and leaves what an undisturbed run leaves.

`--plant` writes files and directories in place instead of atomically, to see that losses are found.
"""

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # a process with threads cannot be forked safely
os.environ.setdefault("COLUMNS", "200")

from bench.kill_servers import Servers, State, local_servers
from bench.kill_writers import PREPARE, Writer, import_everything, make_writers
from tests.support.forkserver import _command
from tests.support.kill_points import count_changes

TOTALS = ("kills", "while_writing", "finished", "complete_outputs", "reruns", "leftovers")
CHAIN = 0.6
"""Probability that another kill follows before the command may finish."""
LIMIT_S = 60.0


@dataclass
class Counts:
    """What the kills of one writer hit."""

    kills: int = 0
    while_writing: int = 0
    """Kills after which the files were neither those from before nor those of a finished command."""
    finished: int = 0
    """Commands that ended before their kill."""
    complete_outputs: int = 0
    """Outputs found complete after a kill, each compared bit for bit."""
    reruns: int = 0
    leftovers: int = 0
    """Temporary files, and files of runs that started again, that are still there after the command has finished."""
    lost: list[str] = field(default_factory=list)


def plant_writes_in_place() -> None:
    """Replace the atomic writers, in all modules that use them, by ones that write under the final name."""
    from trainyard.core import atomic_files

    @contextlib.contextmanager
    def file_in_place(path: Path) -> Iterator[Any]:
        with path.open("wb") as file:
            yield file

    @contextlib.contextmanager
    def directory_in_place(path: Path) -> Iterator[Path]:
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir(parents=True)
        yield path

    replaced = {atomic_files.atomic_file: file_in_place, atomic_files.atomic_directory: directory_in_place}
    for module in [module for name, module in sys.modules.items() if name.startswith("trainyard")]:
        for name in ("atomic_file", "atomic_directory"):
            if (function := vars(module).get(name)) in replaced:
                setattr(module, name, replaced[function])


class Forks:
    """Starts commands in forks of this process."""

    def __init__(self, directory: Path, plant: bool) -> None:
        self.directory, self.plant = directory, plant
        self.changes = directory / "changes"
        self.output = directory / "output"

    def start(self, arguments: list[str], cwd: Path, kill_at: int | None = None, reads: bool = False) -> int:
        self.output.write_bytes(b"")
        pid = os.fork()
        if pid:
            return pid
        with contextlib.suppress(BaseException):
            os.setsid()  # before the hook: killpg(0) must not reach this harness
            os.setsid = lambda: None
            if self.plant:
                plant_writes_in_place()
            count_changes(kill_at, self.changes, reads)
            output = str(self.output)
            _command({"args": arguments, "cwd": str(cwd), "env": dict(os.environ), "stdout": output, "stderr": output})
        os._exit(99)

    def wait(self, pid: int, limit_s: float) -> int | None:
        """The exit code, negative for a signal; None if the command is still running."""
        deadline, pause = time.monotonic() + limit_s, 0.0005
        while True:
            found, status = os.waitpid(pid, os.WNOHANG)
            if found:
                return os.waitstatus_to_exitcode(status)
            if time.monotonic() >= deadline:
                return None
            time.sleep(min(pause, max(deadline - time.monotonic(), 0.0)))
            pause = min(pause * 1.5, 0.01)

    def run(self, arguments: list[str], cwd: Path, reads: bool = False) -> tuple[int | None, str]:
        pid = self.start(arguments, cwd, reads=reads)
        code = self.wait(pid, LIMIT_S)
        if code is None:
            self.kill(pid)
        return code, self.output.read_text(errors="replace")

    def kill(self, pid: int) -> int:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


class Killer:
    """Kills one writer, and examines what is left."""

    def __init__(self, writer: Writer, forks: Forks, work: Path, generator: random.Random) -> None:
        self.writer, self.forks, self.work, self.random = writer, forks, work, generator
        self.counts = Counts()
        self.number = 0
        self.chain: list[str] = []
        self.accepted: set[tuple[str, frozenset[tuple[str, str]]]] = set()
        """Outputs that the reader has accepted."""

    def learn(self) -> None:
        """Run the command undisturbed, twice, to know its output, its duration and its changes of the file system."""
        states: list[State] = []
        for _ in range(2):
            self.restore()
            start = time.monotonic()
            code, text = self.forks.run(self.arguments, self.work, bool(self.writer.remote))
            self.duration = time.monotonic() - start
            if code:
                raise SystemExit(f"{self.writer.name}: {' '.join(self.arguments)}: exit {code}\n{text[-2000:]}")
            states.append(self.writer.state(self.work, self.number))
        self.changes = int(self.forks.changes.read_text())
        self.before = {} if self.writer.remote else self.writer.state(self.writer.start, 0)
        self.after = states[0]
        first, second = (self.writer.outputs(state) for state in states)
        if not first:
            raise SystemExit(f"{self.writer.name}: no output in {', '.join(states[0])}")
        if first != second:
            names = [name for name in {**first, **second} if first.get(name) != second.get(name)]
            raise SystemExit(f"{self.writer.name}: undisturbed runs differ in {', '.join(names)}")

    @property
    def arguments(self) -> list[str]:
        return [argument.format(n=self.number) for argument in self.writer.arguments]

    def restore(self) -> None:
        """The state from before the command."""
        shutil.rmtree(self.work, ignore_errors=True)
        shutil.copytree(self.writer.start, self.work, symlinks=True)
        self.number += 1  # names a new place on a server
        self.chain = []

    def strike(self) -> None:
        """Kill the command once, and examine the files."""
        at_start = self.writer.state(self.work, self.number)
        if self.random.random() < 0.5:
            instant, number = LIMIT_S, self.random.randint(1, self.changes)
            self.chain.append(f"change {number} of {self.changes}")
        else:
            instant, number = self.random.uniform(0, self.duration), None
            self.chain.append(f"{instant:.3f} s of {self.duration:.3f}")
        pid = self.forks.start(self.arguments, self.work, number, bool(self.writer.remote))
        code = self.forks.wait(pid, instant)
        if code is None:
            code = self.forks.kill(pid)
        self.counts.kills += 1
        state = self.writer.state(self.work, self.number)
        if code != -signal.SIGKILL:
            self.counts.finished += 1
            if code and not self.is_done(state):
                self.lose(f"the command ended with {code}: {self.forks.output.read_text(errors='replace')[-300:]}")
        elif state not in (at_start, self.after):
            self.counts.while_writing += 1
        self.examine(state)

    def examine(self, state: State) -> None:
        outputs, before, after = (self.writer.outputs(s) for s in (state, self.before, self.after))
        for name in {**before, **outputs}:
            if not self.writer.is_allowed(name, outputs.get(name), before.get(name), after):
                self.lose(f"{name}: {'missing' if name not in outputs else 'neither old nor new'}")
        for name in self.writer.misplaced(state):
            self.lose(f"{name}: under a final name, but not an output")
        self.counts.complete_outputs += len(outputs)
        for output in outputs.items() if self.writer.reader else ():
            if self.writer.is_exact and output in self.accepted:
                continue
            command = self.writer.read_command(output[0], self.work, self.number)
            code, text = self.forks.run(command, self.work)
            if code:
                self.lose(f"{' '.join(command)}: exit {code}: {text[-300:]}")
            else:
                self.accepted.add(output)

    def is_done(self, state: State) -> bool:
        """The output is complete, and the command said so: it was killed after its last change."""
        text = self.forks.output.read_text(errors="replace")
        return "exists" in text and self.writer.outputs(state) == self.writer.outputs(self.after)

    def finish(self) -> None:
        """Run the command to its end: it must leave what an undisturbed run leaves."""
        code, text = self.forks.run(self.arguments, self.work)
        state = self.writer.state(self.work, self.number)
        self.counts.reruns += 1
        if code and not self.is_done(state):
            self.lose(f"the next run: exit {code}: {text[-300:]}")
        elif self.writer.outputs(state) != self.writer.outputs(self.after):
            self.lose("the next run gives another result")
        self.counts.leftovers += len(state.keys() - self.after.keys())

    def lose(self, what: str) -> None:
        self.counts.lost.append(f"{self.writer.name}, killed at {', '.join(self.chain)}: {what}")
        print(f"LOST: {self.counts.lost[-1]}", flush=True)

    def kill_times(self, count: int) -> Counts:
        while self.counts.kills < count:
            self.restore()
            self.strike()
            while self.counts.kills < count and self.random.random() < CHAIN:
                self.strike()
            self.finish()
        return self.counts


def run_kills(kills: int, seed: int, only: list[str], plant: bool = False) -> dict[str, Any]:
    """Kill all writers in turn, or the named ones, `kills` times in all."""
    directory = Path(tempfile.mkdtemp(prefix="kills-"))  # a TemporaryDirectory would be removed when a fork exits
    forks = Forks(directory, plant=False)

    def select(servers: Servers) -> list[Writer]:
        return [w for w in make_writers(directory, servers, forks.run) if not only or w.name in only]

    try:
        nothing = Servers("", "", "")
        if all(writer.modules == PREPARE for writer in select(nothing)):
            return _kill_all(select(nothing), forks, kills, seed, plant)
        with local_servers() as servers:
            return _kill_all(select(servers), forks, kills, seed, plant)
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _kill_all(writers: list[Writer], forks: Forks, kills: int, seed: int, plant: bool) -> dict[str, Any]:
    import_everything({package for writer in writers for package in writer.modules})
    results, start = {}, time.monotonic()
    weights = [0, *accumulate(writer.weight for writer in writers)]
    for index, writer in enumerate(writers):
        killer = Killer(writer, forks, forks.directory / "work", random.Random(f"{seed} {writer.name}"))
        forks.plant = False
        killer.learn()
        forks.plant = plant
        share = kills * weights[index + 1] // weights[-1] - kills * weights[index] // weights[-1]
        counts = results[writer.name] = killer.kill_times(share)
        print(
            f"{writer.name:<28}{counts.kills:>5} kills{counts.while_writing:>5} while writing"
            f"{counts.complete_outputs:>6} outputs{counts.reruns:>5} reruns{counts.leftovers:>5} leftovers"
            f"{len(counts.lost):>4} lost   {killer.duration:.2f} s, {killer.changes} changes",
            flush=True,
        )
    return summarize(seed, time.monotonic() - start, {name: asdict(counts) for name, counts in results.items()})


def summarize(seed: int, seconds: float, writers: dict[str, dict[str, Any]]) -> dict[str, Any]:
    totals = {key: sum(counts[key] for counts in writers.values()) for key in TOTALS}
    lost = sum(len(counts["lost"]) for counts in writers.values())
    return {"seed": seed, "kinds": len(writers), **totals, "lost": lost, "seconds": round(seconds), "writers": writers}


def run_in_processes(kills: int, seed: int, only: list[str], count: int) -> dict[str, Any]:
    """Share the writers among processes."""
    nothing: Any = None
    writers = [w for w in make_writers(Path(), Servers("", "", ""), nothing) if not only or w.name in only]
    weights, start, processes = [0, *accumulate(w.weight for w in writers)], time.monotonic(), []
    with tempfile.TemporaryDirectory() as directory:
        for part in range(count):
            chosen = range(part, len(writers), count)
            share = sum(kills * weights[i + 1] // weights[-1] - kills * weights[i] // weights[-1] for i in chosen)
            options = ["--kills", str(share), "--seed", str(seed), "--only", ",".join(writers[i].name for i in chosen)]
            command = [sys.executable, "-m", "bench.kills", *options, "--out", f"{directory}/{part}"]
            processes.append(subprocess.Popen(command))
        if any(process.wait() not in (0, 1) for process in processes):
            raise SystemExit("a process failed")
        results = [json.loads(Path(directory, str(part)).read_text()) for part in range(count)]
    found = {name: counts for result in results for name, counts in result["writers"].items()}
    return summarize(seed, time.monotonic() - start, {w.name: found[w.name] for w in writers})


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # remove the files
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="names of writers, separated by commas")
    parser.add_argument("--processes", type=int, default=1, help="number of processes that share the writers")
    parser.add_argument("--plant", action="store_true", help="write in place, to see that losses are found")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    only = [name for name in arguments.only.split(",") if name]
    if arguments.processes > 1:
        result = run_in_processes(arguments.kills, arguments.seed, only, arguments.processes)
    else:
        result = run_kills(arguments.kills, arguments.seed, only, arguments.plant)
    summary = {key: value for key, value in result.items() if key != "writers"}
    print(", ".join(f"{key} {value}" for key, value in summary.items()))
    if arguments.out:
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    raise SystemExit(1 if result["lost"] else 0)


if __name__ == "__main__":
    main()
