"""Configuration files of AWS ParallelCluster."""

import os
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.support.forkserver import ForkServer
from trainyard.cluster.parallel_cluster import PRESETS

OPTIONS = ["--region", "us-west-2", "--subnet", "subnet-0123456789abcdef0", "--key-name", "me", "--bucket", "s3://b/p"]
ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("preset", PRESETS)
def test_files_of_a_preset(cli: ForkServer, tmp_path: Path, preset: str) -> None:
    done = cli.run(["cluster", "init", preset, "-o", tmp_path / "c", *OPTIONS, "--reservation", "cr-0123456789abcdef0"])
    assert done.returncode == 0, done.stderr
    config = yaml.safe_load((tmp_path / "c/cluster.yaml").read_text())
    (queue,) = config["Scheduling"]["SlurmQueues"]
    (resource,) = queue["ComputeResources"]
    assert (resource["InstanceType"], resource["MaxCount"]) == (PRESETS[preset].instance, PRESETS[preset].nodes)
    assert resource["Efa"]["Enabled"]
    assert queue["Networking"]["PlacementGroup"]["Enabled"]
    assert {storage["StorageType"] for storage in config["SharedStorage"]} == {"Efs", "FsxLustre"}
    subprocess.run(["bash", "-n", tmp_path / "c/setup-node.sh"], check=True)
    explained = cli.run(["cluster", "explain", tmp_path / "c/cluster.yaml"]).stdout
    assert explained.count("\n    ") == 11


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["bert-17", *OPTIONS], "bert-17: no such cluster; nearest: bert-16, llama3-70b, llama2-7b"),
        (["bert-16", *OPTIONS, "--lustre-gib", "3000"], "--lustre-gib 3000: must be 1200 or a multiple of 2400"),
        (["bert-16", *OPTIONS[:-1], "b"], "--bucket b: must be a URL such as s3://bucket/prefix"),
    ],
)
def test_mistakes_are_one_line(cli: ForkServer, tmp_path: Path, arguments: list[str], message: str) -> None:
    done = cli.run(["cluster", "init", *arguments, "-o", tmp_path / "c"])
    assert (done.returncode, done.stderr) == (2, f"trainyard: {message}\n")
    assert not (tmp_path / "c").exists()


def test_validation_says_what_it_needs(cli: ForkServer, tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("Region: us-west-2\n")
    done = cli.run(["cluster", "validate", tmp_path / "c.yaml"], env={**os.environ, "PATH": "/usr/bin:/bin"})
    assert done.returncode == 2
    assert "pip install aws-parallelcluster" in done.stderr


@pytest.mark.nightly
def test_schema_of_aws_parallelcluster(cli: ForkServer, tmp_path: Path) -> None:
    """Held against the real package, in an environment of its own."""
    binaries = subprocess.run(
        [ROOT / "scripts/pcluster_environment"], capture_output=True, text=True, check=True
    ).stdout
    environment = {**os.environ, "PATH": f"{binaries.strip()}:{os.environ['PATH']}"}
    for preset in PRESETS:
        file = tmp_path / preset / "cluster.yaml"
        assert cli.run(["cluster", "init", preset, "-o", file.parent, *OPTIONS]).returncode == 0
        done = cli.run(["cluster", "validate", file], env=environment)
        assert done.stdout == f"{file}: valid\n", done.stderr
    file.write_text(file.read_text().replace("MinCount", "MinCont"))
    done = cli.run(["cluster", "validate", file], env=environment)
    assert done.returncode == 2
    assert "MinCont" in done.stderr
    assert "Unknown field" in done.stderr
