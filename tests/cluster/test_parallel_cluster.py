"""Configuration files of AWS ParallelCluster, and the way of a user from `cluster init` to a checked cluster."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.support.forkserver import ForkServer
from trainyard.cluster.parallel_cluster import PRESETS

PUBLIC, PRIVATE = "subnet-00000000000000001", "subnet-00000000000000002"
OPTIONS = ["--region", "us-west-2", "--key-name", "me", "--head-subnet", PUBLIC, "--compute-subnet", PRIVATE]
OPTIONS += ["--bucket", "s3://b/p"]
RESERVED = "cr-0123456789abcdef0"
ROOT = Path(__file__).parents[2]
PROGRAM = r"""#!/bin/bash
# Stands in for the programs of a user and of a node. $WORLD is the root of the file system; $WORLD/s3 is S3. A node has
# no package before an update, and Neuron's only with their repository.
set -euo pipefail
s3() { case $1 in s3://*) echo "$WORLD/s3/${1#s3://}" ;; *) echo "$1" ;; esac; }
case ${0##*/} in
pip) touch "$4/trainyard-1.0-py3-none-any.whl" "$4/trainyard-0.9-py3-none-any.whl" ;;
aws)
    shift 2
    include='*'
    while [[ $1 == --* ]]; do
        [[ $1 == --include ]] && include=$2
        [[ $1 == --recursive ]] && shift || shift 2
    done
    source=$(s3 "$1") target=$(s3 "$2")
    [ -d "$source" ] || exec cp "$source" "$target"
    mkdir -p "$target"
    find "$source" -type f -name "$include" -exec cp {} "$target" \;
    ;;
curl) while [[ $1 != -o ]]; do shift; done; echo key > "$2" ;;
sudo) exec "$@" ;;
apt-get)
    while [[ $1 == -o ]]; do shift 2; done
    [[ $1 == update ]] && exec touch "$WORLD/updated"
    [ -e "$WORLD/updated" ] || { echo "E: Unable to locate package" >&2; exit 100; }
    for package in "${@:3}"; do
        [[ $package != aws-neuronx-* ]] || grep -q noble "$WORLD/etc/apt/sources.list.d/neuron.list"
        echo "$package" >> "$WORLD/packages"
    done
    ;;
python3)
    [[ $1 == --version ]] && { echo "Python $VERSION"; exit; }
    [[ $1 == -c ]] && exec "$PYTHON" -c "import sys; sys.version_info = (${VERSION//./,}); $2"
    grep -qx python3-venv "$WORLD/packages"
    mkdir -p "$3/bin"
    printf '#!/bin/bash\nset -e\nw=${@: -1}\ntest -f "${w%%[*}"\necho "$*" > "$WORLD/installed"\n' > "$3/bin/pip"
    printf '#!/bin/bash\necho "$PWD $*" > "$WORLD/checked"\n' > "$3/bin/trainyard"
    chmod +x "$3/bin/pip" "$3/bin/trainyard"
    ;;
esac
"""


class World:
    """A file system for the commands of a user and the scripts of a node, with stand-ins for their programs."""

    def __init__(self, directory: Path, version: str = "3.12.3") -> None:
        self.root = directory / "world"
        for name in ("etc/apt/sources.list.d", "etc/security/limits.d", "etc/profile.d", "usr/share/keyrings", "fsx"):
            (self.root / name).mkdir(parents=True)
        (self.root / "etc/os-release").write_text("VERSION_CODENAME=noble\n")
        (programs := self.root / "programs").mkdir()
        for name in ("pip", "aws", "curl", "sudo", "apt-get", "python3", "pcluster", "trainyard"):
            (programs / name).write_text(PROGRAM)
            (programs / name).chmod(0o755)
        path = f"{programs}:{os.environ['PATH']}"
        self.environment = {**os.environ, "PATH": path, "WORLD": str(self.root), "VERSION": version}
        self.environment["PYTHON"] = sys.executable

    def run(self, text: str) -> subprocess.CompletedProcess[str]:
        """Run commands with absolute paths below the root of this world."""
        text, command = self.move(text), ["bash", "-e"]
        return subprocess.run(
            command, input=text, env=self.environment, cwd=self.root, capture_output=True, text=True, check=False
        )

    def move(self, text: str) -> str:
        for name in ("/etc/", "/usr/share/", "/shared", "/fsx"):
            text = text.replace(name, f"{self.root}{name}")
        return text

    def upload(self, output: str) -> None:
        """Run what `cluster init` prints for the user's own machine."""
        here = output.partition("in a clone of trainyard):\n")[2].partition("On the head node:")[0]
        done = self.run(here)
        assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("preset", PRESETS)
