"""Runs as jobs of a real Slurm cluster. Each ends with the losses of an undisturbed run of one rank."""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from tests.support.compiler import install_unoptimized_compiler
from tests.support.forkserver import ForkServer
from tests.support.slurm_cluster import SlurmCluster

STEPS = 60
TRAIN = ["tiny-llama", "--smoke", "checkpoint.export_hf=false", "log.loggers=[]", "evaluate.every=0"]
TRAIN += [f"train.steps={STEPS}", "train.global_batch=8", "train.micro_batch=1", "checkpoint.every=3", "log.every=1"]
TIMEOUT_S = 600


def curve(run: Path) -> dict[int, float]:
    """Loss by step; a step must not be recorded twice."""
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    losses = [(record["step"], record["loss"]) for record in records if "loss" in record]
    assert len(dict(losses)) == len(losses)
    return dict(losses)


class SubmittedJob:
    """A run that was submitted to the cluster."""

    def __init__(self, cli: ForkServer, slurm: SlurmCluster, directory: Path, *options: str) -> None:
        self.cli, self.slurm, self.run = cli, slurm, directory / "tiny-llama-smoke"
        self.output = self.command("submit", *TRAIN, f"log.directory={directory}", *options)

    def command(self, *arguments: str) -> str:
        done = self.cli.run(arguments, env=self.slurm.environment)
        assert done.returncode == 0, done.stderr
        return done.stdout

    @property
    def job_id(self) -> str:
        return str(json.loads((self.run / "job.json").read_text())["job_id"])

    def state(self) -> str:
        text = self.slurm.run("scontrol", "-o", "show", "job", self.job_id)
        return text.partition("JobState=")[2].split()[0]

    def log(self) -> str:
        path = self.run / "logs" / f"{self.job_id}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def wait_for(self, condition: Callable[[], object], what: str, poll_s: float = 0.1) -> None:
        deadline = time.monotonic() + TIMEOUT_S
        while not condition():
            assert time.monotonic() < deadline, f"waited {TIMEOUT_S} s for {what}; {self.state()}\n{self.log()[-3000:]}"
            time.sleep(poll_s)

    def wait_for_step(self, step: int) -> None:
        metrics = self.run / "metrics.jsonl"
        self.wait_for(lambda: metrics.exists() and max(curve(self.run), default=0) >= step, f"step {step}")

    def nodes(self) -> list[str]:
        """The nodes of the job. Asked before a step that a fault follows, or the run could end before the fault."""
        self.wait_for_state("RUNNING")
        used = self.slurm.run("squeue", "-h", "-j", self.job_id, "-o", "%N").strip()
        return self.slurm.run("scontrol", "show", "hostnames", used).split()

    def wait_for_state(self, state: str) -> None:
        self.wait_for(lambda: self.state() == state, state, poll_s=0.5)  # each poll starts a process


