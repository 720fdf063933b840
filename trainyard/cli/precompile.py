"""`trainyard precompile`: all that a run compiles, before it starts."""

from types import TracebackType
from typing import Annotated, Self

import typer
from rich.console import Console

from trainyard import devices
from trainyard.cli.signals import interrupt_on_terminate
from trainyard.cli.train import load_run_config
from trainyard.devices.neuron import parallel_compile
from trainyard.launch.launcher import threads_per_rank
from trainyard.precompile.precompile import PrecompiledGraph, PrecompileReport
from trainyard.precompile.precompile import precompile as compile_all
from trainyard.precompile.report import precompile_summary


class GraphProgress:
    """One line when a graph is done; in a terminal also what is under way."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.status = console.status("") if console.is_terminal else None
        self.compiling: dict[str, str] = {}
        self.done_count = 0

    def __enter__(self) -> Self:
        if self.status:
            self.status.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self.status:
            self.status.stop()

    def print_line(self, line: str) -> None:
        self.console.print(line, style="dim", soft_wrap=True, markup=False)

    def on_graph(self, graph: PrecompiledGraph) -> None:
        if graph.state == "compiling":
            self.compiling[graph.key] = graph.name
        else:
            self.compiling.pop(graph.key, None)
            self.done_count += 1
            took = f"{graph.seconds:.1f} s" if graph.seconds else "-"
            line = f"{self.done_count:4d}  {graph.state:8}  {took:>8}  {graph.name}"
            self.console.print(line, soft_wrap=True, markup=False)
        if self.status:
            self.status.update(f"compiling {len(self.compiling)}: {'; '.join(self.compiling.values())}")


def precompile(
    source: Annotated[str, typer.Argument(metavar="FILE|RECIPE", help="A YAML file or a recipe's name.")],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...")] = None,
    smoke: Annotated[bool, typer.Option("--smoke", help="For the same tiny trial as train --smoke.")] = False,
    nproc: Annotated[
        int | None, typer.Option("--nproc", min=1, help="Ranks of the run on each machine, as for train.")
    ] = None,
    ranks: Annotated[
        int | None, typer.Option("--ranks", min=1, help="Ranks in all. Default: --nproc, or layout.ranks of the file.")
    ] = None,
    workers: Annotated[
        int | None, typer.Option("--workers", min=1, help="Graphs compiled at a time. Default: one for each core.")
    ] = None,
) -> int:
    """Compile every graph of a run ahead of time, for any number of ranks, without its memory.

    The run must be the same in all that shapes its graphs: model, batch, layout, precision, number of threads. `train`
    then says `Compiled 0 graphs`. What fails is told with its log and tried again the next time.

    Examples:

      trainyard precompile my.yaml compile.enabled=true --nproc 8

      trainyard precompile my.yaml compile.enabled=true --nproc 8 --ranks 512

      trainyard precompile tiny-llama --smoke compile.enabled=true --workers 4

      trainyard cache pack my-run.tar
    """
    words = list(overrides or [])
    config = load_run_config(source, words, smoke, ranks or nproc or 1)
    total = ranks or nproc or (1 if smoke else config.layout.ranks or 1)
    device = devices.select(config.device.name)
    here = min(total, nproc or device.max_local_ranks())
    console = Console(highlight=False)
    if device.has_precompile_tool:
        return _precompile_with_device_compiler([source, *words, *["--smoke"] * smoke], here, workers, console)
    lines = GraphProgress(console)
    with interrupt_on_terminate(), lines:
        report: PrecompileReport = compile_all(
            config, total, here, workers or threads_per_rank(1), lines.print_line, lines.on_graph
        )
    for line in precompile_summary(report):
        console.print(line, soft_wrap=True, markup=False)
    return 1 if report.failed_graphs or report.problems else 0


def _precompile_with_device_compiler(words: list[str], ranks: int, workers: int | None, console: Console) -> int:
    """The device's own: a few steps of the run on this machine, traced and not executed; then its compiler."""

    def see(line: str) -> None:
        console.print(line, style="dim", soft_wrap=True, markup=False)

    run = parallel_compile.short_train_command(words[0], words[1:], ranks)
    with interrupt_on_terminate():
        report = parallel_compile.precompile(run, workers, on_line=see)
    for line in (
        f"Total graphs: {report.graphs}",
        f"Total successful compilations: {report.compiled}",
        f"Total failed compilations: {report.failed}",
        *(f"failed: {path}" for path in report.failures),
    ):
        console.print(line, soft_wrap=True, markup=False)
    return 1 if report.failed else 0