def test_user_gets_a_cluster_with_the_printed_commands(cli: ForkServer, tmp_path: Path, preset: str) -> None:
    """Every script finds what it needs at the moment it runs: S3 has the files, nothing runs on the head node while the
    stack can roll back, and packages come from repositories that were read."""
    done = cli.run(["cluster", "init", preset, "-o", tmp_path / "c", *OPTIONS])
    assert done.returncode == 0, done.stderr
    user = World(tmp_path)
    user.upload(done.stdout)
    config = yaml.safe_load((tmp_path / "c/cluster.yaml").read_text())
    assert "CustomActions" not in config["HeadNode"]
    (queue,) = config["Scheduling"]["SlurmQueues"]
    script = user.root / "s3" / queue["CustomActions"]["OnNodeConfigured"]["Script"].removeprefix("s3://")
    node = user.run(script.read_text())
    assert node.returncode == 0, node.stderr
    packages = (user.root / "packages").read_text().split()
    assert {"aws-neuronx-dkms", "aws-neuronx-collectives", f"linux-headers-{os.uname().release}"} <= set(packages)
    for name in ("updated", "packages"):  # the head node is another machine
        (user.root / name).unlink()
    head = done.stdout.partition("On the head node:\n")[2].partition("To delete")[0]
    install = user.root / "s3/b/p/install.sh"
    install.write_text(user.move(install.read_text()))
    installed = user.run(head)
    assert installed.returncode == 0, installed.stderr
    words = (user.root / "installed").read_text()
    assert PRESETS[preset].neuron_packages.replace("'", "") in words
    assert words.endswith(f"trainyard-1.0-py3-none-any.whl[{PRESETS[preset].extra}]\n")  # the latest
    assert (user.root / "checked").read_text() == f"{user.root}/fsx doctor --nodes 2\n"


@pytest.mark.parametrize(
    ("version", "wheel", "message"),
    [
        ("3.10.12", True, "Python 3.10.12: trainyard needs Python 3.11 or later"),
        ("3.12.3", False, "s3://b/p has no trainyard-*.whl; make it with pip wheel --no-deps, and upload it"),
    ],
)
def test_installation_says_what_is_missing(
    cli: ForkServer, tmp_path: Path, version: str, wheel: bool, message: str
) -> None:
    done = cli.run(["cluster", "init", "llama2-7b", "-o", tmp_path / "c", *OPTIONS])
    user = World(tmp_path, version)
    user.upload(done.stdout)
    if not wheel:
        for path in (user.root / "s3/b/p").glob("*.whl"):
            path.unlink()
    failed = user.run((tmp_path / "c/install.sh").read_text())
    assert failed.returncode == 1
    assert failed.stderr == f"bash: {message}\n"
    assert not (user.root / "packages").exists()


@pytest.mark.parametrize("name", ["setup-node.sh", "install.sh"])
def test_failing_package_manager_fails_the_script(cli: ForkServer, tmp_path: Path, name: str) -> None:
    """ParallelCluster replaces a node whose script fails; it would use one whose script hides a failure."""
    done = cli.run(["cluster", "init", "bert-16", "-o", tmp_path / "c", *OPTIONS])
    user = World(tmp_path)
    user.upload(done.stdout)
    (user.root / "programs/apt-get").write_text("#!/bin/sh\nexit 100\n")
    assert user.run((tmp_path / "c" / name).read_text()).returncode == 100


