"""Random faults in a run on a real Slurm cluster, which must end with exactly the losses of an undisturbed run.

    sudo python bench/chaos.py [FAULT ...] [--count 30] [--seed 0] [--out bench/results/chaos-cpu.json]

Three nodes in network namespaces of this machine (tests/support/slurm_cluster.py), a run of two nodes with a rank each,
and a spare. Needs root and Debian's packages for Slurm. Faults come at random steps, up to six at once:

    rank        a rank is killed                        power         a node loses power; it boots after the recovery
    segfault    a rank crashes                          cable         a node loses its network for a while
    hang        a rank is stopped (SIGSTOP)             notice        Slurm's notice before a time limit
    launcher    the launcher of a node is killed        early-notice  the same while ranks start
    supervisor  the supervisor of the job is killed     disk          the file system of the run is full for a while
    slurmstepd  Slurm's process of a step is killed     read-only     the directory of the run is read-only for a while
    munge       munged is down for a while              controller    slurmctld is down for a while
    submit      the run is submitted twice more

Prints steps that were computed again, and seconds until the run was past the step of the fault.
"""

import argparse
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from tests.support.slurm_cluster import (
    NODE_PROGRAMS,
    SlurmCluster,
    exit_on_sigterm,
    missing_for_cluster,
    temporary_cluster,
)

NUM_NODES, USED_NODES, RANKS_PER_NODE = 3, 2, 1
RUN_NAME = "tiny-llama-smoke"
TRAIN = [
    *("tiny-llama", "--smoke", "train.global_batch=8", "train.micro_batch=4", "layout.zero=1"),
    *("checkpoint.every=4", "checkpoint.memory_every=2", "checkpoint.export_hf=false", "checkpoint.stop_grace_s=2"),
    *("log.every=1", "log.loggers=[]", "evaluate.every=0", "train.callbacks=[slow_steps:SlowSteps]"),
]
SUBMIT = ["--nodes", str(USED_NODES), "--nproc", str(RANKS_PER_NODE), "--hang-timeout", "10", "--max-restarts", "30"]
SLOW_STEPS = """
import os, time
from trainyard import Callback

class SlowSteps(Callback):
    def on_step(self, trainer, step):
        if os.path.exists(os.path.join(trainer.config.log.directory, "slow")):
            time.sleep(0.25)
"""
"""A callback of the disturbed run, so that faults that last for seconds do not last for the rest of it."""
STEPS_BETWEEN, STEPS_PER_MOMENT = 4, 45
"""Steps from one moment of faults to the next, and of the whole run for each moment: some pass while faults last."""
MOST_AT_ONCE = 6
CABLE_S, OUTAGE_S = 15.0, (3.0, 15.0)
"""How long faults last that last."""
LIMIT_S = 300.0
"""Longest recovery."""
DISK_MIB = 256
REPAIR_S = 60.0
"""When faults of one moment have left too few nodes for the next of them, what lasts is repaired after this time."""
RESUMING = "resuming from step "
Repair = Callable[[], None]


