"""`trainyard submit` without a cluster: batch scripts, mistakes, and runs in the background of this machine."""

import json
import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from tests.support.forkserver import ForkServer

TRAIN = ["tiny-llama", "--smoke", "checkpoint.export_hf=false", "log.loggers=[]", "evaluate.every=0"]


@pytest.fixture
def without_slurm(tmp_path: Path) -> dict[str, str]:
    """An environment whose PATH has no sbatch."""
    return {**os.environ, "PATH": str(tmp_path / "empty")}


def test_scripts_are_complete_and_valid_bash(cli: ForkServer, tmp_path: Path, without_slurm: dict[str, str]) -> None:
    options = ["--nodes", "16", "--partition", "trn1", "--time", "24:00:00", "--qos", "high", "--sbatch=--mem=0"]
    done = cli.run(["submit", "llama3-70b", "device.name=xla", *options, "--dry-run"], cwd=tmp_path, env=without_slurm)
    assert done.returncode == 0, done.stderr
    precompile, train = done.stdout.split("# " + str(tmp_path))[1:]
    assert "--nodes=1\n" in precompile
    assert "trainyard precompile" in precompile
    assert f"{tmp_path}/runs/llama3-70b --nproc 32 --ranks 512" in precompile
    for directive in ("--nodes=16", "--time=24:00:00", "--qos=high", "--mem=0", "--requeue", "--signal=B:USR1@120"):
        assert f"#SBATCH {directive}\n" in train
    for name, script in (("precompile", precompile), ("train", train)):
        subprocess.run(["bash", "-n"], input=script.partition("\n")[2], text=True, check=True)
        assert name in script
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--nodes", "2", "--nproc", "1"], "--nodes 2: this machine has no Slurm; nearest: "),
        (["--nodes", "4-2"], "--nodes 4-2: must be 1 or more, in increasing order"),
        ([], "--nproc: how many ranks on each node? Give their number, usually that of the devices"),
        (["--nproc", "3"], "train.global_batch="),
    ],
)
def test_mistakes_are_one_line(
    cli: ForkServer, tmp_path: Path, without_slurm: dict[str, str], arguments: list[str], message: str
) -> None:
    command = ["submit", "tiny-llama", f"log.directory={tmp_path / 'runs'}", *arguments]
    done = cli.run(command, env=without_slurm)
    assert done.returncode == 2
    assert done.stderr.startswith(f"trainyard: {message}")
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(("configured", "expected"), [(False, "this machine has no Slurm"), (True, "sinfo: ")])
def test_commands_without_a_cluster(cli: ForkServer, tmp_path: Path, configured: bool, expected: str) -> None:
    """Slurm's commands without slurm.conf are not a cluster; with one whose controller is down, they are."""
    error = "scontrol: fatal: Could not establish a configuration source" if not configured else "Slurmctld is DOWN"
    for name in ("sbatch", "scontrol", "sinfo"):
        (tmp_path / name).write_text(f"#!/bin/sh\necho '{error}' >&2\nexit 1\n")
        (tmp_path / name).chmod(0o755)
    command = ["submit", "tiny-llama", f"log.directory={tmp_path / 'runs'}", "--nodes", "2", "--nproc", "1"]
    done = cli.run(command, env={**os.environ, "PATH": str(tmp_path)})
    assert done.returncode == 2
    assert expected in done.stderr


def test_run_in_the_background(cli: ForkServer, tmp_path: Path, without_slurm: dict[str, str]) -> None:
    command = ["submit", *TRAIN, "train.steps=6", f"log.directory={tmp_path}", "--nproc", "2"]
    done = cli.run(command, env=without_slurm)
    assert done.returncode == 0, done.stderr
    run = tmp_path / "tiny-llama-smoke"
    assert f"trainyard logs -f {run}" in done.stdout
    log = cli.run(["logs", "-f", run], env=without_slurm)
    assert log.returncode == 0
    assert "step 6/6" in log.stdout
    (state,) = json.loads(cli.run(["jobs", tmp_path, "--json"], env=without_slurm).stdout)
    assert (state["state"], state["step"], state["steps"]) == ("ENDED", 6, 6)
    assert "ENDED" in cli.run(["jobs", tmp_path], env=without_slurm).stdout
    assert "has ended already" in cli.run(["cancel", run], env=without_slurm).stdout


@pytest.mark.nightly
def test_background_run_is_cancelled_with_a_checkpoint(
    cli: ForkServer, tmp_path: Path, without_slurm: dict[str, str]
) -> None:
    command = ["submit", *TRAIN, "train.steps=1000000", "checkpoint.every=1000000", f"log.directory={tmp_path}"]
    assert cli.run([*command, "--nproc", "1"], env=without_slurm).returncode == 0
    run, deadline = tmp_path / "tiny-llama-smoke", time.monotonic() + 60
    while not (run / "metrics.jsonl").exists() or "loss" not in (run / "metrics.jsonl").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert cli.run(["cancel", run], env=without_slurm).returncode == 0
    log = cli.run(["logs", "-f", run], env=without_slurm).stdout
    assert "cancelled; the latest checkpoint is of step" in log
    assert list((run / "checkpoints").glob("step_*"))
    shutil.rmtree(run)
