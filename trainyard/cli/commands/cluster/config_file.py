"""`trainyard cluster`: AWS ParallelCluster files: init, validate, explain."""

import re
import shlex
from pathlib import Path
from typing import Annotated

from typer import Argument, Option, Typer

from trainyard.cluster import parallel_cluster
from trainyard.cluster.parallel_cluster import INSTALL_SCRIPT, PRESETS, SETUP_SCRIPT, ClusterOptions
from trainyard.core.atomic_files import atomic_write_text
from trainyard.core.errors import UserError
from trainyard.core.yaml_io import read_yaml

app = Typer(
    help="Create, check and explain configuration files of AWS ParallelCluster.",
    no_args_is_help=True,
    add_completion=False,
)

NEXT_STEPS = f"""\
Next, here (the first line in a clone of trainyard):
  pip wheel --no-deps -w {{output}} .
  aws s3 cp --recursive {{output}} {{bucket}}
  trainyard cluster validate {{output}}/cluster.yaml
  pcluster create-cluster -n NAME -c {{output}}/cluster.yaml --dryrun true
  pcluster create-cluster -n NAME -c {{output}}/cluster.yaml --rollback-on-failure false
  pcluster describe-cluster -n NAME -r {{region}}    # until CREATE_COMPLETE
  pcluster ssh -n NAME -r {{region}} -i KEY_FILE
On the head node:
  aws s3 cp {{bucket}}/{INSTALL_SCRIPT} . && bash {INSTALL_SCRIPT}
  . /etc/profile.d/trainyard.sh && cd /fsx && trainyard doctor --nodes 2
To delete the cluster; /fsx and /shared stay:
  pcluster delete-cluster -n NAME -r {{region}}"""
"""Commands of the user, in the order in which they work."""
ConfigFile = Annotated[Path, Argument(metavar="FILE", help="Configuration file of ParallelCluster.")]


@app.command()
def init(
    preset: Annotated[str, Argument(metavar="PRESET", help=f"One of {', '.join(PRESETS)}.")],
    output: Annotated[Path, Option("--output", "-o", metavar="DIR", help="New directory for the files.")],
    region: Annotated[str, Option(help="AWS region.")],
    head_subnet: Annotated[str, Option(help="Subnet of the head node, which you reach with ssh.")],
    compute_subnet: Annotated[str, Option(help="Private subnet with a NAT gateway, for the other nodes.")],
    key_name: Annotated[str, Option(help="EC2 key pair for the head node.")],
    bucket: Annotated[str, Option(help="s3://bucket/prefix to which you upload the files.")],
    nodes: Annotated[int | None, Option(min=1, help="Maximum number of nodes. Default: as in the guide.")] = None,
    reservation: Annotated[str | None, Option(help="EC2 capacity reservation, such as cr-01.")] = None,
    capacity_block: Annotated[
        str | None, Option(help="EC2 Capacity Block, such as cr-01; --nodes is its size.")
    ] = None,
    lustre_gib: Annotated[int, Option(help="Size of the file system for data and checkpoints.")] = 4800,
) -> None:
    """Write the files of a cluster: bert-16 (16 x trn1.32xlarge), llama3-70b (8 x trn2.48xlarge) or llama2-7b (4 x
    trn1.32xlarge), with EFS, FSx for Lustre and EFA. Prints the commands that create it, check it and delete it.

    Example:

      trainyard cluster init bert-16 -o mine --region us-west-2 --key-name me \\

        --head-subnet subnet-01 --compute-subnet subnet-02 --bucket s3://bucket/prefix
    """
    if preset not in PRESETS:
        raise UserError(f"{preset}: no such cluster; nearest: {', '.join(PRESETS)}")
    if not re.fullmatch(r"s3://[a-z0-9.-]+(/[\w./-]*)?", bucket):
        raise UserError(f"--bucket {bucket}: must be a URL such as s3://bucket/prefix")
    if lustre_gib != 1200 and (lustre_gib < 2400 or lustre_gib % 2400):
        raise UserError(f"--lustre-gib {lustre_gib}: must be 1200 or a multiple of 2400")
    if reservation and capacity_block:
        raise UserError(f"--reservation {reservation} and --capacity-block {capacity_block}: only one of them")
    if output.exists():
        raise UserError(f"{output}: already exists; choose a new directory")
    options = ClusterOptions(
        region, head_subnet, compute_subnet, key_name, bucket, nodes, reservation, capacity_block, lustre_gib
    )
    output.mkdir(parents=True)
    config = parallel_cluster.cluster_config(PRESETS[preset], options)
    atomic_write_text(output / "cluster.yaml", parallel_cluster.dump_config(config))
    atomic_write_text(output / SETUP_SCRIPT, parallel_cluster.setup_script())
    atomic_write_text(output / INSTALL_SCRIPT, parallel_cluster.install_script(PRESETS[preset], bucket))
    print(f"{output / 'cluster.yaml'}: {PRESETS[preset].purpose}")
    for note in parallel_cluster.cluster_notes(PRESETS[preset], options):
        print(f"note: {note}")
    print(NEXT_STEPS.format(output=shlex.quote(str(output)), bucket=bucket.rstrip("/"), region=region))


@app.command()
def validate(file: ConfigFile) -> None:
    """Check a file with the schema of aws-parallelcluster, offline. Needs that package here or on PATH.

    Example:

      trainyard cluster validate my-cluster/cluster.yaml
    """
    parallel_cluster.validate(file)
    print(f"{file}: valid")


@app.command()
def explain(file: ConfigFile) -> None:
    """Say why a cluster needs the parts of its configuration.

    Example:

      trainyard cluster explain my-cluster/cluster.yaml
    """
    for key, value, reason in parallel_cluster.explain(read_yaml(file)):
        print(f"{key}: {value}\n    {reason}")