@pytest.fixture(scope="module")
def expected(cli: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """The losses of one rank that nothing disturbs, with one micro batch per step, which is the fastest."""
    directory = tmp_path_factory.mktemp("one")
    done = cli.run(["train", *TRAIN, f"log.directory={directory}", "train.micro_batch=8", "checkpoint.every=1000"])
    assert done.returncode == 0, done.stderr
    return curve(directory / "tiny-llama-smoke")


def assert_same_curve(job: SubmittedJob, expected: dict[int, float]) -> None:
    assert curve(job.run) == pytest.approx(expected, rel=1e-5), job.log()


@pytest.mark.nightly
def test_job_trains_on_all_nodes(
    cli: ForkServer, slurm: SlurmCluster, tmp_path: Path, expected: dict[int, float]
) -> None:
    job = SubmittedJob(cli, slurm, tmp_path, "--nodes", "2", "--nproc", "2", "layout.tp=2")
    job.wait_for_state("COMPLETED")
    assert_same_curve(job, expected)
    assert "4 ranks: tensor 2 x pipeline 1 x context 1 x data 2" in job.log()
    assert "restart 1 of" not in job.log()


def test_killed_rank_restarts_from_the_latest_checkpoint(
    cli: ForkServer, slurm: SlurmCluster, tmp_path: Path, expected: dict[int, float]
) -> None:
    job = SubmittedJob(cli, slurm, tmp_path, "--nodes", "2", "--nproc", "1", "train.micro_batch=4")
    job.wait_for_step(1)
    ranks = [pid for pid in slurm.processes() if environment_of(pid).get("RANK") == "1"]
    job.wait_for_step(4)
    os.kill(ranks[0], signal.SIGKILL)
    job.wait_for_state("COMPLETED")
    assert_same_curve(job, expected)
    assert "rank 1 was killed by signal 9 (SIGKILL)" in job.log()
    assert "restart 1 of 3" in job.log()
    assert not slurm.processes()
    for attempt in (1, 2):
        assert len({path.name for path in (job.run / "logs").glob(f"*-{attempt}/*")}) == 2  # both nodes
    listed = job.command("jobs", str(tmp_path))
    assert f"{STEPS}/{STEPS}" in listed
    assert "COMPLETED" in listed
    assert job.command("logs", str(job.run)) == job.log()


@pytest.mark.nightly
def test_killed_supervisor_starts_again(
    cli: ForkServer, slurm: SlurmCluster, tmp_path: Path, expected: dict[int, float]
) -> None:
    job = SubmittedJob(cli, slurm, tmp_path, "--nodes", "2", "--nproc", "1")
    job.wait_for_step(1)
    (supervisor,) = (pid for pid in slurm.processes() if b"\0supervise\0" in Path(f"/proc/{pid}/cmdline").read_bytes())
    job.wait_for_step(4)
    os.kill(supervisor, signal.SIGKILL)
    job.wait_for_state("COMPLETED")
    assert_same_curve(job, expected)
    assert "the job or its supervisor was ended on n[1-2] and started again; restart 1 of 3" in job.log()
    assert not slurm.processes()


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("number", "line"),
    [
        (signal.SIGSEGV, "rank 1 was killed by signal 11 (SIGSEGV); restart 1 of 3"),
        (signal.SIGSTOP, "rank 1 does not answer: it is stopped, or blocked in the kernel; restart 1 of 3"),
    ],
    ids=["crash", "hang"],
)
def test_one_rank_on_each_node_is_blamed_rightly(
    cli: ForkServer, slurm: SlurmCluster, tmp_path: Path, expected: dict[int, float], number: int, line: str
) -> None:
    job = SubmittedJob(cli, slurm, tmp_path, "--nodes", "2", "--nproc", "1", "--hang-timeout", "8")
    job.wait_for_step(1)
    ranks = [pid for pid in slurm.processes() if environment_of(pid).get("RANK") == "1"]
    job.wait_for_step(5)
    os.kill(ranks[0], number)
    job.wait_for_state("COMPLETED")
    assert_same_curve(job, expected)
    assert line in job.log()
    assert not slurm.processes()


@pytest.mark.nightly
def test_step_without_slurmstepd_is_ended(
    cli: ForkServer, slurm: SlurmCluster, tmp_path: Path, expected: dict[int, float]
) -> None:
    """The output of rank 0 breaks, and srun waits for ever for the end of its task."""
    job = SubmittedJob(cli, slurm, tmp_path, "--nodes", "2", "--nproc", "1")
    job.wait_for_step(4)
    namespace = os.readlink(f"/proc/{slurm.inits[job.nodes()[0]]}/ns/pid")
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            name = (path / "cmdline").read_text().split("\0")[0]
            step = name.startswith("slurmstepd") and ".batch" not in name
            if step and os.readlink(path / "ns/pid") == namespace:
                os.kill(int(path.name), signal.SIGKILL)
    job.wait_for_state("COMPLETED")
    assert_same_curve(job, expected)
    assert "srun did not end, and was ended after 60 s; restart 1 of 3" in job.log()


def environment_of(pid: int) -> dict[str, str]:
    try:
        words = Path(f"/proc/{pid}/environ").read_text().split("\0")
    except OSError:
        return {}
    return dict(word.split("=", 1) for word in words if "=" in word)  # type: ignore[misc]


@pytest.mark.nightly
def test_notice_before_the_time_limit_saves_and_requeues(
    cli: ForkServer, slurm: SlurmCluster, tmp_path: Path, expected: dict[int, float]
) -> None:
    job = SubmittedJob(cli, slurm, tmp_path, "--nodes", "2", "--nproc", "1", "checkpoint.every=1000")
    job.wait_for_step(4)
    slurm.run("scancel", "--batch", "--signal=USR1", job.job_id)
    job.wait_for_state("COMPLETED")
    assert_same_curve(job, expected)
    assert "asked to stop; the latest checkpoint is of step" in job.log()
    assert "attempt 2" in job.log()


