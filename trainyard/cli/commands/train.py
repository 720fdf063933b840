"""`trainyard train`: Train a model. Without arguments: a small Llama on built-in text."""

import os
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rich.console import Console
from typer import Argument, Context, Option

from trainyard import devices
from trainyard.cli.console import print_line
from trainyard.cli.options import CONFIG_SOURCE_HELP, Nproc, Overrides, Smoke, complete_source
from trainyard.cli.ranks import check_nproc, launch_ranks
from trainyard.cli.run_config import load_run_config
from trainyard.core.constants import EXIT_INTERRUPTED
from trainyard.core.errors import RunStopped, UserError
from trainyard.core.quantities import counted
from trainyard.core.user_code import is_user_path
from trainyard.core.world import World, host_name
from trainyard.launch.heartbeat import heartbeat_from_environment
from trainyard.parallel.layout import Layout

if TYPE_CHECKING:  # imports torch; `train --help` and mistakes in a file do not wait for it
    from trainyard.run.callbacks import Callback
    from trainyard.run.records import RunSummary
    from trainyard.run.trainer import Trainer

DEFAULT_RECIPE = "tiny-llama"


def train(
    context: Context,
    source: Annotated[
        str, Argument(metavar="FILE|RECIPE|RUN", help=CONFIG_SOURCE_HELP, autocompletion=complete_source)
    ] = DEFAULT_RECIPE,
    overrides: Overrides = None,
    smoke: Smoke = False,
    nproc: Nproc = 1,
    continue_run: Annotated[
        bool, Option("--continue", help="Train in the directory RUN itself, from its latest checkpoint.")
    ] = False,
    logs: Annotated[
        Path | None, Option(metavar="DIR", help="With --nproc: keep the logs of all ranks in DIR/HOST.")
    ] = None,
    hang_timeout: Annotated[
        float, Option(min=0, help="With --nproc: end a run that makes no step for N seconds; 0: never.")
    ] = 0,
) -> int:
    """Train a model. Without arguments: a small Llama on built-in text.

    Writes config, metrics, checkpoints and Hugging Face weights to runs/NAME. Ctrl-C stops after the current step.

    Examples:

      trainyard train

      trainyard train llama2-7b --smoke

      trainyard train my.yaml train.steps=1000 optimizer.lr=1e-4

      trainyard train my.yaml layout.tp=2 --nproc 8

      trainyard train runs/my-run --continue

      srun --nodes 4 --ntasks-per-node 1 trainyard train my.yaml --nproc 8
    """
    override_list = list(overrides or [])
    if "=" in source:  # only overrides were given
        source, override_list = DEFAULT_RECIPE, [source, *override_list]
    run_directory = find_run_directory(source) if continue_run else None
    world = World.from_environment()
    check_nproc(nproc, world)
    prints = world.rank == 0 and nproc == 1  # exactly one process of the run prints notes
    ranks = world.size * nproc
    config = load_run_config(source, override_list, smoke, ranks, None if prints else lambda line: None)
    try:
        Layout.from_config(config, ranks)  # report an impossible layout before any process starts
    except UserError as error:
        raise error if smoke else UserError(f"{error}; --smoke shrinks the layout for a trial") from None
    if nproc > 1 or logs:
        return launch_ranks(
            context,
            nproc,
            config.device.name,
            hosts=world,
            changes={"source": source, "overrides": override_list},
            log_directory=logs / host_name() if logs else None,
            hang_timeout=hang_timeout,
            recorder_environment=devices.select(config.device.name).flight_recorder_environment,
        )
    from trainyard.cli.heartbeat_callback import HeartbeatCallback
    from trainyard.cli.train_console import TrainConsole, log_to_console
    from trainyard.parallel.mesh import shutdown_distributed
    from trainyard.preflight.plan.problems import check_fits
    from trainyard.run.trainer import Trainer

    console = Console(highlight=False, quiet=world.rank > 0)
    callbacks: list[Callback] = [TrainConsole(console)] if world.rank == 0 else []
    if heartbeat := heartbeat_from_environment():
        callbacks.append(HeartbeatCallback(heartbeat))
    preflight = partial(check_fits, warn=partial(print_line, console, style="dim"), local_size=world.local_size)
    # The memory of a user's update rule is not known.
    checks: Any = {} if is_user_path(config.optimizer.kind) else {"preflight": preflight}
    with log_to_console(console):
        trainer = Trainer(config, callbacks=callbacks, world=world, run_directory=run_directory, **checks)
        print_run_header(console, trainer)
        summary = trainer.run()
    for line in summary_lines(summary):
        print_line(console, line)
    shutdown_distributed()
    if summary.last_step_skipped and not summary.interrupted:
        raise RunStopped(f"step {summary.steps}: the last step was skipped, so the run did not succeed")
    return EXIT_INTERRUPTED if summary.interrupted else 0


