"""What `trainyard top` shows: a snapshot of a run and of the machine as JSON, as one line, or as a screen."""

import time
from datetime import timedelta
from itertools import pairwise
from typing import Any, NamedTuple

from rich.console import Console, Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from trainyard.cli.console import terminal_safe
from trainyard.core.constants import GIB
from trainyard.core.quantities import counted
from trainyard.core.world import host_name
from trainyard.devices.monitors import DeviceReading, HostReading
from trainyard.metrics.run_status import RunStatus

BLOCKS = "▁▂▃▄▅▆▇█"
LABEL_WIDTH = 7
MIN_WIDTH = 80
"""Columns of the terminal for which the rows are made. Bars grow with wider ones, and devices get more columns."""
BAR_WIDTH = 12


class Snapshot(NamedTuple):
    """Everything that is shown at one moment."""

    time: float
    """Unix seconds."""
    host: HostReading
    devices: list[DeviceReading]
    problems: list[str]
    run: RunStatus | None

    def to_json(self) -> dict[str, Any]:
        run = self.run
        return {
            "time": self.time,
            "hostname": host_name(),
            "host": self.host._asdict(),
            "devices": [device._asdict() for device in self.devices],
            "problems": self.problems,
            "run": None
            if run is None
            else run._asdict() | {"directory": str(run.directory), "last": run.last and run.last._asdict()},
        }


def plain_line(snapshot: Snapshot) -> str:
    """One line of text, for output that is not a terminal."""
    host, run = snapshot.host, snapshot.run
    fields = [time.strftime("%H:%M:%S", time.localtime(snapshot.time))]
    if run:
        fields += [str(run.directory), run.state, f"step {_of(run.step, run.steps)}"]
        fields += [f"loss {run.loss:.4f}"] if run.loss is not None else []
        fields += [f"reward {run.reward_kind} {run.reward:.4f}"] if run.reward is not None else []
        fields += speed_fields(run)
    fields += [f"CPU {host.cpu:.0%}", f"RAM {_gib(host.memory_used, host.memory_total)}"]
    for device in snapshot.devices:
        fields.append(f"{device.name} {_percent(device.utilization)} {_gib(device.memory_used, device.memory_total)}")
    return terminal_safe(" | ".join([*fields, *snapshot.problems]))


def screen(snapshot: Snapshot, console: Console) -> RenderableType:
    """The screen, as wide and high as the terminal."""
    width, height = console.size
    run, clock = snapshot.run, time.strftime("%H:%M:%S", time.localtime(snapshot.time))
    title = _title(run, width - len(clock) - len("   q: quit"))
    heading = Text(title.ljust(width - len(clock) - len("   q: quit")), style="bold")
    rows: list[RenderableType] = [Text.assemble(heading, (clock, "dim"), ("   q: quit", "dim"))]
    rows += run_rows(run, width) if run else [Text("no run trains here; this is the machine", style="dim")]
    rows += [Text(), host_row(snapshot.host, width)]
    rows += device_rows(snapshot.devices, max(height - len(rows) - 2 - len(snapshot.problems), 1), width)
    rows += [Text(terminal_safe(problem), style="yellow") for problem in snapshot.problems]
    for row in rows:
        if isinstance(row, Text):
            row.truncate(width, overflow="ellipsis")
            row.no_wrap = True
    return Group(*rows[:height])


def run_rows(run: RunStatus, width: int) -> list[RenderableType]:
    """Progress, loss, reward if there is one, speed and the slowest rank of a run."""
    bar = Table.grid(padding=(0, 1, 0, 0))
    left = f"{timedelta(seconds=round(run.seconds_left))} left" if run.seconds_left is not None else ""
    share = f"{run.step / run.steps:.0%}" if run.steps else ""
    step = _of(run.step, run.steps)
    room = max(width - LABEL_WIDTH - len(step) - len(share) - len(left) - 5, 4)
    bar.add_row(
        Text(_label("step") + step),
        ProgressBar(total=run.steps or 1, completed=min(run.step, run.steps or 1), width=room),
        Text(share),
        Text(left),
    )
    loss = f"{run.loss:.4f}" if run.loss is not None else "-" if not run.losses else "not finite"
    reward = f"{run.reward:.4f} {run.reward_kind}" if run.reward is not None else "not finite"
    memory = f"memory {run.memory_bytes / GIB:.1f} GiB" if run.memory_bytes is not None else ""
    return [
        bar,
        _curve("loss", loss, run.losses, width),
        *([_curve("reward", reward, run.rewards, width)] if run.rewards else []),
        Text(_label("speed") + "   ".join(filter(None, [*speed_fields(run), memory]))),
        Text(_label("ranks") + slowest(run)),
    ]


def _curve(name: str, last: str, values: list[float], width: int) -> Text:
    line = sparkline(values, max(width - LABEL_WIDTH - len(last) - 3, 1))
    return Text.assemble(_label(name), last, "  ", (line, "cyan"))


