"""`trainyard submit` without a cluster: batch scripts, mistakes, and runs in the background of this machine."""

import json
import os
import shlex
import shutil
import subprocess
import sys
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


STUB = """#!/bin/bash
printf '%s\\n' "${0##*/}" "$@" > "$RECORD.${0##*/}"
echo "$SITE $MODULES" > "$RECORD.site"
"""
SITE = {"BASH_FUNC_module%%": '() { MODULES="$*"; export MODULES; }'}


def run_script(text: str, directory: Path) -> dict[str, list[str]]:
    """Run a batch script with stand-ins for Python, srun and apptainer. Returns the words that each of them got, and
    the variables that the site's lines and modules have set."""
    programs = directory / "programs"
    programs.mkdir(parents=True)
    for name in ("srun", "apptainer", "python"):
        (programs / name).write_text(STUB)
        (programs / name).chmod(0o755)
    text = text.replace(sys.executable, str(programs / "python"))
    environment = {
        **os.environ,
        **SITE,
        "PATH": f"{programs}:{os.environ['PATH']}",
        "RECORD": str(directory / "record"),
    }
    subprocess.run(["bash"], input=text, env=environment, text=True, check=True)
    return {path.suffix[1:]: path.read_text().splitlines() for path in directory.glob("record.*")}


@pytest.mark.parametrize("image", ["registry#my/image:1", "/images/my image.sif", "docker://x"])
def test_site_options_hold_for_every_job(
    cli: ForkServer, tmp_path: Path, without_slurm: dict[str, str], image: str
) -> None:
    """A job that is requeued runs the same script again, so everything is in the script."""
    (tmp_path / "site.sh").write_text('#!/bin/sh\r\nexport SITE="it\'s here"\r\n')
    directory = tmp_path / "my runs"
    options = ["--module", "gcc/12 cuda/12", "--module", "a;b", "--setup", tmp_path / "site.sh", "--sbatch=--nice"]
    options += ["--sbatch", "--exclude n1", '--sbatch=--comment=it\'s "a b"', f"log.directory={directory}"]
    options += ["--container-image", image, "--container-mounts", "/my data:/data"]
    options += ["--container-runtime", "apptainer"] if image == "docker://x" else []
    command = ["submit", "llama3-70b", "device.name=xla", "--nodes", "2", *options, "--dry-run"]
    done = cli.run(command, cwd=tmp_path, env=without_slurm)
    assert done.returncode == 0, done.stderr
    scripts = [text.partition("\n")[2] for text in done.stdout.split(f"# {directory}")[1:]]
    run = directory / "llama3-70b"
    mounts = f"{run}:{run},{tmp_path}:{tmp_path},/my data:/data"
    for number, script in enumerate(scripts):
        directives = [shlex.split(line)[1:] for line in script.splitlines() if line.startswith("#SBATCH")]
        for words in (["--nice"], ["--exclude", "n1"], ['--comment=it\'s "a b"'], ["--mem=0"], ["--exclusive"]):
            assert words in directives
        assert [f"--output={run}/logs/%j.log"] in directives
        calls = run_script(script, tmp_path / str(number))
        assert calls["site"] == ["it's here load gcc/12 cuda/12 a;b"]
        if number == 1:  # the supervisor is on the host, and gives the container to every step of srun
            _, *supervise = calls["python"]
            assert supervise[supervise.index("--container-image") + 1] == image
            assert supervise[supervise.index("--container-mounts") + 1] == "/my data:/data"
        elif image.startswith("registry"):
            assert calls["srun"][4:7] == [
                f"--container-{name}" for name in (f"image={image}", f"mounts={mounts}", f"workdir={tmp_path}")
            ]
            assert calls["srun"][7:11] == ["python3", "-m", "trainyard", "precompile"]
        else:
            expected = ["exec", "--nv", "--bind", mounts, "--pwd", str(tmp_path), image, "python3", "-m", "trainyard"]
            assert calls["apptainer"][1:11] == expected
            assert "srun" not in calls


@pytest.mark.parametrize(
    ("options", "expected", "missing"),
    [
        ([], ["--exclusive", "--mem=0"], ["--cpus-per-task=4"]),
        (["--share"], ["--cpus-per-task=4"], ["--exclusive", "--mem=0"]),
        (["--sbatch=--mem-per-gpu=9G"], ["--exclusive", "--mem-per-gpu=9G"], ["--mem=0"]),
        (["--share", "--sbatch=-c 16"], ["-c 16"], ["--cpus-per-task=4"]),
    ],
)
def test_memory_and_cpus(
    cli: ForkServer,
    tmp_path: Path,
    without_slurm: dict[str, str],
    options: list[str],
    expected: list[str],
    missing: list[str],
) -> None:
    command = ["submit", "tiny-llama", "--nproc", "4", "train.global_batch=8", "--dry-run", *options]
    lines = cli.run(command, cwd=tmp_path, env=without_slurm).stdout.splitlines()
    assert {f"#SBATCH {option}" for option in expected} <= set(lines)
    assert not {f"#SBATCH {option}" for option in missing} & set(lines)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--sbatch", "mem=0"], "--sbatch 'mem=0': must be one option of sbatch, such as --sbatch=--comment=text"),
        (["--sbatch=--nice --mem=0"], "--sbatch '--nice --mem=0': must be one option; repeat --sbatch for each"),
        (["--sbatch=--comment=a\nb"], "--sbatch '--comment=a\\nb': must be one option of sbatch"),
        (["--partition", "a\nrm -r x"], "'--partition=a\\nrm -r x': has a character that sbatch does not read"),
        (["--container-mounts", "/a:/a"], "--container-mounts /a:/a: needs --container-image"),
        (
            ["--container-image", "x", "--container-runtime", "docker"],
            "--container-runtime docker: must be one of pyxis",
        ),
        (
            ["--container-image", "x", "log.directory=/a,b"],
            "/a,b/tiny-llama: a container cannot mount a directory with",
        ),
        (["--setup", "none.sh"], "--setup none.sh: cannot be read: No such file or directory"),
        (["--setup", "options.sh"], "--setup options.sh: line 2: sbatch reads no options there; nearest: --sbatch="),
        (["--setup", "if.sh"], "--setup if.sh: line "),
        (["--setup", "document.sh"], "--setup document.sh: line "),
    ],
)
def test_bad_site_options_are_one_line(
    cli: ForkServer, tmp_path: Path, without_slurm: dict[str, str], options: list[str], message: str
) -> None:
    texts = {"options": "\n#SBATCH --mem=0\n", "if": "if true; then\n", "document": "cat <<END\n"}
    for name, text in texts.items():
        (tmp_path / f"{name}.sh").write_text(text)
    command = ["submit", "tiny-llama", "--nproc", "1", "compile.enabled=true", *options, "--dry-run"]
    done = cli.run(command, cwd=tmp_path, env=without_slurm)
    assert done.returncode == 2
    assert done.stderr.startswith(f"trainyard: {message}")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("options", [["--module", "x"], ["--container-image", "x"]])
def test_options_that_need_slurm(
    cli: ForkServer, tmp_path: Path, without_slurm: dict[str, str], options: list[str]
) -> None:
    done = cli.run(["submit", "tiny-llama", "--nproc", "1", *options], cwd=tmp_path, env=without_slurm)
    assert (
        done.stderr == "trainyard: --module, --setup and Pyxis: need a job of Slurm, which this machine does not have\n"
    )
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