@pytest.mark.nightly
def test_preempted_job_continues_after_the_other_one(
    cli: ForkServer, slurm: SlurmCluster, tmp_path: Path, expected: dict[int, float]
) -> None:
    job = SubmittedJob(cli, slurm, tmp_path, "--nodes", "4", "--nproc", "1", "checkpoint.every=1000")
    job.wait_for_step(4)
    slurm.run("srun", "--partition", "high", "--nodes", "4", "--exclusive", "sleep", "2", timeout=TIMEOUT_S)
    job.wait_for_state("COMPLETED")
    assert_same_curve(job, expected)
    assert "asked to stop; the latest checkpoint is of step" in job.log()


@pytest.mark.nightly
@pytest.mark.parametrize("index", [0, 1], ids=["node of the supervisor", "other node"])
@pytest.mark.parametrize("fault", ["power", "cable"])
def test_lost_node_is_replaced(
    cli: ForkServer, slurm: SlurmCluster, tmp_path: Path, expected: dict[int, float], fault: str, index: int
) -> None:
    job = SubmittedJob(cli, slurm, tmp_path, "--nodes", "2", "--nproc", "2", "--hang-timeout", "10")
    node = job.nodes()[index]
    job.wait_for_step(4)
    slurm.kill_node(node) if fault == "power" else slurm.cut_cable(node)
    job.wait_for_state("COMPLETED")
    assert_same_curve(job, expected)
    assert "restart 1 of 3" in job.log()
    assert node in job.log()


@pytest.mark.nightly
def test_precompiled_job_on_four_nodes(
    cli: ForkServer, slurm: SlurmCluster, tmp_path: Path, expected: dict[int, float]
) -> None:
    install_unoptimized_compiler(tmp_path)
    slurm.environment["PATH"] = f"{tmp_path}:{slurm.environment['PATH']}"
    slurm.environment["TRAINYARD_CACHE"] = str(tmp_path / "cache")
    options = ["--nodes", "4", "--nproc", "2", "layout.tp=2", "compile.enabled=true"]
    job = SubmittedJob(cli, slurm, tmp_path, *options)
    assert "precompile" in job.output
    job.wait_for_state("COMPLETED")
    assert_same_curve(job, expected)
    assert "Compiled 0 graphs" in job.log()


@pytest.mark.nightly
def test_elastic_job_shrinks_and_grows(cli: ForkServer, slurm: SlurmCluster, tmp_path: Path) -> None:
    batch = ["train.global_batch=12", "train.steps=60"]
    done = cli.run(["train", *TRAIN, *batch, f"log.directory={tmp_path / 'one'}"])
    assert done.returncode == 0, done.stderr
    job = SubmittedJob(cli, slurm, tmp_path, "--nodes", "2-4", "--nproc", "1", "layout.tp=2", *batch)
    assert "4 nodes: tensor 2" in job.output
    assert "3 nodes: tensor 1" in job.output
    node = job.nodes()[-1]
    job.wait_for_step(4)
    slurm.kill_node(node)
    job.wait_for(lambda: "attempt 2" in job.log(), "the second attempt")
    job.wait_for_step(12)
    slurm.recover(cancel=False)
    slurm.run("scancel", "--batch", "--signal=USR1", job.job_id)
    job.wait_for_state("COMPLETED")
    assert curve(job.run) == pytest.approx(curve(tmp_path / "one/tiny-llama-smoke"), rel=1e-4), job.log()
    assert re.findall(r"^(\d) ranks: ", job.log(), re.MULTILINE) == ["4", "3", "4"]


@pytest.mark.nightly
def test_state_of_a_lost_node_is_in_the_memory_of_another(
    cli: ForkServer, slurm: SlurmCluster, tmp_path: Path, expected: dict[int, float]
) -> None:
    """No checkpoint is on the disk, so that a run which continues after step 0 has used the memory."""
    options = ["--nodes", "3", "--nproc", "2", "checkpoint.every=1000", "checkpoint.memory_every=2", "layout.zero=1"]
    job = SubmittedJob(cli, slurm, tmp_path, *options, "train.global_batch=12")
    node = job.nodes()[1]
    job.wait_for_step(8)
    slurm.kill_node(node)
    job.wait_for_state("COMPLETED")
    resumed = [int(line.split("step ")[1].split(":")[0]) for line in job.log().splitlines() if "resuming from" in line]
    assert len(resumed) == 1, job.log()
    assert resumed[0] >= 6
    assert "/dev/shm/" in job.log()
    for init in slurm.inits.values():
        assert not list(Path("/proc", str(init), "root", "dev", "shm").glob("trainyard-*/*/step_*"))


