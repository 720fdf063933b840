"""`trainyard submit` without a cluster: batch scripts, mistakes, and runs in the background of this machine."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.forkserver import ForkServer
from trainyard.cluster.batch_script import BatchOptions, render_script
from trainyard.cluster.jobs import JobRecord
from trainyard.cluster.submit import parse_time
from trainyard.metrics.run_directory import RunDirectory

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


IDLE_SLURM = {
    "sbatch": 'case "$*" in *--test-only*) ;; *) echo x >> jobs; wc -l < jobs ;; esac',
    "scontrol": 'case "$*" in *show*) echo "JobId=$4 JobState=COMPLETED Reason=None" ;; esac',
    "squeue": "",
    "sinfo": 'case "$*" in *%R*) echo main ;; *) echo "main* 4" ;; esac',
}
"""Commands of a Slurm whose jobs are complete."""


def test_resubmission_has_the_site_options_of_its_command(cli: ForkServer, tmp_path: Path) -> None:
    for name, text in IDLE_SLURM.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "site.sh").write_text("export SITE=1\n")
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    command = ["submit", *TRAIN, "--nproc", "1", "compile.enabled=true", f"log.directory={tmp_path / 'runs'}"]
    command += ["--container-image", "my.sif", "--module", "gcc/12", "--setup", "site.sh"]
    scripts = []
    for resume in ("none", "auto"):
        done = cli.run([*command, f"checkpoint.resume={resume}"], cwd=tmp_path, env=environment)
        assert done.returncode == 0, done.stderr
        run = tmp_path / "runs/tiny-llama-smoke"
        scripts.append([(run / name).read_text() for name in ("precompile.sbatch", "train.sbatch")])
    assert scripts[0] == scripts[1]
    for script in scripts[1]:
        assert "\nmodule load gcc/12 || exit\nexport SITE=1\n" in script
        assert "my.sif" in script
        assert "\n#SBATCH --mem=0\n" in script
    assert json.loads((run / "job.json").read_text())["job_id"] == "4"


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


FAKE_SLURM = {
    # The check of a script, the last thing before the run directory is opened, waits for that of another submit. sbatch
    # waits for another one's question about the job of the run.
    "sbatch": """touch tests questions
wait_for() { for _ in $(seq 20); do [ "$(wc -l < $1)" -ge 2 ] && return; sleep 0.05; done; }
case "$*" in *--test-only*) echo x >> tests; wait_for tests; exit 0;; esac
wait_for questions; echo x >> jobs; wc -l < jobs | tr -d ' '""",
    "scontrol": """case "$*" in
*"show job"*) for id; do :; done; echo x >> questions
    [ "$id" -ge 1 ] && [ "$id" -le "$(wc -l < jobs)" ] || { echo 'Invalid job id specified' >&2; exit 1; }
    echo "JobId=$id JobState=PENDING Reason=None NodeList=(null) Restarts=0";;