def speed_fields(run: RunStatus) -> list[str]:
    """Tokens per second, MFU and step time, where they are known."""
    speed, mfu, step_ms = run.tokens_per_second, run.mfu, run.ms_per_iteration
    fields = (("{:,.0f} tokens/s", speed), ("MFU {:.1%}", mfu), ("{:,.1f} ms/step", step_ms))
    return [text.format(value) for text, value in fields if value is not None]


def slowest(run: RunStatus) -> str:
    """The rank that the others wait for."""
    if last := run.last:
        ranks = [str(rank) for rank in last.ranks[:4]] + (["..."] if len(last.ranks) > 4 else [])
        names = f"rank{'s' * (len(ranks) > 1)} {', '.join(ranks)} ({terminal_safe(last.hosts[0])})"
        return (
            f"{names} last in {last.steps} of {run.compared_steps} steps, others wait {last.others_wait_ms:.1f} "
            f"of {last.step_ms:.1f} ms"
        )
    if run.straggler_ratio is not None:
        return f"the slowest takes {run.straggler_ratio:.2f} times the median"
    return "nothing to compare"


def host_row(host: HostReading, width: int) -> Text:
    """CPU and RAM."""
    return Text.assemble(
        _label("host"),
        f"CPU {host.cpu:>4.0%} of {counted(host.cores, 'core')} ",
        *bar(host.cpu, width),
        f"  RAM {_gib(host.memory_used, host.memory_total)} ",
        *bar(host.memory_used / max(host.memory_total, 1), width),
    )


def device_rows(devices: list[DeviceReading], room: int, width: int) -> list[RenderableType]:
    """The devices in `room` rows, in several columns if they do not fit in one, and how many are left out."""
    columns = max(min(-(-len(devices) // room), width // MIN_WIDTH), 1)
    shown = devices if len(devices) <= room * columns else devices[: (room - 1) * columns]
    cells: list[Text] = []
    label_width = max([LABEL_WIDTH, *(len(device.name) + 1 for device in shown)])
    for device in shown:
        memory = (device.memory_used or 0) / device.memory_total if device.memory_total else 0.0
        power = f"  {device.power_watts:.0f} W" if device.power_watts is not None else ""
        cell = Text.assemble(
            f"{terminal_safe(device.name):<{label_width}}",
            f"{_percent(device.utilization):>4} ",
            *bar(device.utilization or 0.0, width // columns),
            f"  {_gib(device.memory_used, device.memory_total):>18} ",
            *bar(memory, width // columns),
            power,
        )
        cell.truncate(width // columns, pad=columns > 1)
        cells.append(cell)
    height = -(-len(cells) // columns)
    rows: list[RenderableType] = [Text.assemble(*cells[row::height]) for row in range(height)]
    if len(shown) < len(devices):
        known = [device.utilization for device in devices if device.utilization is not None]
        mean = f", {sum(known) / len(known):.0%} busy on average" if known else ""
        rows.append(Text(f"and {len(devices) - len(shown)} more of {len(devices)}{mean}", style="dim"))
    return rows


def sparkline(values: list[float], width: int) -> str:
    """The values as blocks of different height. If they do not fit, each block is the mean of some."""
    if not values:
        return ""
    count = min(len(values), max(width, 1))
    ends = [len(values) * block // count for block in range(count + 1)]
    means = [sum(values[start:end]) / (end - start) for start, end in pairwise(ends)]
    low, high = min(means), max(means)
    if high == low:
        return BLOCKS[0] * len(means)
    return "".join(BLOCKS[round((value - low) / (high - low) * (len(BLOCKS) - 1))] for value in means)


def bar(fraction: float, width: int) -> list[tuple[str, str]]:
    """One of two bars in a row of `width` columns."""
    size = BAR_WIDTH + max(width - MIN_WIDTH, 0) // 2
    filled = min(max(round(fraction * size), 0), size)
    return [("█" * filled, "green"), ("░" * (size - filled), "dim")]


def _title(run: RunStatus | None, width: int) -> str:
    name = f"{terminal_safe(str(run.directory))}: {run.state}" if run else terminal_safe(host_name())
    return name if len(name) <= width else "..." + name[-max(width - 3, 1) :]


def _label(text: str) -> str:
    return text.ljust(LABEL_WIDTH)


def _of(step: int, steps: int | None) -> str:
    return f"{step}/{steps}" if steps else str(step)


def _percent(fraction: float | None) -> str:
    return "-" if fraction is None else f"{fraction:.0%}"


def _gib(used: int | None, total: int | None) -> str:
    if used is None:
        return "-" if total is None else f"- of {total / GIB:.1f} GiB"
    return f"{used / GIB:.1f} GiB" if total is None else f"{used / GIB:.1f} of {total / GIB:.1f} GiB"
