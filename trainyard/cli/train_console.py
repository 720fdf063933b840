"""Progress of a run for people: one line per logged step, and in a terminal a progress bar below them."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Column

from trainyard.cli.console import print_line, terminal_safe
from trainyard.core.constants import GIB, MIB
from trainyard.core.quantities import counted
from trainyard.metrics.loggers.base import event_text
from trainyard.metrics.run_status import reward_of
from trainyard.run.callbacks import Callback, TrainerView

SAMPLE_CHARACTERS = 160
"""Length at which the line of a text sample is cut off; samples.jsonl has all of it."""

EVENT_SAMPLES = 8
"""Sample indices in the line of an event; events.jsonl has all of them."""
DIFFERENCE = "log_probs/difference"
"""Of runs on rollouts: what sampler and trainer compute differently, and how far the weights have moved since."""


class ConsoleLogHandler(logging.Handler):
    """Prints log records of the trainyard package as dim lines."""

    def __init__(self, console: Console) -> None:
        super().__init__(logging.INFO)
        self.console = console

    def emit(self, record: logging.LogRecord) -> None:
        print_line(self.console, record.getMessage(), "dim")


@contextmanager
def log_to_console(console: Console) -> Iterator[None]:
    """Print log records of the trainyard package to `console` while the context is active."""
    logger, handler = logging.getLogger("trainyard"), ConsoleLogHandler(console)
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


class TrainConsole(Callback):
    """Shows the steps, evaluations, text samples, events and checkpoints of a run."""

    def __init__(self, console: Console) -> None:
        self.console = console
        columns = (
            TextColumn("[bold]step"),
            MofNCompleteColumn(table_column=Column(no_wrap=True)),
            BarColumn(bar_width=None, table_column=Column(ratio=1)),
            TimeElapsedColumn(table_column=Column(no_wrap=True)),
            TextColumn("{task.fields[remaining]}", table_column=Column(no_wrap=True)),
        )
        self.bar = Progress(*columns, console=console, expand=True) if console.is_terminal else None
        self.seconds_per_step: float | None = None

    def on_start(self, trainer: TrainerView) -> None:
        self.steps = trainer.config.train.steps
        if self.bar:
            remaining = "elapsed, first step (with compilation) ..."
            self.task = self.bar.add_task("", total=self.steps, completed=trainer.completed_steps, remaining=remaining)
            self.bar.start()

    def on_step(self, trainer: TrainerView, step: int) -> None:
        if self.bar:
            self.bar.update(self.task, completed=step)

    def on_log(self, trainer: TrainerView, record: dict[str, Any]) -> None:
        if record["step"] > 1 or self.steps == 1:  # the first step includes warm-up
            self.seconds_per_step = record["ms_per_iteration"] / 1000
        if self.bar:
            print_line(self.console, screen_line(record, self.steps, self.console.width))
            left = timedelta(seconds=round((self.steps - record["step"]) * (self.seconds_per_step or 0)))
            remaining = f"elapsed, {left} left" if self.seconds_per_step else "elapsed"
            self.bar.update(self.task, completed=record["step"], remaining=remaining)
        else:
            print_line(self.console, log_line(record, self.steps))
        if "seconds_from_start" in record:
            print_line(self.console, f"first step done {record['seconds_from_start']:.1f} s after the start", "dim")
        if "graphs_compiled" in record:
            print_line(self.console, compile_summary(record), "dim")

    def on_evaluate(self, trainer: TrainerView, record: dict[str, Any]) -> None:
        fields = [f"{name.removeprefix('evaluate/')} {value:.4f}" for name, value in record.items() if name != "step"]
        print_line(self.console, " | ".join([f"evaluation at step {record['step']}", *fields]))

    def on_samples(self, trainer: TrainerView, records: list[dict[str, Any]]) -> None:
        for record in records:
            text = f"sample at step {record['step']} | {record['prompt']} | {record['text']}"
            text = terminal_safe(text, self.console.encoding)
            print_line(self.console, text if len(text) <= SAMPLE_CHARACTERS else text[:SAMPLE_CHARACTERS] + "...")

    def on_event(self, trainer: TrainerView, event: dict[str, Any]) -> None:
        if event["event"] != "end":  # the end has its own lines
            text = terminal_safe(event_text(event, EVENT_SAMPLES), self.console.encoding)
            print_line(self.console, text, "dim" if event["event"] == "start" else "")

    def on_checkpoint(self, trainer: TrainerView, record: dict[str, Any]) -> None:
        text = (
            f"checkpoint of step {record['step']} | {record['checkpoint']} | "
            f"{record['checkpoint_bytes'] / MIB:,.1f} MiB in {record['checkpoint_seconds']:.1f} s | "
            f"steps waited {record['checkpoint_stall']:.2f} s"
        )
        print_line(self.console, text)

    def on_end(self, trainer: TrainerView) -> None:
        if self.bar:
            self.bar.stop()


def screen_line(record: dict[str, Any], steps: int, width: int) -> str:
    """One logged step for a terminal: as many numbers as fit `width`, the most important first."""
    fields = [
        f"step {record['step']:>{len(str(steps))}}/{steps}",
        f"loss {record['loss']:.4f}",
        *reward_fields(record),
        f"{record['tokens_per_second']:,.0f} tok/s",
        f"{record['memory_bytes'] / GIB:.1f} GiB",
        f"grad {record['grad_norm']:.2f}",
        f"lr {record['lr']:.2e}",
    ]
    if "mfu" in record:
        fields.append(f"MFU {record['mfu']:.0%}")
    while len(fields) > 1 and sum(map(len, fields)) + 2 * (len(fields) - 1) > width:
        fields.pop()
    return "  ".join(fields)


def reward_fields(record: dict[str, Any]) -> list[str]:
    """The accuracy or the mean of the rewards of a step, if it has any."""
    kind, value = reward_of(record)
    return [] if value is None else [f"reward {kind} {value:.3f}"]


def compile_summary(record: dict[str, Any]) -> str:
    """Compiled and cached graphs: of all ranks at the first logged step, later of unexpected recompilations."""
    count = record["graphs_compiled"]
    graphs = counted(count, "graph")
    if "graphs_cached" not in record:
        return f"Compiled {graphs} more until step {record['step']}"
    seconds = f" ({record['compile_seconds']:.1f} s in the compiler)" if count else ""
    return f"Compiled {graphs}, {record['graphs_cached']} from cache{seconds}"


def log_line(record: dict[str, Any], steps: int) -> str:
    """One logged step as plain text, for files and Slurm logs."""
    fields = [
        f"step {record['step']}/{steps}",
        f"consumed samples {record['consumed_samples']}",
        f"{record['ms_per_iteration']:.1f} ms/iteration",
        f"lr {record['lr']:.3e}",
        f"global batch {record['global_batch']}",
        f"loss {record['loss']:.6f}",
        *reward_fields(record),
        *([f"log prob difference {record[DIFFERENCE]:.1e}"] if DIFFERENCE in record else []),
        f"grad norm {record['grad_norm']:.3f}",
        f"param norm {record['param_norm']:.3f}",
        f"{record['tokens_per_second']:.1f} tokens/s",
        f"{record['sequences_per_second']:.2f} seq/s",
    ]
    if "mfu" in record:
        fields.append(f"MFU {record['mfu']:.1%}")
    if record["skipped"]:
        fields.append(f"skipped {record['skipped']}")
    return " | ".join(fields)
