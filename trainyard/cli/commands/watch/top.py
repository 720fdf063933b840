"""`trainyard top`: Show a run and its devices live: utilization, memory, loss, speed, slowest rank."""

import json
import os
import select
import sys
import termios
import time
import tty
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated

from rich.console import Console
from rich.live import Live
from typer import Argument, Option

from trainyard.cli.commands.watch.top_screen import Snapshot, plain_line, screen
from trainyard.cli.console import interrupt_on_terminate
from trainyard.core.errors import UserError
from trainyard.devices.monitors import DeviceMonitor, HostMonitor, open_monitors
from trainyard.metrics.run_status import RunReader, find_running_run

RUNS = Path("runs")
FIRST_READING_S = 2.0
"""Limit of the wait for the first reading of the devices."""
POLL_S = 0.1
QUIT_KEYS = b"qQ\x03\x04"
"""q, and the characters of Ctrl-C and Ctrl-D."""


def top(
    run: Annotated[
        Path | None,
        Argument(metavar="RUN", help="Run directory. Default: the one that trains in ./runs.", show_default=False),
    ] = None,
    interval: Annotated[float, Option(min=0.2, help="Seconds between two readings.")] = 2.0,
    as_json: Annotated[bool, Option("--json", help="Print one JSON object per interval instead of a screen.")] = False,
    once: Annotated[bool, Option("--once", help="Print one reading and exit.")] = False,
) -> None:
    """Show a run and the devices of this machine live: utilization, memory, power; step, loss, speed, time left, and
    the rank that the others wait for.

    q or Ctrl-C quits. Without a terminal, each reading is one line.

    Examples:

      trainyard top

      trainyard top runs/my-run

      trainyard top --json --once
    """
    if run is not None and not any((run / name).is_file() for name in ("config.yaml", "run.json")):
        raise UserError(f"{run}: not a run directory: it has neither config.yaml nor run.json")
    console = Console(highlight=False)
    monitors = open_monitors()
    try:
        view = View(run, monitors)
        with interrupt_on_terminate(), suppress(KeyboardInterrupt):
            has_screen = console.is_terminal and not console.is_dumb_terminal and console.encoding.startswith("utf")
            if as_json or once or not has_screen:
                print_readings(view, interval, as_json, once)
            else:
                show_screen(view, console, interval)
    except BrokenPipeError:  # the reader of the output has ended
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    finally:
        for monitor in monitors:
            monitor.close()


class View:
    """Reads the run and the machine. Without a given run, it follows the one that trains."""

    def __init__(self, run: Path | None, monitors: list[DeviceMonitor]) -> None:
        self.monitors, self.host = monitors, HostMonitor()
        self.is_fixed = run is not None
        self.reader = RunReader(run) if run else None

    def wait_for_devices(self) -> None:
        """Wait until every monitor has something to say."""
        time.sleep(POLL_S)  # the interval of the first reading of the CPU
        deadline = time.monotonic() + FIRST_READING_S
        while time.monotonic() < deadline and not all(each.read() or each.problem() for each in self.monitors):
            time.sleep(POLL_S)

    def read(self) -> Snapshot:
        """The state now."""
        status = self.reader.read() if self.reader else None
        if not self.is_fixed and (status is None or status.state != "training"):
            found = find_running_run(RUNS)
            if found and (self.reader is None or found != self.reader.directory):
                self.reader = RunReader(found)
                status = self.reader.read()
        devices = [reading for monitor in self.monitors for reading in monitor.read()]
        problems = [problem for monitor in self.monitors if (problem := monitor.problem())]
        return Snapshot(time.time(), self.host.read(), devices, problems, status)


def print_readings(view: View, interval: float, as_json: bool, once: bool) -> None:
    """Print one line per interval."""
    view.wait_for_devices()
    while True:
        started_at, snapshot = time.monotonic(), view.read()
        print(json.dumps(snapshot.to_json()) if as_json else plain_line(snapshot), flush=True)
        if once:
            return
        time.sleep(max(started_at + interval - time.monotonic(), 0))


def show_screen(view: View, console: Console, interval: float) -> None:
    """Draw the screen until a key ends it. The terminal is restored however it ends."""
    view.wait_for_devices()
    with single_keys() as keys, Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            snapshot, next_read = view.read(), time.monotonic() + interval
            size = None
            while (now := time.monotonic()) < next_read:
                if size != console.size:  # also when the terminal has been resized
                    size = console.size
                    live.update(screen(snapshot, console), refresh=True)
                if pressed_quit(keys, min(next_read - now, POLL_S)):
                    return


@contextmanager
def single_keys() -> Iterator[int | None]:
    """Read keys from the terminal without waiting for Enter. Yields its file; None if the input is no terminal."""
    if not sys.stdin.isatty():
        yield None
        return
    handle = sys.stdin.fileno()
    settings = termios.tcgetattr(handle)
    try:
        tty.setcbreak(handle)
        yield handle
    finally:
        termios.tcsetattr(handle, termios.TCSADRAIN, settings)


def pressed_quit(keys: int | None, seconds: float) -> bool:
    """Wait for a key; True if it ends the view, or if the terminal is gone."""
    if keys is None:
        time.sleep(seconds)
        return False
    if not select.select([keys], [], [], seconds)[0]:
        return False
    pressed = os.read(keys, 64)
    return not pressed or any(key in QUIT_KEYS for key in pressed)
