"""Configurations of AWS ParallelCluster for the clusters of the recipes, and the scripts that set up their nodes.

The keys are those of ParallelCluster 3. Every choice has a reason, which `explain` prints.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from trainyard.config.yaml_io import read_yaml
from trainyard.core.errors import UserError, one_line

SETUP_SCRIPT = "setup-node.sh"
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
    """What pip installs on the nodes, from AWS's package index."""
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
    "Image.Os": "an image for which AWS builds the Neuron driver and EFA",
    "HeadNode.InstanceType": "runs Slurm's controller and conversions; no accelerator needed",
    "HeadNode.CustomActions": "the virtual environment is made once here, on the shared file system",
    "Scheduling.SlurmQueues": "one queue; nodes start when a job needs them and stop when idle",
    "Scheduling.SlurmQueues.CapacityReservationTarget": "nodes of this type are rarely available without a reservation",
    "Scheduling.SlurmQueues.Networking.PlacementGroup": "nodes close together: collectives wait for the slowest link",
    "Scheduling.SlurmQueues.ComputeResources.Efa": "the network adapter that Neuron's collectives need between nodes",
    "Scheduling.SlurmQueues.CustomActions": "the Neuron driver and runtime are installed on every node",
    "Scheduling.SlurmSettings": "a lost node is noticed after a minute, and its job requeued on another one",
    "SharedStorage.Efs": "homes and the virtual environment, which all nodes share",
    "SharedStorage.FsxLustre": "data, checkpoints and compile cache: many nodes read and write at once",
}


@dataclass(frozen=True)
class ClusterOptions:
    """What a preset cannot know."""

    region: str
    subnet: str
    key_name: str
    bucket: str
    """s3://bucket/prefix that the nodes read the set-up script from."""
    nodes: int | None = None
    reservation: str | None = None
    """Id of an EC2 capacity reservation."""
    lustre_gib: int = 4800


def cluster_config(preset: ClusterPreset, options: ClusterOptions) -> dict[str, Any]:
    """The configuration as plain data, in the order of ParallelCluster's documentation."""
    script = f"{options.bucket.rstrip('/')}/{SETUP_SCRIPT}"
    bucket = options.bucket.removeprefix("s3://").partition("/")[0]
    iam = {"S3Access": [{"BucketName": bucket}]}
    compute: dict[str, Any] = {
        "Name": preset.instance.partition(".")[0],
        "InstanceType": preset.instance,
        "MinCount": 0,
        "MaxCount": options.nodes or preset.nodes,
        "Efa": {"Enabled": True},
    }
    if options.reservation:
        compute["CapacityReservationTarget"] = {"CapacityReservationId": options.reservation}
    queue = {
        "Name": "train",
        "CapacityType": "ONDEMAND",
        "ComputeSettings": {"LocalStorage": {"RootVolume": {"Size": 512}}},
        "ComputeResources": [compute],
        "Networking": {"SubnetIds": [options.subnet], "PlacementGroup": {"Enabled": True}},
        "CustomActions": {"OnNodeConfigured": {"Script": script, "Args": ["compute"]}},
        "Iam": iam,
    }
    lustre = {
        "StorageCapacity": options.lustre_gib,
        "DeploymentType": "PERSISTENT_2",
        "PerUnitStorageThroughput": 250,
    }
    return {
        "Region": options.region,
        "Image": {"Os": "ubuntu2204"},
        "HeadNode": {
            "InstanceType": "c5.4xlarge",
            "Networking": {"SubnetId": options.subnet},
            "Ssh": {"KeyName": options.key_name},
            "LocalStorage": {"RootVolume": {"Size": 512}},
            "CustomActions": {"OnNodeConfigured": {"Script": script, "Args": ["head"]}},
            "Iam": iam,
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
            {"MountDir": "/shared", "Name": "shared", "StorageType": "Efs"},
            {"MountDir": "/fsx", "Name": "fsx", "StorageType": "FsxLustre", "FsxLustreSettings": lustre},
        ],
    }


def setup_script(preset: ClusterPreset) -> str:
    """The script that sets up the head node (argument `head`) and every compute node (`compute`)."""
    return f"""#!/bin/bash
# Sets up a node of a ParallelCluster for trainyard. Usage: {SETUP_SCRIPT} head|compute
# NEURON_REPOSITORY and NEURON_INDEX are AWS's package repositories; see the setup page of the Neuron SDK. TRAINYARD is
# a clone or a wheel of trainyard on the shared file system. Set them here before you upload this file.
set -euo pipefail
NEURON_REPOSITORY=${{NEURON_REPOSITORY:?set it to AWS's apt repository}}
NEURON_INDEX=${{NEURON_INDEX:?set it to AWS's Python package index}}
TRAINYARD=${{TRAINYARD:-/shared/trainyard}}

case $1 in
compute)
    key=/usr/share/keyrings/neuron.asc
    curl -fsSL "$NEURON_REPOSITORY/GPG-PUB-KEY-AMAZON-AWS-NEURON.PUB" -o $key
    echo "deb [signed-by=$key] $NEURON_REPOSITORY jammy main" > /etc/apt/sources.list.d/neuron.list
    apt-get update -qq
    DEBIAN_FRONTEND=noninteractive apt-get install -y linux-headers-"$(uname -r)" \\
        aws-neuronx-dkms aws-neuronx-collectives aws-neuronx-runtime-lib aws-neuronx-tools
    printf '* soft memlock unlimited\\n* hard memlock unlimited\\n* soft nofile 65536\\n* hard nofile 65536\\n' \\
        > /etc/security/limits.d/trainyard.conf
    ;;
head)
    DEBIAN_FRONTEND=noninteractive apt-get install -y python3-venv g++
    python3 -m venv /shared/venv
    /shared/venv/bin/pip install --extra-index-url "$NEURON_INDEX" {preset.neuron_packages}
    /shared/venv/bin/pip install "$TRAINYARD[{preset.extra}]"
    echo 'export PATH=/shared/venv/bin:$PATH NEURON_COMPILE_CACHE_URL=/fsx/neuron-cache' > /etc/profile.d/trainyard.sh
    ;;
*)
    echo "usage: $0 head|compute" >&2
    exit 2
    ;;
esac
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
        "HeadNode.CustomActions": config.get("HeadNode", {}).get("CustomActions"),
        "Scheduling.SlurmSettings": scheduling.get("SlurmSettings"),
    }
    for queue in queues:
        for resource in queue.get("ComputeResources", []):
            size = f"{resource.get('MinCount', 0)} to {resource.get('MaxCount')} x {resource.get('InstanceType')}"
            parts["Scheduling.SlurmQueues"] = f"{queue.get('Name')}: {size}"
            parts["Scheduling.SlurmQueues.ComputeResources.Efa"] = resource.get("Efa")
            parts["Scheduling.SlurmQueues.CapacityReservationTarget"] = resource.get("CapacityReservationTarget")
        parts["Scheduling.SlurmQueues.Networking.PlacementGroup"] = queue.get("Networking", {}).get("PlacementGroup")
        parts["Scheduling.SlurmQueues.CustomActions"] = queue.get("CustomActions")
    for storage in config.get("SharedStorage", []):
        parts[f"SharedStorage.{storage.get('StorageType')}"] = storage.get("MountDir")
    for key, value in parts.items():
        if value and key in REASONS:
            yield key, _short(value), REASONS[key]


def _short(value: Any) -> str:
    return value if isinstance(value, str) else ", ".join(f"{key} {_short(item)}" for key, item in _items(value))


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
