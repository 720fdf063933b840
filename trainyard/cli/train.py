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
from trainyard.config.smoke import smoke as shrink
from trainyard.launch.launcher import launch
from trainyard.metrics.console import Screen
from trainyard.parallel.layout import Layout
from trainyard.parallel.mesh import leave, world
from trainyard.plan.fit_check import check_room
from trainyard.train.callbacks import Hook, Run
from trainyard.train.trainer import Summary, Trainer

DEFAULT = "tiny-llama"


class Watch(Hook):
    """Shows the run on the screen."""

    def __init__(self, screen: Screen) -> None:
        self.screen = screen

    def on_start(self, trainer: Run) -> None:
        self.screen.start()

    def on_step(self, trainer: Run, number: int) -> None:
        self.screen.step(number)

    def on_log(self, trainer: Run, record: dict[str, Any]) -> None:
        self.screen.log(record)

    def on_evaluate(self, trainer: Run, record: dict[str, Any]) -> None:
        self.screen.evaluate(record)

    def on_checkpoint(self, trainer: Run, record: dict[str, Any]) -> None:
        self.screen.checkpoint(record)

    def on_end(self, trainer: Run) -> None:
        self.screen.end()


def train(
    source: Annotated[str, typer.Argument(metavar="[FILE|RECIPE]", help="A YAML file or a recipe's name.")] = DEFAULT,
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
        source, words = DEFAULT, [source, *words]
    rank, ranks = world()
    child = "RANK" in os.environ
    alone = rank == 0 and (child or nproc == 1)  # of all processes of the run, the one that speaks
    config = configure(source, words, smoke, ranks if child else nproc, None if alone else lambda line: None)
    if nproc > 1 and not child:
        Layout.of(config, nproc)  # a mistake is one line, before any process starts
        variables = devices.select(config.device.name).environment()
        return launch(["train", source, *words, *(["--smoke"] if smoke else [])], nproc, variables)
    console = Console(highlight=False, quiet=rank > 0)
    screen = Screen(config.train.steps, console)
    say = lambda line: console.print(line, style="dim", soft_wrap=True, markup=False)  # noqa: E731
    trainer = Trainer(config, hooks=[Watch(screen)] if rank == 0 else [], say=say, check=partial(check_room, say=say))
    peak, layout = trainer.meter.peak, trainer.layout
    console.print(
        f"{config.model.family} with {trainer.blueprint.parameters():,} weights on {trainer.device.describe()}; "
        f"{config.precision.kind}, {config.train.steps} steps of "
        f"{config.train.global_batch} x {config.data.sequence} tokens"
        + (f"; peak {peak.flops / 1e12:.2f} TFLOP/s ({peak.source})" if peak else ""),
        soft_wrap=True,
        markup=False,
    )
    if layout.world > 1:
        console.print(f"{layout.world} ranks: {layout.describe()}", soft_wrap=True, markup=False)
    if config.layout.ranks and config.layout.ranks != layout.world:
        console.print(f"note: the file was written for {config.layout.ranks} ranks; this run has {layout.world}")
    summary = trainer.run()
    for line in closing(summary):
        console.print(line, soft_wrap=True, markup=False)
    leave()
    return 130 if summary.interrupted else 0


def configure(
    source: str, words: list[str], smoke: bool, ranks: int, say: Callable[[str], None] | None = None
) -> Config:
    """The configuration of a run on `ranks` ranks. For a trial the overrides come last, so that it can be adjusted."""
    if smoke:
        return parse(shrink(load(source, say=say), ranks).model_dump(mode="json"), words)
    return load(source, words, say)


def closing(summary: Summary) -> list[str]:
    """Where everything is, and what to do next."""
    what = "Stopped early" if summary.interrupted else "Done"
    learned = f", loss {summary.first_loss:.4f} -> {summary.loss:.4f}" if summary.loss == summary.loss else ""
    skipped = f", {summary.skipped} steps skipped" if summary.skipped else ""
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
    if summary.weights:
        lines.append(f"  weights      {summary.weights}   (Hugging Face form: from_pretrained reads it)")
    if summary.checkpoint:
        lines.append(f"  checkpoint   {summary.checkpoint}")
    config = where / "config.yaml"
    if summary.interrupted and summary.checkpoint:
        lines.append(f"Next: trainyard train {config} checkpoint.resume=auto to go on.")
    else:
        lines.append(f"Next: trainyard train {config} train.steps=... to run it again changed.")
    return lines
