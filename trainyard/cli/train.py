"""`trainyard train`: the main job."""

from typing import Annotated, Any

import typer
from rich.console import Console

from trainyard.config.load import load, parse
from trainyard.config.smoke import smoke as shrink
from trainyard.train.hooks import Hook, Run
from trainyard.train.loop import Summary, Trainer
from trainyard.watch.progress import Screen

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

    def on_end(self, trainer: Run) -> None:
        self.screen.end()


def train(
    source: Annotated[str, typer.Argument(metavar="[FILE|RECIPE]", help="A YAML file or a recipe's name.")] = DEFAULT,
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...")] = None,
    smoke: Annotated[
        bool, typer.Option("--smoke", help="A tiny trial: same structure and features, a few steps.")
    ] = False,
) -> int:
    """Train a model. With no argument: a small Llama on a text that trainyard writes itself.

    Examples:

      trainyard train

      trainyard train llama2-7b --smoke

      trainyard train my.yaml train.steps=1000 optimizer.lr=1e-4
    """
    words = list(overrides or [])
    if "=" in source:  # only overrides were given
        source, words = DEFAULT, [source, *words]
    # For a trial the overrides come last, so that it can be adjusted too.
    config = parse(shrink(load(source)).model_dump(mode="json"), words) if smoke else load(source, words)
    console = Console(highlight=False)
    screen = Screen(config.train.steps, console)
    say = lambda line: console.print(line, style="dim", soft_wrap=True, markup=False)  # noqa: E731
    trainer = Trainer(config, hooks=[Watch(screen)], say=say)
    peak = trainer.meter.peak
    console.print(
        f"{config.model.family} with {trainer.blueprint.parameters():,} weights on {trainer.device.describe()}; "
        f"{config.precision.kind}, {config.train.steps} steps of "
        f"{config.train.global_batch} x {config.data.sequence} tokens"
        + (f"; peak {peak.flops / 1e12:.2f} TFLOP/s ({peak.source})" if peak else ""),
        soft_wrap=True,
        markup=False,
    )
    if config.layout.ranks and config.layout.ranks != trainer.layout.world:
        console.print(
            f"note: the file was written for {config.layout.ranks} ranks; this run has {trainer.layout.world}"
        )
    summary = trainer.run()
    for line in closing(summary):
        console.print(line, soft_wrap=True, markup=False)
    return 130 if summary.interrupted else 0


def closing(summary: Summary) -> list[str]:
    """Where everything is, and what to do next."""
    what = "Stopped early" if summary.interrupted else "Done"
    lines = [
        f"{what}: {summary.steps} steps in {summary.seconds:.1f} s, loss {summary.first_loss:.4f} -> {summary.loss:.4f}"
        + (f", {summary.skipped} steps skipped" if summary.skipped else ""),
    ]
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
    lines.append(f"Next: trainyard train {where / 'config.yaml'} train.steps=... to run it again changed.")
    return lines