@pytest.mark.nightly
def test_cancelled_job_saves_and_leaves_no_process(cli: ForkServer, slurm: SlurmCluster, tmp_path: Path) -> None:
    job = SubmittedJob(
        cli, slurm, tmp_path, "--nodes", "2", "--nproc", "1", "train.steps=100000", "checkpoint.every=100000"
    )
    job.wait_for_step(2)
    again = refused(cli, slurm, tmp_path, "--nodes", "1", "--nproc", "1", "checkpoint.resume=auto")
    assert f"job {job.job_id} of this run is RUNNING; nearest: trainyard cancel {job.run}" in again
    job.command("cancel", str(job.run))
    job.wait_for_state("CANCELLED")
    job.wait_for(lambda: not slurm.processes(), "the end of all processes")
    saved = [json.loads(line) for line in (job.run / "metrics.jsonl").read_text().splitlines() if "checkpoint" in line]
    assert saved[-1]["step"] == max(curve(job.run))


@pytest.mark.nightly
def test_scancel_ends_the_job_for_good(cli: ForkServer, slurm: SlurmCluster, tmp_path: Path) -> None:
    """Slurm shows COMPLETING while it ends a job, whatever the reason."""
    job = SubmittedJob(cli, slurm, tmp_path, "--nodes", "1", "--nproc", "1", "train.steps=100000")
    job.wait_for_step(2)
    slurm.run("scancel", job.job_id)
    job.wait_for_state("CANCELLED")
    assert "cancelled; the latest checkpoint is of step" in job.log()
    assert "Restarts=0" in slurm.run("scontrol", "-o", "show", "job", job.job_id)


