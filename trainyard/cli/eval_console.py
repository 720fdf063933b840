"""Output of `trainyard eval`: progress while it runs, then a table with a row per data set or task."""

from collections.abc import Mapping, Sequence
from typing import Any, Self

from rich import box
from rich.table import Table

from trainyard.cli.console import ProgressDisplay

HIDDEN = ("data", "bytes", "seconds")
"""Results that are only in the JSON document, or in a column of their own."""
INTEGERS = ("tokens", "seq_len")


class EvalProgress:
    """A progress bar for each phase: reading tensors, then the batches of each data set."""

    def __init__(self, enabled: bool) -> None:
        self.enabled = enabled
        self.label, self.display = "", None

    label: str
    display: ProgressDisplay | None

    def __enter__(self) -> Self:
        return self

    def update(self, label: str, done: int, total: int) -> None:
        if not self.enabled:
            return
        if self.display is None or self.label != label:
            self.close()
            self.label, self.display = label, ProgressDisplay(label, items=True)
        self.display.update(done, total)
        if done == total:
            self.close()

    def close(self) -> None:
        if self.display:
            self.display.__exit__()
        self.display = None

    def __exit__(self, *error: object) -> None:
        self.close()


def results_table(results: Sequence[Mapping[str, Any]]) -> Table:
    """A row per data set. Columns are those that any data set has."""
    columns = list(dict.fromkeys(name for result in results for name in result if name not in HIDDEN))
    table = Table("data", box=box.SIMPLE_HEAD)
    for name in columns:
        table.add_column(name.replace("_", " "), justify="right")
    for result in results:
        table.add_row(result["data"], *(_cell(name, result.get(name)) for name in columns))
    return table


def task_table(results: Mapping[str, Mapping[str, Any]]) -> Table:
    """A row per task and metric of lm-evaluation-harness."""
    table = Table("task", "metric", box=box.SIMPLE_HEAD)
    for name in ("value", "stderr"):
        table.add_column(name, justify="right")
    for task, metrics in results.items():
        for metric, value in metrics.items():
            if isinstance(value, float) and "_stderr" not in metric:
                error = metrics.get(metric.replace(",", "_stderr,"))
                table.add_row(task, metric.removesuffix(",none"), f"{value:.4f}", _cell("stderr", error))
    return table


def _cell(name: str, value: Any) -> str:
    if not isinstance(value, int | float):
        return "-"
    return f"{value:,}" if name in INTEGERS else f"{value:.6f}" if name == "loss" else f"{value:.4f}"
