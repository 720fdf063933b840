"""`trainyard precompile`: Compile all graphs of a run ahead of time."""

from contextlib import nullcontext
from functools import partial
from typing import Annotated

from rich.console import Console
from typer import Option

from trainyard import devices
from trainyard.cli.console import interrupt_on_terminate, print_line
from trainyard.cli.options import ConfigSource, Overrides, Smoke, check_workers
from trainyard.cli.run_config import load_run_config
from trainyard.config.load import parse
from trainyard.devices.neuron import parallel_compile
from trainyard.launch.launcher import threads_per_rank
from trainyard.preflight.precompile.precompile import PrecompiledGraph
from trainyard.preflight.precompile.precompile import precompile as precompile_graphs


class GraphProgress:
    """Prints one line per finished graph and, in a terminal, the graphs that are compiling."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.status = console.status("") if console.is_terminal else None
        self.compiling: dict[str, str] = {}
        self.done_count = 0

    def on_graph(self, graph: PrecompiledGraph) -> None:
        if graph.state == "compiling":
            self.compiling[graph.key] = graph.name
        else:
            self.compiling.pop(graph.key, None)
            self.done_count += 1
            seconds = f"{graph.seconds:.1f} s" if graph.seconds else "-"
            print_line(self.console, f"{self.done_count:4d}  {graph.state:8}  {seconds:>8}  {graph.name}")
        if self.status:
            self.status.update(f"compiling {len(self.compiling)}: {'; '.join(self.compiling.values())}")


def precompile(
    source: ConfigSource,
    overrides: Overrides = None,
    smoke: Smoke = False,
    nproc: Annotated[int | None, Option(min=1, help="Ranks per machine, as for train.")] = None,
    ranks: Annotated[
        int | None, Option(min=1, help="Total ranks. Default: --nproc, or layout.ranks of the file.")
    ] = None,
    workers: Annotated[
        int | None, Option(min=1, callback=check_workers, help="Graphs to compile in parallel. Default: one per core.")
    ] = None,
) -> int:
    """Compile all graphs of a run ahead of time, for any number of ranks, without their memory.

    The run must match in everything that shapes its graphs: model, micro batch, layout, precision, number of threads.
    `train` with compile.enabled=true then reports `Compiled 0 graphs`. A failed graph leaves a log, and the next
    precompile retries it.

    Examples:

      trainyard precompile my.yaml --nproc 8

      trainyard precompile my.yaml --ranks 512

      trainyard precompile tiny-llama --smoke

      trainyard cache pack my-run.tar
    """
    override_list = list(overrides or [])
    config = load_run_config(source, override_list, smoke, ranks or nproc or 1)
    console = Console(highlight=False)
    if not config.compile.enabled and not any(text.startswith("compile.enabled=") for text in override_list):
        config = parse(config.model_dump(mode="json"), ["compile.enabled=true"])
        print_line(console, "note: the file does not compile; train with compile.enabled=true to use the result")
    total = ranks or nproc or (1 if smoke else config.layout.ranks or 1)
    device = devices.select(config.device.name)
    local_ranks = min(total, nproc or device.max_local_ranks())
    if device.has_precompile_tool:
        train_arguments = [*override_list, *["--smoke"] * smoke]
        return _precompile_with_device_tool(source, train_arguments, local_ranks, workers, console)
    progress = GraphProgress(console)
    print_dim = partial(print_line, console, style="dim")
    with interrupt_on_terminate(), progress.status or nullcontext():
        workers = workers or threads_per_rank(1)
        report = precompile_graphs(config, total, local_ranks, workers, print_dim, progress.on_graph)
    for line in report.summary():
        print_line(console, line)
    return 1 if report.failed_graphs or report.problems else 0


def _precompile_with_device_tool(
    source: str, arguments: list[str], ranks: int, workers: int | None, console: Console
) -> int:
    """Let the device's own tool trace a few steps on this machine without executing them, then compile the graphs."""
    command = parallel_compile.short_train_command(source, arguments, ranks)
    with interrupt_on_terminate():
        report = parallel_compile.precompile(command, workers, on_line=partial(print_line, console, style="dim"))
    print_line(console, f"Total graphs: {report.graphs}")
    print_line(console, f"Total successful compilations: {report.compiled}")
    print_line(console, f"Total failed compilations: {report.failed}")
    for path in report.failures:
        print_line(console, f"failed: {path}")
    return 1 if report.failed else 0
