"""Random faults in a run on a real Slurm cluster, which must end with exactly the losses of an undisturbed run.

    sudo python bench/chaos.py [--faults 20] [--seed 0] [--out bench/results/chaos-cpu.json]

Four nodes in network namespaces of this machine (tests/support/slurm_cluster.py), a run of three nodes with a rank
each, and a spare. Needs root and Debian's packages for Slurm. Faults come at random steps:

    rank        a rank is killed                        power       a node loses power; it boots after the recovery
    hang        a rank is stopped (SIGSTOP)             cable       a node loses its network for a while
    launcher    the launcher of a node is killed        notice      Slurm's notice before a time limit
    supervisor  the supervisor of the job is killed     disk        the file system of the run is full for a while

Prints a table: steps that were computed again, and seconds until the run was past the step of the fault.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tests.support.slurm_cluster import SlurmCluster, exit_on_sigterm, missing_for_cluster, temporary_cluster

NUM_NODES, USED_NODES, RANKS_PER_NODE = 4, 3, 1
RUN_NAME = "tiny-llama-smoke"
TRAIN = [
    *("tiny-llama", "--smoke", "train.global_batch=12", "train.micro_batch=4", "layout.zero=1"),
    *("checkpoint.every=10", "checkpoint.memory_every=2", "checkpoint.export_hf=false", "checkpoint.stop_grace_s=2"),
    *("log.every=1", "log.loggers=[]", "evaluate.every=0"),
]
SUBMIT = ["--nodes", str(USED_NODES), "--nproc", str(RANKS_PER_NODE), "--hang-timeout", "10", "--max-restarts", "9"]
RESTARTING = ("rank", "hang", "launcher", "supervisor", "power", "cable", "notice")
"""Faults after which the ranks start again."""
CABLE_S, DISK_S = 15.0, 5.0
"""How long these faults last."""
LIMIT_S = 300.0
"""Longest recovery."""
DISK_MIB = 256


class Run:
    """A submitted run."""

    def __init__(self, cluster: SlurmCluster, directory: Path, steps: int) -> None:
        self.cluster, self.path = cluster, directory / RUN_NAME
        self.trainyard("submit", *TRAIN, f"train.steps={steps}", f"log.directory={directory}", *SUBMIT)

    def trainyard(self, *arguments: str) -> None:
        command = [sys.executable, "-m", "trainyard", *arguments]
        subprocess.run(command, env=self.cluster.environment, stdout=subprocess.DEVNULL, timeout=120, check=True)

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
            if time.monotonic() > start + limit_s:
                raise SystemExit(f"waited {limit_s:.0f} s for {what}; job is {self.state()}\n{self.log()[-4000:]}")
            time.sleep(0.1)
        return time.monotonic() - start

    def nodes(self) -> list[str]:
        """The nodes of the job; the supervisor is on the first."""
        used = self.cluster.run("squeue", "-h", "-j", self.record["job_id"], "-o", "%N").strip()
        return self.cluster.run("scontrol", "show", "hostnames", used).split()

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


def inject(kind: str, run: Run, generator: random.Random) -> tuple[str, Callable[[], None]]:
    """Cause a fault. Returns where it struck, and a function that repairs what lasts."""
    cluster = run.cluster
    if kind in ("rank", "hang"):
        run.wait_for(run.ranks, "ranks")  # they may be starting again
        pid = generator.choice(run.ranks())
        os.kill(pid, signal.SIGKILL if kind == "rank" else signal.SIGSTOP)
        return f"process {pid}", lambda: None
    if kind in ("launcher", "supervisor"):
        words = ("train", "--logs") if kind == "launcher" else ("supervise",)
        run.wait_for(lambda: run.processes(*words), kind)
        pid = generator.choice(run.processes(*words))
        os.kill(pid, signal.SIGKILL)
        return f"process {pid}", lambda: None
    if kind == "notice":
        cluster.run("scancel", "--batch", "--signal=USR1", run.record["job_id"])
        return "the job", lambda: None
    if kind == "disk":
        filler = run.path.parent / "filler"
        with filler.open("wb", buffering=0) as file, suppress(OSError):  # until the disk is full
            while True:
                file.write(bytes(2**20))
        time.sleep(DISK_S)
        filler.unlink()
        return "the run directory", lambda: None
    node = generator.choice(run.nodes())
    if kind == "power":
        cluster.kill_node(node)
        return node, lambda: cluster.recover(cancel=False)
    cluster.cut_cable(node)
    time.sleep(CABLE_S)
    cluster.mend_cable(node)
    return node, lambda: cluster.recover(cancel=False)


def resumed_step(log: str) -> int:
    """Where the last attempt began."""
    marks = [line for line in log.splitlines() if line.startswith(("trainyard: attempt", "resuming from step"))]
    return int(marks[-1].split("step ")[1].split(":")[0]) if marks[-1].startswith("resuming") else 0


def strike(kind: str, run: Run, generator: random.Random) -> dict[str, Any]:
    """Cause one fault and wait until the run is past it."""
    step, attempts, start = run.step(), run.record["attempts"], time.monotonic()
    where, repair = inject(kind, run, generator)
    if kind in RESTARTING:
        run.wait_for(lambda: run.record["attempts"] > attempts, f"a new attempt after {kind}")
        run.wait_for(lambda: "\nstep " in run.log().rpartition("trainyard: attempt")[2], "its first step")
        lost = max(0, step - resumed_step(run.log()))
    else:
        lost = 0
    run.wait_for(lambda: run.step() > step, f"progress after {kind}")
    seconds = time.monotonic() - start
    repair()
    return {"fault": kind, "where": where, "step": step, "steps_lost": lost, "seconds": round(seconds, 1)}


@contextmanager
def small_disk() -> Iterator[Path]:
    """A file system that can be filled. Nodes that start later see it."""
    with tempfile.TemporaryDirectory(prefix="chaos-") as path:
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK_MIB}m", "chaos", path], check=True)
        try:
            yield Path(path)
        finally:
            subprocess.run(["umount", "--lazy", path], check=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=20)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", nargs="*", default=[*RESTARTING, "disk"])
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    if reason := missing_for_cluster():
        raise SystemExit(f"no Slurm cluster: {reason}")
    exit_on_sigterm()
    generator = random.Random(arguments.seed)
    kinds = [arguments.kinds[index % len(arguments.kinds)] for index in range(arguments.faults)]
    generator.shuffle(kinds)
    with small_disk() as runs, temporary_cluster(NUM_NODES) as cluster:
        undisturbed = Run(cluster, runs / "undisturbed", arguments.steps)
        seconds = undisturbed.wait_for(lambda: undisturbed.state() == "COMPLETED", "the undisturbed run", 1200)
        expected = undisturbed.losses()
        print(f"undisturbed: {len(expected)} steps in {seconds:.0f} s")
        run, rows = Run(cluster, runs / "disturbed", arguments.steps), []
        gap = arguments.steps // (arguments.faults + 2)
        for number, kind in enumerate(kinds, 1):
            target = min(number * gap + generator.randrange(gap // 2 + 1), arguments.steps - 1)
            run.wait_for(lambda target=target: run.step() >= target, f"step {target}")  # type: ignore[misc]
            rows.append(strike(kind, run, generator))
            print("{fault:<11} {where:<18} step {step:>4}  lost {steps_lost:>3}  {seconds:>6} s".format(**rows[-1]))
        run.wait_for(lambda: run.state() == "COMPLETED", "the end")
        losses = run.losses()
        time.sleep(2)
        leftover = len(cluster.processes())
        result = {
            "faults": rows,
            "steps": arguments.steps,
            "seed": arguments.seed,
            "equal_steps": sum(losses.get(step) == loss for step, loss in expected.items()),
            "largest_difference": max(abs(losses.get(step, 0.0) - loss) for step, loss in expected.items()),
            "attempts": run.record["attempts"],
            "leftover_processes": leftover,
            "mean_steps_lost": sum(row["steps_lost"] for row in rows) / len(rows),
            "mean_seconds": sum(row["seconds"] for row in rows) / len(rows),
        }
        print({key: value for key, value in result.items() if key != "faults"})
        if arguments.out:
            arguments.out.write_text(json.dumps(result, indent=1) + "\n")
        if losses != expected or leftover:
            raise SystemExit("the curve differs, or processes are left")


if __name__ == "__main__":
    main()
