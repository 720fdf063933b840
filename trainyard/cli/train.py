"""`trainyard train`: the main job."""

import os
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any

import typer
from rich.console import Console

from trainyard import devices
from trainyard.config.load import load, parse
from trainyard.config.schema import Config
from trainyard.config.smoke import smoke_config as shrink
from trainyard.launch.launcher import launch
from trainyard.metrics.console import TrainConsole
from trainyard.parallel.layout import Layout
from trainyard.parallel.mesh import shutdown_distributed, world
from trainyard.plan.fit_check import check_fits
from trainyard.train.callbacks import Callback, TrainerView
from trainyard.train.trainer import RunSummary, Trainer

DEFAULT_RECIPE = "tiny-llama"


class ConsoleCallback(Callback):
    """Shows the run on the screen."""

    def __init__(self, screen: TrainConsole) -> None:
        self.display = screen

    def on_start(self, trainer: TrainerView) -> None:
        self.display.start()

    def on_step(self, trainer: TrainerView, step: int) -> None:
        self.display.step(step)

    def on_log(self, trainer: TrainerView, record: dict[str, Any]) -> None:
        self.display.log(record)

    def on_evaluate(self, trainer: TrainerView, record: dict[str, Any]) -> None:
        self.display.evaluate(record)

    def on_checkpoint(self, trainer: TrainerView, record: dict[str, Any]) -> None:
        self.display.checkpoint(record)

    def on_end(self, trainer: TrainerView) -> None:
        self.display.end()


def train(
    source: Annotated[
        str, typer.Argument(metavar="[FILE|RECIPE]", help="A YAML file or a recipe's name.")
    ] = DEFAULT_RECIPE,
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...")] = None,
    smoke: Annotated[
        bool, typer.Option("--smoke", help="A tiny trial: same structure and features, a few steps.")
    ] = False,
    nproc: Annotated[int, typer.Option("--nproc", min=1, help="Ranks to start on this machine, one process each.")] = 1,
) -> int:
    """Train a model. With no argument: a small Llama on a text that trainyard writes itself.

    Examples:

      trainyard train

      trainyard train llama2-7b --smoke

      trainyard train my.yaml train.steps=1000 optimizer.lr=1e-4

      trainyard train my.yaml layout.tp=2 --nproc 8
    """
    words = list(overrides or [])
    if "=" in source:  # only overrides were given
        source, words = DEFAULT_RECIPE, [source, *words]
    rank, ranks = world()
    child = "RANK" in os.environ
    alone = rank == 0 and (child or nproc == 1)  # of all processes of the run, the one that speaks
    config = load_run_config(source, words, smoke, ranks if child else nproc, None if alone else lambda line: None)
    if nproc > 1 and not child:
        Layout.from_config(config, nproc)  # a mistake is one line, before any process starts
        variables = devices.select(config.device.name).rank_environment()
        return launch(["train", source, *words, *(["--smoke"] if smoke else [])], nproc, variables)
    console = Console(highlight=False, quiet=rank > 0)
    screen = TrainConsole(config.train.steps, console)
    say = lambda line: console.print(line, style="dim", soft_wrap=True, markup=False)  # noqa: E731
    trainer = Trainer(
        config,
        callbacks=[ConsoleCallback(screen)] if rank == 0 else [],
        say=say,
        preflight=partial(check_fits, warn=say),
    )
    peak, layout = trainer.throughput.peak, trainer.layout
    console.print(
        f"{config.model.family} with {trainer.blueprint.parameter_count():,} weights on {trainer.device.describe()}; "
        f"{config.precision.kind}, {config.train.steps} steps of "
        f"{config.train.global_batch} x {config.data.seq_len} tokens"
        + (f"; peak {peak.flops / 1e12:.2f} TFLOP/s ({peak.source})" if peak else ""),
        soft_wrap=True,
        markup=False,
    )
    if layout.world_size > 1:
        console.print(f"{layout.world_size} ranks: {layout.describe()}", soft_wrap=True, markup=False)
    if config.layout.ranks and config.layout.ranks != layout.world_size:
        console.print(f"note: the file was written for {config.layout.ranks} ranks; this run has {layout.world_size}")
    summary = trainer.run()
    for line in summary_lines(summary):
        console.print(line, soft_wrap=True, markup=False)
    shutdown_distributed()
    return 130 if summary.interrupted else 0


def load_run_config(
    source: str, overrides: list[str], smoke: bool, ranks: int, say: Callable[[str], None] | None = None
) -> Config:
    """The configuration of a run on `ranks` ranks. For a trial the overrides come last, so that it can be adjusted."""
    if smoke:
        return parse(shrink(load(source, say=say), ranks).model_dump(mode="json"), overrides)
    return load(source, overrides, say)


def summary_lines(summary: RunSummary) -> list[str]:
    """Where everything is, and what to do next."""
    what = "Stopped early" if summary.interrupted else "Done"
    learned = (
        f", loss {summary.first_loss:.4f} -> {summary.last_loss:.4f}" if summary.last_loss == summary.last_loss else ""
    )
    skipped = f", {summary.skipped_steps} steps skipped" if summary.skipped_steps else ""
    lines = [f"{what}: {summary.steps} steps in {summary.seconds:.1f} s{learned}{skipped}"]
    if not learned and not summary.interrupted:
        lines = [f"Done: all {summary.steps} steps were made before; more train.steps go on from here"]
    if summary.evaluation:
        lines.append("  evaluation   " + ", ".join(f"{k} {v:.4f}" for k, v in summary.evaluation.items()))
    where = summary.directory
    lines += [
        f"  config       {where / 'config.yaml'}",
        f"  metrics      {where / 'metrics.jsonl'}",
        f"  tensorboard  {where / 'tensorboard'}   (see it: tensorboard --logdir {where})",
    ]
    if summary.exported_weights:
        lines.append(f"  weights      {summary.exported_weights}   (Hugging Face form: from_pretrained reads it)")
    if summary.last_checkpoint:
        lines.append(f"  checkpoint   {summary.last_checkpoint}")
    config = where / "config.yaml"
    if summary.interrupted and summary.last_checkpoint:
        lines.append(f"Next: trainyard train {config} checkpoint.resume=auto to go on.")
    else:
        lines.append(f"Next: trainyard train {config} train.steps=... to run it again changed.")
    return lines
