"""`trainyard train` as ranks that another launcher starts: real processes with the variables of real launchers."""

import json
import os
from pathlib import Path

import pytest

from tests.core.test_world import CAPTURED
from tests.support.forkserver import ForkServer
from trainyard.launch.launcher import reserved_port

TRAIN = ["train", "tiny-llama", "--smoke", "checkpoint.export_hf=false", "log.loggers=[]", "evaluate.every=0"]
TRAIN += ["train.steps=4", "train.global_batch=4", "train.micro_batch=2"]
NIGHTLY = pytest.mark.nightly


def losses(directory: Path) -> list[float]:
    (run,) = directory.iterdir()
    records = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [record["loss"] for record in records if "loss" in record]


@pytest.mark.parametrize(
    "command",
    [
        "sbatch -N2 -n4: srun -N1 -n2",
        pytest.param("mpirun -n 2 (Open MPI)", marks=NIGHTLY),
        pytest.param("mpiexec -n 2 (MPICH)", marks=NIGHTLY),
    ],
)
def test_two_processes_train_one_model(cli: ForkServer, tmp_path: Path, command: str) -> None:
    """Guards against two ranks that train two separate models without a word. The losses are those of one rank."""
    with reserved_port() as port:
        variables = [{**os.environ, **rank, "MASTER_PORT": str(port)} for rank in CAPTURED[command]]
        arguments = [*TRAIN, f"log.directory={tmp_path / 'two'}"]
        first, second = (cli.start(arguments, env=environ) for environ in variables)
        output, errors = first.communicate(60)
        others_output, others_errors = second.communicate(60)
    assert (first.returncode, second.returncode) == (0, 0), errors + others_errors
    assert "2 ranks: tensor 1 x pipeline 1 x context 1 x data 2" in output
    assert output.count("step 4/4") == 1
    assert others_output == ""
    assert cli.run([*TRAIN, f"log.directory={tmp_path / 'one'}"]).returncode == 0
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-5)


def test_a_batch_script_without_srun_trains_alone_and_says_so(cli: ForkServer, tmp_path: Path) -> None:
    (variables,) = CAPTURED["sbatch -N2 -n4"]
    done = cli.run([*TRAIN, f"log.directory={tmp_path}"], env={**os.environ, **variables}, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "note: SLURM_NTASKS=4, but srun did not start this process: it trains alone" in done.stdout


@pytest.mark.parametrize(
    ("variables", "arguments", "message"),
    [
        ({"RANK": "0", "WORLD_SIZE": "2"}, [], "WORLD_SIZE=2: MASTER_ADDR is not set; set MASTER_ADDR to the host of"),
        ({"RANK": "7", "WORLD_SIZE": "2"}, [], "RANK=7: must be an integer, 0 to 1, because of WORLD_SIZE"),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "2"}, [], "SLURM_NTASKS=2: MASTER_ADDR is not set; set MASTER_ADDR"),
        (
            CAPTURED["srun -N2 -n3"][0],
            ["--nproc", "8"],
            "--nproc 8: this process is one of 2 ranks on this host already",
        ),
    ],
)
def test_unusable_variables_are_one_line(
    cli: ForkServer, tmp_path: Path, variables: dict[str, str], arguments: list[str], message: str
) -> None:
    """Guards against tracebacks, and against waiting half an hour for ranks that do not exist."""
    command = [*TRAIN, *arguments, f"log.directory={tmp_path}"]
    done = cli.run(command, env={**os.environ, **variables})
    assert done.returncode == 2
    assert done.stderr.startswith(f"trainyard: {message}")
    assert done.stderr.count("\n") == 1
    assert not list(tmp_path.iterdir())