class Run:
    """A submitted run."""

    def __init__(self, cluster: SlurmCluster, directory: Path, steps: int) -> None:
        self.cluster, self.path = cluster, directory / RUN_NAME
        self.repairs: list[Repair] = []
        """Of the faults of this moment so far."""
        directory.mkdir()
        self.arguments = [*TRAIN, f"train.steps={steps}", f"log.directory={directory}"]
        if code := self.start("submit", *self.arguments, *SUBMIT).wait(120):
            raise SystemExit(f"submit ended with {code}")

    def start(self, *arguments: str) -> "subprocess.Popen[bytes]":
        command = [sys.executable, "-m", "trainyard", *arguments]
        return subprocess.Popen(command, env=self.cluster.environment, stdout=subprocess.DEVNULL)

    def jobs(self) -> list[str]:
        """The jobs that wait or run."""
        return sorted(self.cluster.run("squeue", "-h", "-o", "%i").split())

    @property
    def record(self) -> dict[str, Any]:
        return dict(json.loads((self.path / "job.json").read_text()))

    def losses(self) -> dict[int, float]:
        """Loss by step; a line that is being written is left out."""
        try:
            lines = (self.path / "metrics.jsonl").read_text().splitlines()
        except OSError:
            return {}
        out = {}
        for line in lines:
            try:
                entry = json.loads(line)
            except ValueError:
                continue
            if "loss" in entry:
                out[entry["step"]] = entry["loss"]
        return out

    def step(self) -> int:
        return max(self.losses(), default=0)

    def log(self) -> str:
        path = self.path / "logs" / f"{self.record['job_id']}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def state(self) -> str:
        text = self.cluster.run("scontrol", "-o", "show", "job", self.record["job_id"])
        return text.partition("JobState=")[2].split()[0]

    def wait_for(self, condition: Callable[[], object], what: str, limit_s: float = LIMIT_S) -> float:
        """Wait, and return the seconds that it took."""
        start = time.monotonic()
        while not condition():
            if time.monotonic() > start + REPAIR_S:
                self.repair()
            if time.monotonic() > start + limit_s:
                raise SystemExit(f"waited {limit_s:.0f} s for {what}; job is {self.state()}\n{self.log()[-4000:]}")
            time.sleep(0.1)
        return time.monotonic() - start

    def wait_for_one(self, find: Callable[[], list[Any]], what: str, generator: random.Random) -> Any:
        """Wait until there are some, and return one of them."""
        found: list[Any] = []

        def look() -> list[Any]:
            found[:] = find()
            return found

        self.wait_for(look, what)
        return generator.choice(found)

    def repair(self) -> None:
        while self.repairs:
            self.repairs.pop()()

    def nodes(self) -> list[str]:
        """The nodes of the job that have power; the supervisor is on the first."""
        try:
            used = self.cluster.run("squeue", "-h", "-j", self.record["job_id"], "-o", "%N").strip()
        except AssertionError:  # slurmctld is starting
            return []
        names = self.cluster.run("scontrol", "show", "hostnames", used).split() if used else []
        return [name for name in names if name in self.cluster.inits]

    def processes(self, *words: str) -> list[int]:
        """Processes of the nodes whose command has all these words."""
        found = []
        for pid in self.cluster.processes():
            try:
                command = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
            except OSError:
                continue
            if all(word in command for word in words):
                found.append(pid)
        return found

    def ranks(self) -> list[int]:
        return [pid for pid in self.processes("train", "--continue") if "--logs" not in _command(pid)]


