"""`trainyard submit`: Train as a Slurm job that restarts automatically."""

from pathlib import Path
from typing import Annotated

from typer import Option

from trainyard.cli.console import ProgressDisplay
from trainyard.cli.options import (
    ConfigSource,
    ContainerImage,
    ContainerMounts,
    ContainerRuntime,
    Overrides,
    Smoke,
)
from trainyard.cli.run_config import load_run_config, load_source
from trainyard.cluster import slurm
from trainyard.cluster.batch_script import BatchOptions, Container, read_setup
from trainyard.cluster.jobs import job_log
from trainyard.cluster.submit import (
    Submission,
    check_time,
    parse_node_count,
    ranks_per_node,
    render_scripts,
    submit_locally,
    submit_to_slurm,
)
from trainyard.core.errors import UserError
from trainyard.core.quantities import counted
from trainyard.devices.registry import always_compiles
from trainyard.parallel.layout import Layout


def submit(
    source: ConfigSource,
    overrides: Overrides = None,
    nodes: Annotated[
        str, Option(metavar="N", help="Number of nodes, or a range such as 2-4: the job uses what it gets.")
    ] = "1",
    nproc: Annotated[
        int | None, Option(min=1, help="Ranks on each node. Default: from the file or --gpus-per-node.")
    ] = None,
    partition: Annotated[str | None, Option(help="Partition of the job.")] = None,
    time: Annotated[str | None, Option(help="Time limit, as for sbatch; the job is then requeued.")] = None,
    account: Annotated[str | None, Option(help="Account to charge.")] = None,
    qos: Annotated[str | None, Option(help="Quality of service.")] = None,
    constraint: Annotated[str | None, Option(help="Features that the nodes must have.")] = None,
    reservation: Annotated[str | None, Option(help="Reservation to use.")] = None,
    gpus_per_node: Annotated[int | None, Option(min=1, help="GPUs of each node.")] = None,
    sbatch_option: Annotated[
        list[str] | None, Option("--sbatch", metavar="OPTION", help="Another option of sbatch; repeatable.")
    ] = None,
    exclusive: Annotated[
        bool, Option("--exclusive/--share", help="Whole nodes with all memory, or one CPU per rank of shared ones.")
    ] = True,
    modules: Annotated[
        list[str] | None, Option("--module", metavar="NAME", help="Environment module to load; repeatable.")
    ] = None,
    setup: Annotated[
        Path | None, Option(metavar="FILE", help="Shell lines of your site for the scripts, such as exports.")
    ] = None,
    container_image: ContainerImage = None,
    container_mounts: ContainerMounts = None,
    container_runtime: ContainerRuntime = None,
    notice: Annotated[int, Option(min=1, help="Seconds before the time limit at which the run saves.")] = 120,
    max_restarts: Annotated[
        int, Option(min=0, help="Failures in a row, without a new checkpoint, before giving up.")
    ] = 3,
    hang_timeout: Annotated[
        float, Option(min=0, help="Restart a run that makes no step for this many seconds; 0: never.")
    ] = 600,
    precompile: Annotated[
        bool, Option("--precompile/--no-precompile", help="Compile in a separate job first, if the run compiles.")
    ] = True,
    smoke: Smoke = False,
    dry_run: Annotated[bool, Option("--dry-run", help="Print the batch scripts; write and submit nothing.")] = False,
) -> None:
    """Train as a Slurm job that restarts automatically: after a preemption, a time limit, or a failed rank or node.

    Creates the run directory with the configuration, the batch scripts and the logs of every node. On a machine without
    Slurm, --nodes 1 trains in the background here, with the same restarts.

    Examples:

      trainyard submit llama3-70b --nodes 16 --partition trn1 --time 24:00:00

      trainyard submit llama3-70b --nodes 12-16 --partition trn1

      trainyard submit my.yaml layout.tp=8 --nodes 4 --gpus-per-node 8 --dry-run
    """
    override_list = list(overrides or [])
    low, high = parse_node_count(nodes)
    check_time(time, notice)
    on_slurm = not dry_run and slurm.available()
    if high > 1 and not dry_run and not on_slurm:
        raise UserError(f"--nodes {nodes}: this machine has no Slurm; nearest: --nodes 1, or --dry-run")
    ranks = high * (nproc or gpus_per_node or 1)
    config = load_run_config(source, override_list, smoke, ranks) if smoke else load_source(source, override_list)
    if config.checkpoint.export_hf and config.model.without_router_bias is not config.model:  # the job would not start
        raise UserError(
            "checkpoint.export_hf=true: Hugging Face's format has no place for model.router_bias; nearest: false"
        )
    nproc = nproc or gpus_per_node or ranks_per_node(high, config.layout.ranks, config.hardware, config.device.lnc)
    layouts = {}
    if low == high:
        Layout.from_config(config, high * nproc)  # report an impossible layout now, not when the job starts
    else:
        from trainyard.cluster.elastic import layouts_by_nodes  # imports torch

        with ProgressDisplay("layouts", items=True) as progress:
            layouts = layouts_by_nodes(config, low, high, nproc, progress.update)
    options = BatchOptions(
        nodes=nodes,
        partition=partition,
        time=time,
        account=account,
        qos=qos,
        constraint=constraint,
        reservation=reservation,
        gpus_per_node=gpus_per_node,
        exclusive=exclusive,
        nproc=nproc,
        notice_s=notice,
        extra=tuple(sbatch_option or ()),
        modules=tuple(name for text in modules or [] for name in text.split()),
        setup=read_setup(setup) if setup else "",
        container=Container.from_options(container_image, container_mounts, container_runtime),
    )
    compiles = config.compile.enabled or always_compiles(config.device.name, config.hardware)
    submission = Submission(config, options, nproc, max_restarts, hang_timeout, precompile and compiles, layouts)
    for count, layout in layouts.items():
        used = f"{layout.nodes} of " if layout.nodes < count else ""
        origin = "the layout of the file" if layout.origin == "file" else "from plan --search"
        print(f"{'# ' * dry_run}{used}{counted(count, 'node')}: {layout.layout} ({origin})")
    if dry_run:
        print_scripts(submission)
        return
    run = submit_to_slurm(submission) if on_slurm else submit_locally(submission)
    print_submitted(run.directory, run.record.precompile_job_id, run.record.job_id, on_slurm)


def print_scripts(submission: Submission) -> None:
    directory = Path(submission.config.log.directory).expanduser().absolute() / submission.config.log.name
    for name, text in render_scripts(submission, directory).items():
        print(f"# {directory / name}")
        print(text)


def print_submitted(directory: Path, precompile_id: str | None, job_id: str, on_slurm: bool) -> None:
    if precompile_id:
        print(f"submitted job {precompile_id}: precompile")
    print(f"submitted job {job_id}: train, in {directory}" if on_slurm else f"started process {job_id}, in {directory}")
    print(f"  log     {job_log(directory, job_id)}")
    print(f"  follow  trainyard logs -f {directory}")
    print(f"  state   trainyard jobs {directory}")
    print(f"  cancel  trainyard cancel {directory}")