@pytest.mark.nightly
def test_run_that_always_fails_gives_up(cli: ForkServer, slurm: SlurmCluster, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def loss(output, batch):\n    raise RuntimeError('boom')\n")
    slurm.environment["PYTHONPATH"] = f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"
    options = ["--nodes", "2", "--nproc", "1", "--max-restarts", "1", "train.loss=mine:loss"]
    job = SubmittedJob(cli, slurm, tmp_path, *options)
    job.wait_for_state("FAILED")
    assert "boom" in job.log()
    assert "giving up after 2 failures in a row without a new checkpoint (--max-restarts 1)" in job.log()


@pytest.mark.nightly
def test_directory_that_nodes_do_not_share(cli: ForkServer, slurm: SlurmCluster, tmp_path: Path) -> None:
    slurm.in_node("n2", ["mount", "-t", "tmpfs", "tmpfs", str(tmp_path)])
    job = SubmittedJob(cli, slurm, tmp_path, "--nodes", "2", "--nproc", "1")
    job.wait_for_state("FAILED")
    assert f"stopped: not all nodes of n[1-2] see {job.run}; nearest: a directory on a file system that" in job.log()
    assert "attempt 1" not in job.log()
    slurm.in_node("n2", ["umount", str(tmp_path)])


COMMENT = 'it\'s "a b" # x'
RECORDER = """#!/bin/bash
srun bash -c 'echo "$SLURM_CPUS_ON_NODE $SITE"'
scontrol -o show job $SLURM_JOB_ID
touch '{done}'
"""


@pytest.mark.parametrize(
    ("options", "cpus", "memory"), [([], "8", "mem=100000M"), (["--share", "--nproc", "3"], "3", "mem=2000M")]
)
def test_job_has_the_memory_and_cpus_of_its_ranks(
    cli: ForkServer, slurm: SlurmCluster, tmp_path: Path, options: list[str], cpus: str, memory: str
) -> None:
    """Where Slurm schedules memory, an exclusive job got the default of 2,000 MB; a shared one got one CPU. Slurm
    itself reads the values that need quotes."""
    (tmp_path / "python").write_text(RECORDER.format(done=tmp_path / "done"))
    (tmp_path / "python").chmod(0o755)
    (tmp_path / "site.sh").write_text("export SITE='of the site'\n")
    directory = tmp_path / "my 100% runs"
    command = ["submit", *TRAIN, "--nproc", "1", "--setup", tmp_path / "site.sh", f"log.directory={directory}"]
    command += ["train.global_batch=12", f"--sbatch=--comment={COMMENT}", "--dry-run", *options]
    printed = cli.run(command, env=slurm.environment)
    assert printed.returncode == 0, printed.stderr
    script = tmp_path / "train.sbatch"
    script.write_text(printed.stdout.partition("\n")[2].replace(sys.executable, f"'{tmp_path / 'python'}'"))
    (logs := directory / "tiny-llama-smoke/logs").mkdir(parents=True)
    slurm.run("sbatch", str(script))
    deadline = time.monotonic() + 60
    while not (tmp_path / "done").exists():
        assert time.monotonic() < deadline
        time.sleep(0.1)
    (log,) = logs.glob("*.log")
    step, job = log.read_text().splitlines()
    assert step == f"{cpus} of the site"
    assert memory in job
    assert f"Comment={COMMENT}" in job


CONTAINER_PROGRAMS = {
    "srun": """#!/bin/bash
for word; do
    case $word in --container-*) echo "$word" >> '{directory}/words' ;; *) kept+=("$word") ;; esac
done
PATH={directory}/image:${{PATH#*:}} exec srun "${{kept[@]}}"
""",
    "apptainer": """#!/bin/bash
printf '%s\\n' "${{@:1:7}}" >> '{directory}/words'
PATH={directory}/image:$PATH exec "${{@:8}}"
""",
    "image/python3": """#!/bin/bash\nexec {python} "$@"\n""",
}


@pytest.mark.nightly
@pytest.mark.parametrize("image", ["my/image:1", "my.sif"], ids=["pyxis", "apptainer"])
def test_ranks_run_in_the_container(
    cli: ForkServer, slurm: SlurmCluster, tmp_path: Path, expected: dict[str, float], image: str
) -> None:
    """With stand-ins for the runtimes: srun without Pyxis does not know its options, and only the image has a python3
    with trainyard. The run is killed once, and its next attempt is in the container too."""
    (tmp_path / "image").mkdir()
    for name in ("image/python3", "apptainer" if ".sif" in image else "srun"):
        text = CONTAINER_PROGRAMS[name]
        (tmp_path / name).write_text(text.format(directory=tmp_path, python=sys.executable))
        (tmp_path / name).chmod(0o755)
    slurm.environment["PATH"] = f"{tmp_path}:{slurm.environment['PATH']}"
    job = SubmittedJob(cli, slurm, tmp_path, "--nodes", "2", "--nproc", "1", "--container-image", image)
    job.wait_for_step(1)
    ranks = [pid for pid in slurm.processes() if environment_of(pid).get("RANK") == "1"]
    job.wait_for_step(4)
    os.kill(ranks[0], signal.SIGKILL)
    job.wait_for_state("COMPLETED")
    assert_same_curve(job, expected)
    assert "restart 1 of 3" in job.log()
    words, mounts = (tmp_path / "words").read_text().splitlines(), f"{job.run}:{job.run},{Path.cwd()}:{Path.cwd()}"
    # Pyxis gets its options once in each attempt; Apptainer starts on each of the two nodes.
    assert (words.count(f"--container-mounts={mounts}"), words.count(mounts)) == ((0, 4) if ".sif" in image else (2, 0))


def refused(cli: ForkServer, slurm: SlurmCluster, directory: Path, *options: str) -> str:
    done = cli.run(["submit", *TRAIN, f"log.directory={directory}", *options], env=slurm.environment)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    return done.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--nodes", "0"], "--nodes 0: must be 1 or more"),
        (["--nodes", "two"], "--nodes two: must be a number such as 4, or a range such as 2-4"),
        (["--nodes", "2", "--partition", "gpu"], "--partition gpu: no such partition; nearest: main, high"),
        (["--nodes", "99", "train.global_batch=99"], "--nodes 99: partition main has 4 nodes; nearest: --nodes 4"),
        (["--nodes", "1", "--time", "soon"], "Invalid --time specification"),
    ],
)
def test_bad_input_is_one_line(
    cli: ForkServer, slurm: SlurmCluster, tmp_path: Path, options: list[str], message: str
) -> None:
    assert message in refused(cli, slurm, tmp_path, "--nproc", "1", *options)


ABANDON = """
import os, signal
from pathlib import Path
from tests.support.slurm_cluster import SlurmCluster

cluster = SlurmCluster(Path(os.environ["TMPDIR"]), 1)
print(*(process.pid for process in cluster.daemons.values()), *cluster.inits.values(), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_cluster_ends_with_the_process_that_started_it(slurm: SlurmCluster) -> None:
    """A test run that is killed would otherwise leave daemons for the next one. It runs beside the cluster of the
    tests."""
    with tempfile.TemporaryDirectory(prefix="slurm-") as directory:
        environment = {**os.environ, "TMPDIR": directory}
        done = subprocess.run(
            [sys.executable, "-c", ABANDON], env=environment, capture_output=True, text=True, check=False
        )
    assert done.returncode == -signal.SIGKILL, done.stderr
    pids = [int(pid) for pid in done.stdout.split()]
    assert len(pids) == 4
    deadline = time.monotonic() + 30
    while alive := [pid for pid in pids if is_running(pid)]:
        assert time.monotonic() < deadline, alive
        time.sleep(0.05)
    assert slurm.idle_nodes()


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
