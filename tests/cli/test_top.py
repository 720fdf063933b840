"""`trainyard top` in a terminal, read through a terminal emulator that others wrote (pyte)."""

import fcntl
import io
import json
import os
import pty
import re
import select
import shutil
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyte
import pytest
from rich.console import Console

from tests.support.span_files import write_span_file
from trainyard.cli.commands.watch.top_screen import BLOCKS, Snapshot, plain_line, screen, sparkline
from trainyard.devices.monitors import DeviceReading, HostMonitor, HostReading
from trainyard.metrics.run_directory import RunDirectory
from trainyard.metrics.run_status import RunReader, find_running_run

TIMEOUT_S = 90.0


class Terminal:
    """`trainyard top` in a pseudo-terminal."""

    def __init__(self, arguments: list[str], cwd: Path, columns: int = 80, rows: int = 24) -> None:
        self.screen = pyte.Screen(columns, rows)
        self.stream, self.raw = pyte.ByteStream(self.screen), b""
        self.master, self.slave = pty.openpty()
        self.resize(columns, rows)
        self.settings = termios.tcgetattr(self.slave)
        environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "trainyard", "top", "--interval", "0.2", *arguments],
            stdin=self.slave,
            stdout=self.slave,
            stderr=self.slave,
            cwd=cwd,
            env={**environment, "TERM": "xterm-256color", "PYTHONPATH": os.getcwd()},
            preexec_fn=self._become_session_leader,
        )

    def _become_session_leader(self) -> None:
        os.setsid()
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)  # Ctrl-C then reaches the command

    def resize(self, columns: int, rows: int) -> None:
        fcntl.ioctl(self.slave, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        self.screen.resize(rows, columns)

    def press(self, keys: bytes) -> None:
        os.write(self.master, keys)

    def wait_for(self, condition: Callable[[str], Any]) -> str:
        """The screen as soon as `condition` holds for its text."""
        deadline = time.monotonic() + TIMEOUT_S
        while not condition(text := "\n".join(line.rstrip() for line in self.screen.display)):
            assert time.monotonic() < deadline, text
            if select.select([self.master], [], [], 0.05)[0]:
                self._feed()
        return text

    def end(self) -> int:
        """Wait for the end; the terminal must be as it was before."""
        code = self.process.wait(TIMEOUT_S)
        while select.select([self.master], [], [], 0.1)[0]:
            self._feed()
        assert termios.tcgetattr(self.slave) == self.settings
        assert self.raw.rstrip().rfind(b"\x1b[?1049l") > self.raw.rfind(b"\x1b[?1049h")  # back from the other screen
        assert self.raw.rfind(b"\x1b[?25h") > self.raw.rfind(b"\x1b[?25l")  # the cursor is visible
        return code

    def _feed(self) -> None:
        data = os.read(self.master, 65536)
        self.raw += data
        self.stream.feed(data)


@pytest.fixture
def open_terminal() -> Iterator[Callable[..., Terminal]]:
    terminals: list[Terminal] = []

    def start(*arguments: Any, **options: Any) -> Terminal:
        terminals.append(Terminal(*arguments, **options))
        return terminals[-1]

    yield start
    for terminal in terminals:
        terminal.process.kill()
        terminal.process.wait()
        os.close(terminal.slave)
        os.close(terminal.master)


def metrics_line(step: int, **values: Any) -> str:
    record = {"step": step, "loss": 6 - step / 100, "tokens_per_second": 123_456.7, "mfu": 0.412}
    record |= {"ms_per_iteration": 210.0, "memory_bytes": 3 * 2**30}
    return json.dumps(record | values) + "\n"


def make_run(parent: Path, name: str = "run", steps: int = 100) -> RunDirectory:
    """A run that trains, as long as the directory is open."""
    run = RunDirectory.create(parent, name)
    (run.path / "config.yaml").write_text(f"train: {{steps: {steps}}}\n")
    (run.path / "metrics.jsonl").write_text("".join(metrics_line(step) for step in range(1, 41)))
    for rank in range(2):
        compute = 200 if rank else 150
        records = [
            record
            for step in range(1, 41)
            for record in (
                (step, "wait", 1, step * 10**9 + compute * 10**6, (201 - compute) * 10**6),
                (step, "step", 0, step * 10**9, 210 * 10**6),
            )
        ]
        write_span_file(run.path, rank, records, replica=rank, host="node[bold]2")
    return run


def test_screen_of_80_by_24(tmp_path: Path, open_terminal: Callable[..., Terminal]) -> None:
    with make_run(tmp_path / "runs") as run:
        terminal = open_terminal([], tmp_path)
        text = terminal.wait_for(lambda text: "tokens/s" in text)
        lines = text.splitlines()
        assert lines[0].startswith("runs/run: training ")
        assert lines[0].endswith("q: quit")
        assert re.match(r"step   40/100 ━+╸?━+ 40% +0:00:13 left", lines[1])
        assert re.match(rf"loss   5\.6000  █[{BLOCKS}]+▁$", lines[2])
        assert lines[3] == "speed  123,457 tokens/s   MFU 41.2%   210.0 ms/step   memory 3.0 GiB"
        assert lines[4] == "ranks  rank 1 (node[bold]2) last in 20 of 20 steps, others wait 50.0 of 210.0 ms"
        assert re.match(r"host   CPU +\d+% of \d+ cores [█░]{12}  RAM [\d.]+ of [\d.]+ GiB [█░]{12}", lines[6])
        with (run.path / "metrics.jsonl").open("a") as file:
            file.write(metrics_line(90, loss="nan"))
        terminal.wait_for(lambda text: "step   90/100" in text and "not finite" in text)
        terminal.resize(50, 10)
        text = terminal.wait_for(lambda text: re.match(r"runs/run: training .*q: quit\n", text))
        assert max(map(len, text.splitlines())) <= 50
        terminal.resize(120, 30)
        terminal.wait_for(lambda text: "others wait 50.0 of 210.0 ms" in text)
    terminal.wait_for(lambda text: "runs/run: not training" in text)
    shutil.rmtree(run.path)
    terminal.wait_for(lambda text: "runs/run: gone" in text)
    terminal.press(b"xq")
    assert terminal.end() == 0


def test_rewards_are_below_the_loss(tmp_path: Path) -> None:
    with make_run(tmp_path) as run:
        with (run.path / "metrics.jsonl").open("w") as file:
            for step in range(1, 41):
                file.write(metrics_line(step, **{"rewards/total": step / 40, "rewards/accuracy": 3.0}))
        status = RunReader(run.path).read()
        console = Console(width=80, height=24, file=io.StringIO(), force_terminal=False)
        snapshot = Snapshot(0.0, HostMonitor().read(), [], [], status)
        console.print(screen(snapshot, console))
        lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
        assert re.match(rf"loss   5\.6000  █[{BLOCKS}]+▁$", lines[2])
        assert re.match(rf"reward 1\.0000 mean  ▁[{BLOCKS}]+█$", lines[3])
        assert lines[4].startswith("speed ")
        assert max(map(len, lines)) <= 80
        assert "| loss 5.6000 | reward mean 1.0000 | " in plain_line(snapshot)
        with (run.path / "metrics.jsonl").open("a") as file:
            file.write(metrics_line(30, **{"rewards/total": 0.25}))
        status = RunReader(run.path).read()
        assert (status.reward_kind, status.reward, status.rewards[-2:]) == ("mean", 0.25, [29 / 40, 0.25])


def test_ctrl_c_ends_it_and_a_new_run_is_followed(tmp_path: Path, open_terminal: Callable[..., Terminal]) -> None:
    terminal = open_terminal([], tmp_path)
    terminal.wait_for(lambda text: "no run trains here" in text and "RAM" in text)
    with make_run(tmp_path / "runs", "later"):
        terminal.wait_for(lambda text: "runs/later: training" in text)
        terminal.press(b"\x03")
        assert terminal.end() == 0


def test_a_terminated_view_restores_the_terminal(tmp_path: Path, open_terminal: Callable[..., Terminal]) -> None:
    terminal = open_terminal([], tmp_path)
    terminal.wait_for(lambda text: "RAM" in text)
    terminal.process.send_signal(signal.SIGTERM)
    assert terminal.end() == 0


def test_lines_without_a_terminal(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "trainyard", "top", "--interval", "0.2"]
    environment = {**os.environ, "PYTHONPATH": os.getcwd()}
    with make_run(tmp_path / "runs"):
        process = subprocess.Popen(
            command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        assert process.stdout
        lines = [process.stdout.readline() for _ in range(2)]
        process.stdout.close()  # as `head -2` does
        assert process.wait(TIMEOUT_S) == 0
        assert process.stderr
        assert process.stderr.read() == ""
        for line in lines:
            assert re.match(r"[\d:]{8} \| runs/run \| training \| step 40/100 \| loss 5.6000 \| 123,457 tokens/s", line)
            assert "\x1b" not in line
        done = subprocess.run([*command, "--json", "--once"], cwd=tmp_path, env=environment, capture_output=True)
    record = json.loads(done.stdout)
    assert record["run"]["last"]["others_wait_ms"] == pytest.approx(50)
    assert record["run"]["seconds_left"] == pytest.approx(12.6)
    assert record["host"]["cores"] == os.cpu_count()
    assert record["devices"] == [] or record["devices"][0]["name"]


def test_the_newest_running_run_is_found(tmp_path: Path) -> None:
    assert find_running_run(tmp_path / "runs") is None
    with make_run(tmp_path, "old") as old, make_run(tmp_path, "new") as new:
        os.utime(old.path / "config.yaml", (1, 1))
        assert find_running_run(tmp_path) == new.path
        new.close()
        assert find_running_run(tmp_path) == old.path
    assert find_running_run(tmp_path) is None


def test_a_reader_follows_a_run_that_resumes_and_damaged_files(tmp_path: Path) -> None:
    with make_run(tmp_path) as run:
        reader = RunReader(run.path)
        assert reader.read().losses[-1] == pytest.approx(5.6)
        (run.path / "metrics.jsonl").write_text(metrics_line(1) + metrics_line(2, loss=1.5) + '{"step": 3, "loss"')
        assert reader.read().losses == [5.99, 1.5]
        (run.path / "metrics.jsonl").write_bytes(b'\xff\n[]\n{"step": "x", "loss": 1}\n{"step": 4, "loss": "inf"}\n')
        (run.path / "config.yaml").write_text("train: 3\n")
        for path in (run.path / "spans").iterdir():
            path.write_bytes(b"\x00" * 100)
        status = reader.read()
        assert (status.steps, status.loss, status.last, status.seconds_left) == (None, None, None, None)
        (run.path / "config.yaml").write_text("a: [\n")
        assert reader.read().steps is None


def drawn(count: int, columns: int, rows: int) -> list[str]:
    """The screen of a host with `count` devices, in a terminal of this size."""
    console = Console(width=columns, height=rows, file=io.StringIO(), force_terminal=True, color_system=None)
    devices = [
        DeviceReading(f"core {index}", 0.5, 120 * 2**30, 139 * 2**30 if index % 2 else None, 652.0)
        for index in range(count)
    ]
    snapshot = Snapshot(0.0, HostReading(1.0, 192, 2**40, 2**41), devices, ["a problem"], None)
    console.print(screen(snapshot, console))
    return console.file.getvalue().splitlines()  # type: ignore[attr-defined]


@pytest.mark.parametrize(("columns", "rows"), [(120, 24), (200, 50), (320, 70)])
@pytest.mark.parametrize("count", [1, 8, 128])
def test_large_terminal_is_used(count: int, columns: int, rows: int) -> None:
    """Bars grow with the width; devices that do not fit below each other stand side by side."""
    lines = drawn(count, columns, rows)
    assert len(lines) <= rows
    assert max(map(len, lines)) <= columns
    for line in (line for line in lines if line.startswith(("host", "core 0 "))):
        assert len(line.rstrip()) > 0.7 * columns, line
    shown = len(re.findall(r"core \d+ ", "\n".join(lines)))
    assert shown == count or (columns, rows) != (320, 70)
    assert shown >= min(count, (columns // 80) * (rows - 8))


@pytest.mark.parametrize("count", [1, 8, 16, 128])
def test_devices_fit_80_by_24(count: int) -> None:
    lines = drawn(count, 80, 24)
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 80
    shown = [line for line in lines if line.startswith("core ")]
    assert all(line.endswith("652 W") for line in shown)
    left_out = f"and {count - len(shown)} more of {count}, 50% busy on average"
    assert (left_out in lines) == (count > 16)


def test_sparkline() -> None:
    assert sparkline([], 10) == ""
    assert sparkline([3.0], 10) == BLOCKS[0]
    assert sparkline([0.0, 7.0, 1.0], 10) == "▁█▂"
    assert sparkline([float(value) for value in range(100)], 8) == BLOCKS
    assert len(sparkline([float(value) for value in range(512)], 300)) == 300