def _command(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    except OSError:
        return []


def kill_rank(run: Run, generator: random.Random, signum: int = signal.SIGKILL) -> tuple[str, Repair]:
    return kill(run.wait_for_one(run.ranks, "ranks", generator), signum)  # they may be starting again


def hang_rank(run: Run, generator: random.Random) -> tuple[str, Repair]:
    """Stop a rank that trains: a start-up has no time limit, and the first steps have a longer one."""
    step = run.step()
    run.wait_for(lambda: run.step() > step + 4, "steps after the faults before this one")
    return kill_rank(run, generator, signal.SIGSTOP)


def kill(pid: int, signum: int = signal.SIGKILL) -> tuple[str, Repair]:
    with suppress(ProcessLookupError):  # another fault of the same moment was faster
        os.kill(pid, signum)
    return f"process {pid}", nothing


def nothing() -> None:
    """Nothing to repair."""


def kill_one_of(words: tuple[str, ...], run: Run, generator: random.Random) -> tuple[str, Repair]:
    return kill(run.wait_for_one(lambda: run.processes(*words), words[-1], generator))


def kill_slurmstepd(run: Run, generator: random.Random) -> tuple[str, Repair]:
    """Slurm's own process of the step on one node: its launcher and rank end, and srun may never hear of it."""

    def find() -> list[int]:
        pattern = re.compile(rf"slurmstepd: \[{run.record['job_id']}\.(\d+)\]")
        processes = {pid: pattern.match(" ".join(_command(pid))) for pid in run.cluster.processes(NODE_PROGRAMS)}
        steps = {pid: int(match[1]) for pid, match in processes.items() if match}
        return [pid for pid, step in steps.items() if step == max(steps.values())]  # older ones may not have ended yet

    return kill(run.wait_for_one(find, "slurmstepd", generator))


def notice(run: Run, generator: random.Random) -> tuple[str, Repair]:
    def send() -> bool:
        with suppress(AssertionError):  # the job waits for nodes
            run.cluster.run("scancel", "--batch", "--signal=USR1", run.record["job_id"])
            return True
        return False

    run.wait_for(lambda: run.nodes() and send(), "nodes")
    return "the job", nothing


def early_notice(run: Run, generator: random.Random) -> tuple[str, Repair]:
    """A notice while the ranks of the next attempt start."""
    attempts = run.record["attempts"]
    kill_rank(run, generator)
    run.wait_for(lambda: run.record["attempts"] > attempts, "the next attempt")
    time.sleep(generator.uniform(0, 4))
    return notice(run, generator)


def fill_disk(run: Run, generator: random.Random) -> tuple[str, Repair]:
    filler, seconds = run.path.parent / "filler", generator.uniform(*OUTAGE_S)
    with filler.open("wb", buffering=0) as file, suppress(OSError):  # until the disk is full
        while True:
            file.write(bytes(2**20))
    time.sleep(seconds)
    filler.unlink()
    return f"for {seconds:.0f} s", nothing


def make_read_only(run: Run, generator: random.Random) -> tuple[str, Repair]:
    """On all nodes, no file of the run can be created or opened for writing for a while."""
    seconds, runs, nodes = generator.uniform(*OUTAGE_S), str(run.path.parent), list(run.cluster.inits)
    for node in nodes:
        run.cluster.in_node(node, ["mount", "--bind", runs, runs])
        run.cluster.in_node(node, ["mount", "-o", "remount,bind,ro", runs])
    time.sleep(seconds)
    for node in nodes:
        if node in run.cluster.inits:
            run.cluster.in_node(node, ["umount", "--lazy", runs])
    return f"for {seconds:.0f} s", nothing


def lose_power(run: Run, generator: random.Random) -> tuple[str, Repair]:
    node = run.wait_for_one(run.nodes, "nodes", generator)  # the job may be waiting after another fault
    run.cluster.kill_node(node)
    return node, lambda: run.cluster.recover(cancel=False)


def pull_cable(run: Run, generator: random.Random) -> tuple[str, Repair]:
    node = run.wait_for_one(run.nodes, "nodes", generator)
    run.cluster.cut_cable(node)
    time.sleep(CABLE_S)
    run.cluster.mend_cable(node)
    return node, lambda: run.cluster.recover(cancel=False)


def restart_daemon(name: str, run: Run, generator: random.Random) -> tuple[str, Repair]:
    seconds = generator.uniform(*OUTAGE_S)
    run.cluster.restart_daemon(name, seconds)
    return f"for {seconds:.0f} s", lambda: run.cluster.recover(cancel=False)


def submit_twice(run: Run, generator: random.Random) -> tuple[str, Repair]:
    """Two users submit the run that is running, at the same moment. Both are refused."""
    before = run.jobs()
    command = ("submit", *run.arguments, "checkpoint.resume=auto", *SUBMIT)
    processes = [run.start(*command) for _ in range(2)]
    codes = [process.wait(120) for process in processes]
    if codes != [2, 2] or run.jobs() != before:
        raise SystemExit(f"a second job of one run: exit codes {codes}, jobs {before} and {run.jobs()}")
    return "the run", nothing


class Fault(NamedTuple):
    inject: Callable[[Run, random.Random], tuple[str, Repair]]
    """Cause it. Returns where it struck, and a function that repairs what lasts."""
    restarts: bool = True
    """The ranks start again after it, always."""


FAULTS = {
    "rank": Fault(kill_rank),
    "segfault": Fault(partial(kill_rank, signum=signal.SIGSEGV)),
    "hang": Fault(hang_rank),
    "launcher": Fault(partial(kill_one_of, ("train", "--logs"))),
    "supervisor": Fault(partial(kill_one_of, ("supervise",))),
    "slurmstepd": Fault(kill_slurmstepd),
    "power": Fault(lose_power),
    "cable": Fault(pull_cable),
    "notice": Fault(notice),
    "early-notice": Fault(early_notice),
    "disk": Fault(fill_disk, restarts=False),
    "read-only": Fault(make_read_only, restarts=False),
    "munge": Fault(partial(restart_daemon, "munged"), restarts=False),
    "controller": Fault(partial(restart_daemon, "slurmctld"), restarts=False),
    "submit": Fault(submit_twice, restarts=False),
}


def resumed_step(log: str) -> int:
    """Where the last attempt that made a step began."""
    resumed = [line for line in log.splitlines() if line.startswith(RESUMING)]
    return int(resumed[-1].removeprefix(RESUMING).split(":")[0]) if resumed else 0


def strike(names: list[str], run: Run, generator: random.Random) -> dict[str, Any]:
    """Cause faults, one right after the other, and wait until the run is past them."""
    step, attempts, start = run.step(), run.record["attempts"], time.monotonic()
    resumed = run.log().count(RESUMING)
    places = []
    for name in names:
        place, repair = FAULTS[name].inject(run, generator)
        places.append(place)
        run.repairs.append(repair)
    if any(FAULTS[name].restarts for name in names):
        run.wait_for(lambda: run.record["attempts"] > attempts, f"a new attempt after {names}")
    run.repair()  # a job that waits for a node gets it
    if any(FAULTS[name].restarts for name in names):  # steps of the attempt before are no progress
        run.wait_for(lambda: run.log().count(RESUMING) > resumed, f"resumed ranks after {names}")
    run.wait_for(lambda: run.step() > step, f"progress after {names}")
    seconds = time.monotonic() - start
    lost = max(0, step - resumed_step(run.log())) if run.record["attempts"] > attempts else 0
    return {"faults": names, "where": places, "step": step, "steps_lost": lost, "seconds": round(seconds, 1)}


@contextmanager
def small_disk() -> Iterator[Path]:
    """A file system that can be filled. Nodes that start later see it."""
    with tempfile.TemporaryDirectory(prefix="chaos-") as path:
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK_MIB}m", "chaos", path], check=True)
        try:
            yield Path(path)
        finally:
            subprocess.run(["umount", "--lazy", path], check=False)