def find_run_directory(source: str) -> Path:
    """The directory of an existing run."""
    path = Path(source).expanduser()
    if not (path / "config.yaml").is_file():
        raise UserError(f"{source}: not a run directory: it has no config.yaml; --continue needs one")
    return path


def print_run_header(console: Console, trainer: "Trainer") -> None:
    """Print model, device, precision, batch and layout of a run."""
    config, layout, peak = trainer.config, trainer.layout, trainer.throughput.peak
    weights, trained = trainer.blueprint.parameter_count(), trainer.blueprint.trained_count
    batch = f"{config.train.global_batch} x {config.data.seq_len}"
    counts = f"{weights:,} weights" + (f", {trained:,} of them trained," if trained < weights else "")
    header = f"{config.model.family} with {counts} on {trainer.device.describe()}; {config.precision.kind}, "
    header += f"{counted(config.train.steps, 'step')} of {batch} tokens"
    header += f"; peak {peak.flops / 1e12:.2f} TFLOP/s ({peak.source})" if peak else ""
    print_line(console, header)
    if layout.world_size > 1:
        print_line(console, f"{layout.world_size} ranks: {layout.describe()}")
    if config.layout.ranks and config.layout.ranks != layout.world_size:
        console.print(
            f"note: the file is meant for {counted(config.layout.ranks, 'rank')}; this run has {layout.world_size}"
        )
    tasks = os.environ.get("SLURM_NTASKS", "1")
    if layout.world_size == 1 and tasks != "1":
        print_line(console, f"note: SLURM_NTASKS={tasks}, but srun did not start this process: it trains alone")


def summary_lines(summary: "RunSummary") -> list[str]:
    """Return the closing lines of a run: result, output files, and the next command."""
    trained = summary.last_loss is not None
    status = "Stopped early" if summary.interrupted else "Failed" if summary.last_step_skipped else "Done"
    losses = f", loss {summary.first_loss:.4f} -> {summary.last_loss:.4f}" if trained else ""
    skipped = f", {counted(summary.skipped_steps, 'step')} skipped" if summary.skipped_steps else ""
    lines = [f"{status}: {counted(summary.steps, 'step')} in {summary.seconds:.1f} s{losses}{skipped}"]
    if not trained and status == "Done":
        lines = [
            f"Nothing to do: step {summary.steps} of {summary.steps} is complete. Increase train.steps to continue."
        ]
    if summary.evaluation:
        lines.append("  evaluation   " + ", ".join(f"{k} {v:.4f}" for k, v in summary.evaluation.items()))
    directory = summary.directory
    for name, file, note in (
        ("config", "config.yaml", ""),
        ("metrics", "metrics.jsonl", ""),
        ("events", "events.jsonl", ""),
        ("tensorboard", "tensorboard", f"   (view: trainyard board {directory})"),
        ("samples", "samples.jsonl", ""),
    ):
        if name in ("config", "metrics", "events") or (directory / file).exists():
            lines.append(f"  {name:<12} {directory / file}{note}")
    if exported := summary.exported_weights:
        is_adapter = (exported / "adapter_config.json").exists()
        text = "PEFT's format, for PeftModel" if is_adapter else "Hugging Face format, for from_pretrained"
        lines.append(f"  {'adapter' if is_adapter else 'weights':<12} {exported}   ({text})")
    if summary.last_checkpoint:
        lines.append(f"  checkpoint   {summary.last_checkpoint}")
    if summary.interrupted and summary.last_checkpoint:
        lines.append(f"Next: trainyard train {directory} --continue   (resume)")
    else:
        lines.append(f"Next: trainyard train {directory} train.steps=...   (run again with changes)")
    return lines
