"""`trainyard profile`: Print the trace that profile.steps has written, by kind of kernel."""

import json
from typing import Annotated

from rich.console import Console
from rich.table import Table
from typer import Option

from trainyard.cli.console import print_line, terminal_safe
from trainyard.cli.options import AsJson, ExistingRun
from trainyard.core.constants import MIB
from trainyard.core.errors import UserError
from trainyard.metrics.kernel_profile import KernelTimes, StepTrace, find_traces, kernel_kind, read_trace, time_by_kind

OTHER_COLUMNS = 48
"""Width of the table of kernels without the names."""


def profile(
    run: ExistingRun,
    rank: Annotated[int | None, Option(min=0, help="Rank. Default: the first with a trace.")] = None,
    top: Annotated[int, Option(min=0, help="Kernels to list.")] = 10,
    as_json: AsJson = False,
) -> None:
    """Print where the time of the steps of profile.steps went: by kind of kernel, and the longest kernels.

    On a CPU, kernels are torch's operators, each without the operators that it calls.

    Examples:

      trainyard train my.yaml profile.steps=[10,12]

      trainyard profile runs/my-run
    """
    traces = find_traces(run)
    if not traces:
        raise UserError(f"{run}: has no profile; runs write one with profile.steps, such as profile.steps=[10,12]")
    selected = next((trace for trace in traces if rank in (None, trace.rank)), None)
    if not selected:
        raise UserError(f"--rank {rank}: has no trace; nearest: {traces[0].rank}")
    times = read_trace(selected.path)
    if not times.kernels:
        raise UserError(f"{selected.path}: the trace has no kernels and no operators")
    if as_json:
        print(json.dumps(profile_record(selected, times)))
    else:
        print_profile(selected, times, top)


def profile_record(trace: StepTrace, times: KernelTimes) -> dict[str, object]:
    """A trace as JSON; milliseconds are per step."""
    per_step = {name: time.milliseconds / trace.steps for name, time in times.kernels.items()}
    return {
        "trace": str(trace.path),
        "rank": trace.rank,
        "steps": [trace.first_step, trace.last_step],
        "on_device": times.on_device,
        "kinds_ms": time_by_kind(per_step),
        "kernels_ms": per_step,
        "peak_bytes": times.peak_bytes,
    }


def print_profile(trace: StepTrace, times: KernelTimes, top: int) -> None:
    """Print both tables; milliseconds are per step."""
    console = Console(highlight=False)
    per_step = {name: time.milliseconds / trace.steps for name, time in times.kernels.items()}
    kinds, total = time_by_kind(per_step), sum(per_step.values())
    what = "kernels" if times.on_device else "operators on the CPU"
    print_line(console, f"rank {trace.rank}, steps {trace.first_step} to {trace.last_step}: {what}, per step")
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for heading in ("kind", "ms", "share"):
        table.add_column(heading, justify="left" if heading == "kind" else "right", no_wrap=True)
    for kind, milliseconds in kinds.items():
        table.add_row(kind, f"{milliseconds:.2f}", f"{milliseconds / (total or 1):.1%}")
    table.add_row(f"all {'kernels' if times.on_device else 'operators'}", f"{total:.2f}", "")
    console.print(table)
    if top:
        console.print()
        print_kernels(console, trace, times, top)
    if times.peak_bytes:
        print_line(console, f"largest memory of torch's allocator: {times.peak_bytes / MIB:,.1f} MiB")
    print_line(console, f"open {trace.path} at https://ui.perfetto.dev")


def print_kernels(console: Console, trace: StepTrace, times: KernelTimes, top: int) -> None:
    """Print the kernels that take longest."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for heading in ("ms", "calls", "us each", "kind", "name"):
        table.add_column(heading, justify="left" if heading in ("kind", "name") else "right", no_wrap=True)
    width = max(console.width - OTHER_COLUMNS, 16)
    for name, time in sorted(times.kernels.items(), key=lambda item: -item[1].milliseconds)[:top]:
        milliseconds, calls = time.milliseconds / trace.steps, time.calls / trace.steps
        each = 1000 * time.milliseconds / time.calls
        shown = terminal_safe(name)
        shown = shown if len(shown) <= width else shown[: width - 3] + "..."
        table.add_row(f"{milliseconds:.2f}", f"{calls:.1f}", f"{each:.1f}", kernel_kind(name), shown)
    console.print(table, markup=False)