def test_files_of_a_preset(cli: ForkServer, tmp_path: Path) -> None:
    options = [*OPTIONS, "--capacity-block", RESERVED, "--nodes", "4"]
    done = cli.run(["cluster", "init", "llama3-70b", "-o", tmp_path / "c", *options])
    assert done.returncode == 0, done.stderr
    assert "note:" not in done.stdout
    assert max(map(len, done.stdout.replace(str(tmp_path), "").splitlines())) <= 88
    config = yaml.safe_load((tmp_path / "c/cluster.yaml").read_text())
    (queue,) = config["Scheduling"]["SlurmQueues"]
    (resource,) = queue["ComputeResources"]
    assert (resource["MinCount"], resource["MaxCount"], queue["CapacityType"]) == (4, 4, "CAPACITY_BLOCK")
    assert resource["CapacityReservationTarget"] == {"CapacityReservationId": RESERVED}
    assert not queue["Networking"]["PlacementGroup"]["Enabled"]
    assert (config["HeadNode"]["Networking"]["SubnetId"], queue["Networking"]["SubnetIds"]) == (PUBLIC, [PRIVATE])
    settings = [storage[f"{storage['StorageType']}Settings"] for storage in config["SharedStorage"]]
    assert [entry["DeletionPolicy"] for entry in settings] == ["Retain", "Retain"]
    explained = cli.run(["cluster", "explain", tmp_path / "c/cluster.yaml"]).stdout
    assert explained.count("\n    ") == 12


def test_notes_about_what_will_not_start(cli: ForkServer, tmp_path: Path) -> None:
    same = [PUBLIC if word == PRIVATE else word for word in OPTIONS]
    done = cli.run(["cluster", "init", "llama3-70b", "-o", tmp_path / "c", *same])
    assert f"note: {PUBLIC} is the subnet of all nodes: it must be private, and reachable for you\n" in done.stdout
    assert (
        "note: trn2.48xlarge is sold in Capacity Blocks: without --capacity-block, nodes rarely start\n" in done.stdout
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["bert-17", *OPTIONS], "bert-17: no such cluster; nearest: bert-16, llama3-70b, llama2-7b"),
        (["bert-16", *OPTIONS, "--lustre-gib", "3000"], "--lustre-gib 3000: must be 1200 or a multiple of 2400"),
        (["bert-16", *OPTIONS, "--lustre-gib", "0"], "--lustre-gib 0: must be 1200 or a multiple of 2400"),
        (["bert-16", *OPTIONS[:-1], "b"], "--bucket b: must be a URL such as s3://bucket/prefix"),
        (["bert-16", *OPTIONS[:-1], "s3://b/$(x)"], "--bucket s3://b/$(x): must be a URL such as s3://bucket/prefix"),
        (
            ["bert-16", *OPTIONS, "--reservation", "cr-1", "--capacity-block", "cr-2"],
            "--reservation cr-1 and --capacity-block cr-2: only one of them",
        ),
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
def test_validators_of_aws_parallelcluster(cli: ForkServer, tmp_path: Path) -> None:
    """The schema and all validators of the real package, in an environment of its own, with AWS's answers from a table.
    One of them refuses subnets with public addresses for instances with several network cards."""
    script = ROOT / "scripts/pcluster_environment"
    binaries = subprocess.run([script], capture_output=True, text=True, check=True).stdout.strip()
    environment = {**os.environ, "PATH": f"{binaries}:{os.environ['PATH']}", "AWS_DEFAULT_REGION": "us-west-2"}

    def failures(file: Path) -> list[tuple[str, str]]:
        command = [f"{binaries}/python", ROOT / "tests/support/pcluster_validators.py", file]
        lines = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.splitlines()
        return [(level, name) for level, name, _ in map(json.loads, lines) if level != "INFO"]

    block = ["--capacity-block", RESERVED]
    for number, (preset, options) in enumerate([*((name, []) for name in PRESETS), ("llama3-70b", block)]):
        file = tmp_path / str(number) / "cluster.yaml"
        assert cli.run(["cluster", "init", preset, "-o", file.parent, *OPTIONS, *options]).returncode == 0
        done = cli.run(["cluster", "validate", file], env=environment)
        assert done.stdout == f"{file}: valid\n", done.stderr
        assert failures(file) == []
    file.write_text(file.read_text().replace("MinCount: 8", "MinCount: 0").replace(PRIVATE, PUBLIC))
    expected = {("ERROR", "ComputeResourceSizeValidator"), ("ERROR", "MultiNetworkInterfacesInstancesValidator")}
    assert set(failures(file)) == expected
    file.write_text(file.read_text().replace("MinCount", "MinCont"))
    done = cli.run(["cluster", "validate", file], env=environment)
    assert done.returncode == 2
    assert "MinCont" in done.stderr
    assert "Unknown field" in done.stderr