def moments(names: list[str], count: int, generator: random.Random) -> list[list[str]]:
    """`count` faults in random order, each name equally often; a moment has up to MOST_AT_ONCE of them."""
    order = [names[index % len(names)] for index in range(count)]
    generator.shuffle(order)
    grouped = []
    while order:
        size = min(len(order), generator.randint(1, MOST_AT_ONCE))
        grouped.append([order.pop() for _ in range(size)])
    return grouped


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="FAULT", default=[*FAULTS], help=", ".join(FAULTS))
    parser.add_argument("--count", type=int, default=30, help="number of faults")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    if unknown := {*arguments.names} - {*FAULTS}:
        parser.error(f"{', '.join(sorted(unknown))}: one of {', '.join(FAULTS)}")
    if reason := missing_for_cluster():
        raise SystemExit(f"no Slurm cluster: {reason}")
    exit_on_sigterm()
    generator = random.Random(arguments.seed)
    plan = moments(arguments.names, arguments.count, generator)
    steps = STEPS_PER_MOMENT * (len(plan) + 1)
    with small_disk() as runs, temporary_cluster(NUM_NODES) as cluster:
        (runs / "slow_steps.py").write_text(SLOW_STEPS)
        cluster.environment["PYTHONPATH"] = f"{runs}:{os.environ.get('PYTHONPATH', '')}"
        run, rows = Run(cluster, runs / "disturbed", steps), []
        slow = run.path.parent / "slow"
        slow.touch()
        for names in plan:
            target = run.step() + STEPS_BETWEEN + generator.randrange(STEPS_BETWEEN)
            if target >= steps:
                raise SystemExit(f"the run ends before all faults; more steps are needed than {steps}")
            run.wait_for(lambda target=target: run.step() >= target, f"step {target}")  # type: ignore[misc]
            rows.append(row := strike(names, run, generator))
            where = ", ".join(f"{name} ({place})" for name, place in zip(names, row["where"], strict=True))
            print(f"{where:<50} step {row['step']:>4}  lost {row['steps_lost']:>3}  {row['seconds']:>6} s", flush=True)
        slow.unlink()
        run.wait_for(lambda: run.state() == "COMPLETED", "the end", 1800)
        losses = run.losses()
        time.sleep(2)
        leftover = len(cluster.processes())
        undisturbed = Run(cluster, runs / "undisturbed", steps)
        seconds = undisturbed.wait_for(lambda: undisturbed.state() == "COMPLETED", "the undisturbed run", 1800)
        expected = undisturbed.losses()
        print(f"undisturbed: {len(expected)} steps in {seconds:.0f} s", flush=True)
        result = {
            "faults": arguments.count,
            "by_name": {name: sum(names.count(name) for names in plan) for name in arguments.names},
            "steps": steps,
            "seed": arguments.seed,
            "equal_steps": sum(losses.get(step) == loss for step, loss in expected.items()),
            "largest_difference": max(abs(losses.get(step, 0.0) - loss) for step, loss in expected.items()),
            "attempts": run.record["attempts"],
            "leftover_processes": leftover,
            "mean_steps_lost": sum(row["steps_lost"] for row in rows) / len(rows),
            "mean_seconds": sum(row["seconds"] for row in rows) / len(rows),
            "moments": rows,
        }
        print({key: value for key, value in result.items() if key != "moments"})
        if arguments.out:
            arguments.out.write_text(json.dumps(result, indent=1) + "\n")
        if losses != expected or leftover:
            raise SystemExit("the curve differs, or processes are left")


if __name__ == "__main__":
    main()
