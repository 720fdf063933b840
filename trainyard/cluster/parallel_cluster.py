"""Configurations of AWS ParallelCluster for the clusters of the recipes, and the scripts that set up their nodes.

The keys are those of ParallelCluster 3. Every choice has a reason, which `explain` prints. Nothing that can fail runs
while the head node is created, because a failure there rolls back the whole stack: compute nodes set themselves up when
they start, and the user installs the packages with INSTALL_SCRIPT once the cluster exists.
"""

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from trainyard.core.errors import UserError, one_line
from trainyard.core.yaml_io import read_yaml

SETUP_SCRIPT, INSTALL_SCRIPT = "setup-node.sh", "install.sh"
NEURON_REPOSITORY, NEURON_INDEX = "https://apt.repos.neuron.amazonaws.com", "https://pip.repos.neuron.amazonaws.com"
"""AWS's repository of Debian packages, and its index of Python packages."""
VALIDATOR = """
import sys, yaml
from pcluster.schemas.cluster_schema import ClusterSchema
try:
    ClusterSchema(cluster_name="trainyard").load(yaml.safe_load(open(sys.argv[1])))
except Exception as error:
    print(" ".join(str(error).split()))
    sys.exit(3)
"""
INVALID = 3


@dataclass(frozen=True)
class ClusterPreset:
    """A cluster for one of the source guides."""

    instance: str
    nodes: int
    neuron_packages: str
    """What pip installs from AWS's package index."""
    extra: str
    """Extra of the trainyard package."""
    purpose: str


TRN1_PACKAGES = "'torch-neuronx==2.9.*' 'neuronx-cc==2.*'"
TRN2_PACKAGES = "'torch-neuronx==2.13.*' 'neuronx-cc==2.*'"
PRESETS = {
    "bert-16": ClusterPreset("trn1.32xlarge", 16, TRN1_PACKAGES, "trn1,data", "BERT-large and Llama 3 70B on trn1"),
    "llama3-70b": ClusterPreset("trn2.48xlarge", 8, TRN2_PACKAGES, "data", "Llama 3 70B on trn2"),
    "llama2-7b": ClusterPreset("trn1.32xlarge", 4, TRN1_PACKAGES, "trn1,data", "Llama 2 7B on trn1"),
}
"""Clusters by name."""

REASONS = {
    "Image.Os": "an image with Python 3.12 for which AWS builds the Neuron driver and EFA",
    "HeadNode.InstanceType": "runs Slurm's controller and conversions; no accelerator needed",
    "HeadNode.Networking": "a subnet that you reach with ssh",
    "Scheduling.SlurmQueues": "one queue; nodes start when a job needs them and stop when idle; those of a Capacity "
    "Block run until its end",
    "Scheduling.SlurmQueues.CapacityType": "nodes of this type are rarely available without a reservation",
    "Scheduling.SlurmQueues.Networking.SubnetIds": "private, with a NAT gateway: instances with several network "
    "cards get no public address",
    "Scheduling.SlurmQueues.Networking.PlacementGroup": "nodes close together: collectives wait for the slowest "
    "link; a reservation has its own placement",
    "Scheduling.SlurmQueues.ComputeResources.Efa": "the network adapter that Neuron's collectives need between nodes",
    "Scheduling.SlurmQueues.CustomActions": "every new node installs the Neuron driver and runtime; one that fails "
    "is replaced",
    "Scheduling.SlurmSettings": "a lost node is noticed after a minute, and its job requeued on another one",
    "SharedStorage.Efs": "the virtual environment, which all nodes share; kept when the cluster is deleted",
    "SharedStorage.FsxLustre": "data, checkpoints and compile cache: many nodes read and write at once; kept when the "
    "cluster is deleted",
}


@dataclass(frozen=True)
class ClusterOptions:
    """What a preset cannot know."""

    region: str
    head_subnet: str
    compute_subnet: str
    key_name: str
    bucket: str
    """s3://bucket/prefix that the nodes read the scripts and the package from."""
    nodes: int | None = None
    reservation: str | None = None
    """Id of an EC2 capacity reservation."""
    capacity_block: str | None = None
    """Id of an EC2 Capacity Block, whose nodes all run from its start to its end."""
    lustre_gib: int = 4800


