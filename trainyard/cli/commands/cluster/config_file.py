"""`trainyard cluster`: configuration files of AWS ParallelCluster."""

from pathlib import Path
from typing import Annotated

from typer import Argument, Option, Typer

from trainyard.cluster import parallel_cluster
from trainyard.cluster.parallel_cluster import PRESETS, SETUP_SCRIPT, ClusterOptions
from trainyard.config.yaml_io import read_yaml
from trainyard.core.atomic_files import atomic_write_text
from trainyard.core.errors import UserError

app = Typer(
    help="Create, check and explain configuration files of AWS ParallelCluster.",
    no_args_is_help=True,
    add_completion=False,
)

ConfigFile = Annotated[Path, Argument(metavar="FILE", help="Configuration file of ParallelCluster.")]


@app.command()
def init(
    preset: Annotated[str, Argument(metavar="PRESET", help=f"One of {', '.join(PRESETS)}.")],
    output: Annotated[Path, Option("--output", "-o", metavar="DIR", help="New directory for the files.")],
    region: Annotated[str, Option("--region", help="AWS region.")],
    subnet: Annotated[str, Option("--subnet", help="Subnet of all nodes, such as subnet-0123.")],
    key_name: Annotated[str, Option("--key-name", help="EC2 key pair for the head node.")],
    bucket: Annotated[str, Option("--bucket", help="s3://bucket/prefix to which you upload the set-up script.")],
    nodes: Annotated[int | None, Option("--nodes", min=1, help="Most nodes. Default: those of the guide.")] = None,
    reservation: Annotated[str | None, Option("--reservation", help="EC2 capacity reservation, such as cr-01.")] = None,
    lustre_gib: Annotated[int, Option("--lustre-gib", help="Size of the file system for data and checkpoints.")] = 4800,
) -> None:
    """Write cluster.yaml and the script that sets up the nodes: bert-16 (16 x trn1.32xlarge), llama3-70b (8 x
    trn2.48xlarge) or llama2-7b (4 x trn1.32xlarge), with EFS, FSx for Lustre, EFA and a placement group.

    Example:

      trainyard cluster init bert-16 -o mine --region us-west-2 \\

        --subnet subnet-01 --key-name me --bucket s3://bucket/prefix
    """
    if preset not in PRESETS:
        raise UserError(f"{preset}: no such cluster; nearest: {', '.join(PRESETS)}")
    if not bucket.startswith("s3://"):
        raise UserError(f"--bucket {bucket}: must be a URL such as s3://bucket/prefix")
    if lustre_gib != 1200 and lustre_gib % 2400:
        raise UserError(f"--lustre-gib {lustre_gib}: must be 1200 or a multiple of 2400")
    if output.exists():
        raise UserError(f"{output}: already exists; choose a new directory")
    options = ClusterOptions(region, subnet, key_name, bucket, nodes, reservation, lustre_gib)
    output.mkdir(parents=True)
    config = parallel_cluster.cluster_config(PRESETS[preset], options)
    atomic_write_text(output / "cluster.yaml", parallel_cluster.dump_config(config))
    atomic_write_text(output / SETUP_SCRIPT, parallel_cluster.setup_script(PRESETS[preset]))
    print(f"{output / 'cluster.yaml'}: {PRESETS[preset].purpose}")
    print(f"Next: edit {output / SETUP_SCRIPT}, and upload it: aws s3 cp {output / SETUP_SCRIPT} {bucket.rstrip('/')}/")
    print(f"      trainyard cluster validate {output / 'cluster.yaml'}")
    print(f"      pcluster create-cluster --cluster-name NAME --cluster-configuration {output / 'cluster.yaml'}")


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