esac""",
    "squeue": "echo 1:00:00",
    "sinfo": """case "$*" in *%R*) echo main;; *) echo 'main* 4';; esac""",
}


@pytest.fixture
def fake_slurm(tmp_path: Path) -> dict[str, str]:
    """An environment with commands that answer as Slurm does."""
    commands = tmp_path / "bin"
    commands.mkdir()
    for name, body in FAKE_SLURM.items():
        (commands / name).write_text(f"#!/bin/sh\ncd {tmp_path}\n{body}\n")
        (commands / name).chmod(0o755)
    return {**os.environ, "PATH": f"{commands}:{os.environ['PATH']}"}


@pytest.mark.parametrize("exists", [False, True], ids=["new run", "run to continue"])
def test_two_submits_at_once_make_one_job(
    cli: ForkServer, tmp_path: Path, fake_slurm: dict[str, str], exists: bool
) -> None:
    runs = tmp_path / "runs"
    if exists:
        with RunDirectory.create(runs, "tiny-llama-smoke") as run:
            JobRecord("slurm", "0", "2", 1).write(run.path)  # a job that has ended
    command = ["submit", *TRAIN, f"log.directory={runs}", "checkpoint.resume=auto", "--nodes", "2", "--nproc", "1"]
    processes = [cli.start(command, env=fake_slurm) for _ in range(2)]
    results = [(process.communicate(120)[1], process.returncode) for process in processes]
    (refused, _), (_, _) = sorted(results, key=lambda result: -(result[1] or 0))
    assert sorted(code for _, code in results) == [0, 2], results
    assert refused.startswith(f"trainyard: {runs / 'tiny-llama-smoke'}: ")
    assert "another process is training in this directory" in refused or "job 1 of this run is PENDING" in refused
    assert (tmp_path / "jobs").read_text() == "x\n"
    assert [path.name for path in runs.iterdir()] == ["tiny-llama-smoke"]
    again = cli.run(command, env=fake_slurm)
    assert again.stderr.endswith(f"job 1 of this run is PENDING; nearest: trainyard cancel {runs}/tiny-llama-smoke\n")


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("2", 120),
        ("1:30", 120),
        ("0:59", 60),
        ("1:30:00", 5400),
        ("1-0", 86400),
        ("2-12:30", 217800),
        ("1-00:00:01", 86460),
        ("UNLIMITED", None),
        ("0", 0),
        ("soon", None),
    ],
)
def test_time_limits_are_read_as_sbatch_reads_them(text: str, seconds: int | None) -> None:
    assert parse_time(text) == seconds


@pytest.mark.parametrize("options", [["--time", "2"], ["--time", "1:00", "--notice", "60"]])
def test_time_limit_that_leaves_no_time_to_train(cli: ForkServer, tmp_path: Path, options: list[str]) -> None:
    command = ["submit", "tiny-llama", "--nodes", "2", "--nproc", "1", "--dry-run", *options]
    done = cli.run(command, cwd=tmp_path)
    assert done.returncode == 2
    assert re.match(r"trainyard: --time \S+: \d+ s, not longer than --notice \d+, at which the job is req", done.stderr)
    assert cli.run([*command, "--notice", "15"], cwd=tmp_path).returncode == 0


@pytest.mark.parametrize(("fault", "code", "starts"), [("kill -9 $$", 137, 3), ("exit 137", 137, 3), ("exit 3", 3, 1)])
def test_killed_command_is_repeated_with_a_bound(tmp_path: Path, fault: str, code: int, starts: int) -> None:
    command = ["sh", "-c", f"echo started >> {tmp_path}/starts; {fault}"]
    script = render_script("name", tmp_path, BatchOptions("1"), [command], "", max_starts=3)
    done = subprocess.run(["bash"], input=script, text=True, capture_output=True, check=False)
    assert done.returncode == code
    assert (tmp_path / "starts").read_text() == "started\n" * starts


def test_notice_before_the_supervisor_is_ready(tmp_path: Path) -> None:
    """A signal ends a Python process that has not installed its handlers yet; the next one gets the notice."""
    command = ["sh", "-c", f'echo "$TRAINYARD_NOTICED" >> {tmp_path}/starts; [ "$TRAINYARD_NOTICED" ] || sleep 600']
    (tmp_path / "script").write_text(render_script("name", tmp_path, BatchOptions("1"), [command], "", max_starts=100))
    process = subprocess.Popen(["bash", str(tmp_path / "script")])
    while not (tmp_path / "starts").exists():
        time.sleep(0.01)
    process.send_signal(signal.SIGUSR1)
    assert process.wait(60) == 0
    assert (tmp_path / "starts").read_text() == "\n1\n"


def test_dead_munge_is_named(cli: ForkServer, tmp_path: Path, fake_slurm: dict[str, str]) -> None:
    """The lines are those of Slurm 22.05."""
    lines = [
        "If munged is up, restart with --num-threads=10",
        'Munge encode failed: Failed to access "/run/munge/munge.socket.2": No such file (Did you start munged?)',
        "slurm_send_node_msg: auth_g_create: REQUEST_PARTITION_INFO has authentication error",
    ]
    body = "\n".join(f"echo 'sinfo: error: {line}' >&2" for line in lines)
    (tmp_path / "bin/sinfo").write_text(
        f"#!/bin/sh\n{body}\necho 'slurm_load_partitions: Protocol error' >&2\nexit 1\n"
    )
    done = cli.run(["submit", *TRAIN, f"log.directory={tmp_path}/runs", "--nodes", "2", "--nproc", "1"], env=fake_slurm)
    assert done.returncode == 2
    assert re.fullmatch(
        r'trainyard: sinfo: munge does not work on \S+: Failed to access "/run/munge/munge.socket.2": No such file; '
        r"nearest: start munged\n",
        done.stderr,
    )