def cluster_config(preset: ClusterPreset, options: ClusterOptions) -> dict[str, Any]:
    """The configuration as plain data, in the order of ParallelCluster's documentation."""
    bucket = options.bucket.removeprefix("s3://").partition("/")[0]
    nodes = options.nodes or preset.nodes
    compute: dict[str, Any] = {
        "Name": preset.instance.partition(".")[0],
        "InstanceType": preset.instance,
        "MinCount": nodes if options.capacity_block else 0,
        "MaxCount": nodes,
        "Efa": {"Enabled": True},
    }
    reserved = options.capacity_block or options.reservation
    if reserved:
        compute["CapacityReservationTarget"] = {"CapacityReservationId": reserved}
    queue = {
        "Name": "train",
        "CapacityType": "CAPACITY_BLOCK" if options.capacity_block else "ONDEMAND",
        "ComputeSettings": {"LocalStorage": {"RootVolume": {"Size": 512}}},
        "ComputeResources": [compute],
        "Networking": {"SubnetIds": [options.compute_subnet], "PlacementGroup": {"Enabled": not reserved}},
        "CustomActions": {"OnNodeConfigured": {"Script": f"{options.bucket.rstrip('/')}/{SETUP_SCRIPT}"}},
        "Iam": {"S3Access": [{"BucketName": bucket}]},
    }
    lustre = {
        "StorageCapacity": options.lustre_gib,
        "DeploymentType": "PERSISTENT_2",
        "PerUnitStorageThroughput": 250,
        "DeletionPolicy": "Retain",
    }
    efs = {"DeletionPolicy": "Retain"}
    return {
        "Region": options.region,
        "Image": {"Os": "ubuntu2404"},
        "HeadNode": {
            "InstanceType": "c5.4xlarge",
            "Networking": {"SubnetId": options.head_subnet},
            "Ssh": {"KeyName": options.key_name},
            "LocalStorage": {"RootVolume": {"Size": 512}},
            "Iam": {"S3Access": [{"BucketName": bucket}]},
        },
        "Scheduling": {
            "Scheduler": "slurm",
            "SlurmSettings": {
                "ScaledownIdletime": 10,
                "CustomSlurmSettings": [{"SlurmdTimeout": 60}, {"JobRequeue": 1}],
            },
            "SlurmQueues": [queue],
        },
        "SharedStorage": [
            {"MountDir": "/shared", "Name": "shared", "StorageType": "Efs", "EfsSettings": efs},
            {"MountDir": "/fsx", "Name": "fsx", "StorageType": "FsxLustre", "FsxLustreSettings": lustre},
        ],
    }


def cluster_notes(preset: ClusterPreset, options: ClusterOptions) -> Iterator[str]:
    """What a user must know about a configuration before the cluster is created."""
    if options.head_subnet == options.compute_subnet:
        yield f"{options.head_subnet} is the subnet of all nodes: it must be private, and reachable for you"
    if preset.neuron_packages == TRN2_PACKAGES and not (options.capacity_block or options.reservation):
        yield f"{preset.instance} is sold in Capacity Blocks: without --capacity-block, nodes rarely start"


def setup_script() -> str:
    """The script that ParallelCluster runs as root on every new compute node."""
    return f"""#!/bin/bash
# Sets up a compute node: Neuron's driver and runtime. ParallelCluster runs this on every new node, as root. A node on
# which it fails is terminated and replaced; the cluster stays. CloudWatch has its output (cloud-init-output).
set -euo pipefail
export DEBIAN_FRONTEND=noninteractive
. /etc/os-release
key=/usr/share/keyrings/neuron.asc
curl -fsSL --retry 5 {NEURON_REPOSITORY}/GPG-PUB-KEY-AMAZON-AWS-NEURON.PUB -o $key
echo "deb [signed-by=$key] {NEURON_REPOSITORY} $VERSION_CODENAME main" > /etc/apt/sources.list.d/neuron.list
apt-get -o DPkg::Lock::Timeout=600 update -qq  # another apt may run while a node starts
apt-get -o DPkg::Lock::Timeout=600 install -y "linux-headers-$(uname -r)" g++ \\
    aws-neuronx-dkms aws-neuronx-collectives aws-neuronx-runtime-lib aws-neuronx-tools
printf '* soft memlock unlimited\\n* hard memlock unlimited\\n* soft nofile 65536\\n* hard nofile 65536\\n' \\
    > /etc/security/limits.d/trainyard.conf
"""


def install_script(preset: ClusterPreset, bucket: str) -> str:
    """The script that the user runs on the head node, once the cluster exists."""
    bucket = bucket.rstrip("/")
    return f"""#!/bin/bash
# Installs trainyard and PyTorch for Neuron into /shared/venv, which all nodes see. Run it on the head node when the
# cluster exists, and again to update or after an error. It needs trainyard-*.whl in {bucket}.
set -euo pipefail
python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {{
    echo "$0: $(python3 --version): trainyard needs Python 3.11 or later" >&2
    exit 1
}}
wheels=$(mktemp -d)
trap 'rm -rf "$wheels"' EXIT
aws s3 cp --recursive --exclude '*' --include 'trainyard-*.whl' {shlex.quote(bucket)} "$wheels"
wheel=$(find "$wheels" -name 'trainyard-*.whl' | sort -V | tail -n 1)
if [ -z "$wheel" ]; then
    echo "$0: {bucket} has no trainyard-*.whl; make it with pip wheel --no-deps, and upload it" >&2
    exit 1
fi
sudo apt-get -o DPkg::Lock::Timeout=600 update -qq
sudo apt-get -o DPkg::Lock::Timeout=600 install -y python3-venv g++
sudo install -d -o "$(id -un)" /shared/venv
python3 -m venv /shared/venv
/shared/venv/bin/pip install --extra-index-url {NEURON_INDEX} {preset.neuron_packages} "${{wheel}}[{preset.extra}]"
echo 'export PATH=/shared/venv/bin:$PATH NEURON_COMPILE_CACHE_URL=/fsx/neuron-cache' |
    sudo tee /etc/profile.d/trainyard.sh > /dev/null
echo "Installed. Log in again, or: . /etc/profile.d/trainyard.sh"
"""


def dump_config(config: dict[str, Any]) -> str:
    return yaml.safe_dump(config, sort_keys=False, width=120)


def explain(config: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Key, value and reason of every part of a configuration that has one."""
    scheduling = config.get("Scheduling", {})
    queues = scheduling.get("SlurmQueues", [])
    parts: dict[str, Any] = {
        "Image.Os": config.get("Image", {}).get("Os"),
        "HeadNode.InstanceType": config.get("HeadNode", {}).get("InstanceType"),
        "HeadNode.Networking": config.get("HeadNode", {}).get("Networking"),
        "Scheduling.SlurmSettings": scheduling.get("SlurmSettings"),
    }
    for queue in queues:
        for resource in queue.get("ComputeResources", []):
            size = f"{resource.get('MinCount', 0)} to {resource.get('MaxCount')} x {resource.get('InstanceType')}"
            parts["Scheduling.SlurmQueues"] = f"{queue.get('Name')}: {size}"
            parts["Scheduling.SlurmQueues.ComputeResources.Efa"] = resource.get("Efa")
            if reserved := resource.get("CapacityReservationTarget"):
                parts["Scheduling.SlurmQueues.CapacityType"] = {queue.get("CapacityType"): reserved}
        networking = queue.get("Networking", {})
        parts |= {f"Scheduling.SlurmQueues.Networking.{key}": value for key, value in networking.items()}
        parts["Scheduling.SlurmQueues.CustomActions"] = queue.get("CustomActions")
    for storage in config.get("SharedStorage", []):
        parts[f"SharedStorage.{storage.get('StorageType')}"] = storage.get("MountDir")
    for key, value in parts.items():
        if value and key in REASONS:
            yield key, _short(value), REASONS[key]


def _short(value: Any) -> str:
    return (
        value if isinstance(value, str) else ", ".join(f"{key} {_short(item)}".strip() for key, item in _items(value))
    )


def _items(value: Any) -> list[tuple[str, Any]]:
    if isinstance(value, dict):
        return list(value.items())
    if isinstance(value, list):
        return [pair for item in value for pair in (item.items() if isinstance(item, dict) else [("", item)])]
    return [("", str(value))]


def validate(path: Path) -> None:
    """Check a file with the schema of the installed aws-parallelcluster. Raises UserError with the first mistake."""
    region = read_yaml(path).get("Region") or "us-east-1"
    environment = {**os.environ, "AWS_DEFAULT_REGION": str(region)}
    command = [_pcluster_python(), "-c", VALIDATOR, str(path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode == INVALID:
        raise UserError(f"{path}: {done.stdout.strip()}")
    if done.returncode:
        raise UserError(f"{path}: cannot be checked: {one_line(RuntimeError(done.stderr.splitlines()[-1]))}")


def _pcluster_python() -> str:
    """The Python that has aws-parallelcluster: this one, or that of the command pcluster."""
    probe = [sys.executable, "-c", "import importlib.util, sys; sys.exit(importlib.util.find_spec('pcluster') is None)"]
    if subprocess.run(probe, check=False).returncode == 0:
        return sys.executable
    tool = shutil.which("pcluster")
    shebang = Path(tool).read_text(errors="replace").partition("\n")[0] if tool else ""
    if not shebang.startswith("#!") or "python" not in shebang:
        raise UserError(
            "aws-parallelcluster is not installed; in an environment of its own: pip install aws-parallelcluster, and "
            "put its pcluster on PATH"
        )
    return shebang.removeprefix("#!").strip()
