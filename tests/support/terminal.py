"""Run a command in a pseudo-terminal and read what its screen shows, scrollback included."""

import fcntl
import os
import pty
import select
import struct
import subprocess
import sys
import termios
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import pyte

from tests.support.forkserver import ForkedProcess, ForkServer

ROWS = 24
POLL_S = 0.05


class RecordingScreen(pyte.HistoryScreen):
    """A terminal that remembers the words it broke because a line was too long for it."""

    broken_words: list[str]

    def draw(self, data: str) -> None:
        for char in data:
            if self.cursor.x == self.columns and not char.isspace():
                line = "".join(self.buffer[self.cursor.y][column].data for column in range(self.columns))
                if not line[-1].isspace():
                    self.broken_words.append(line)
            super().draw(char)


class TerminalRun(NamedTuple):
    exit_code: int
    lines: list[str]
    """Every line of the terminal, as a user sees it."""
    broken_words: list[str]
    """Lines that the terminal itself wrapped inside a word."""


def run_in_terminal(
    arguments: Sequence[str | Path],
    columns: int = 80,
    cwd: Path | None = None,
    server: ForkServer | None = None,
    on_screen: Callable[[list[str]], None] = lambda lines: None,
    answers: Iterable[str] = (),
) -> TerminalRun:
    """Run `trainyard *arguments`.

    With `server` the command is a fork, otherwise a new Python. `on_screen` sees the lines whenever the command has
    drawn something. Each line that ends with a colon and waits there is answered.
    """
    typed = iter(answers)
    screen = RecordingScreen(columns, ROWS, history=10_000, ratio=0.5)
    screen.broken_words = []
    stream = pyte.ByteStream(screen)
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, columns, 0, 0))
    environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}
    environment |= {"TERM": "xterm-256color"}
    process: ForkedProcess | subprocess.Popen[bytes]
    if server:
        process = server.start(arguments, cwd, environment, terminal=os.ttyname(slave))
    else:
        command = [sys.executable, "-m", "trainyard", *map(str, arguments)]
        process = subprocess.Popen(command, stdin=slave, stdout=slave, stderr=slave, cwd=cwd, env=environment)
    try:
        while True:
            if select.select([master], [], [], POLL_S)[0]:
                stream.feed(os.read(master, 65536))
                on_screen(lines_of(screen))
                if screen.display[screen.cursor.y].rstrip().endswith(":") and screen.cursor.x:
                    os.write(master, f"{next(typed)}\n".encode())
            elif process.poll() is not None:
                return TerminalRun(process.wait(), lines_of(screen), screen.broken_words)
    finally:
        process.kill()
        process.wait()
        os.close(slave)
        os.close(master)


def lines_of(screen: pyte.HistoryScreen) -> list[str]:
    """The lines that scrolled out at the top, and those of the screen, without spaces and empty lines at the end."""
    above = ["".join(row[column].data for column in range(screen.columns)) for row in screen.history.top]
    lines = [line.rstrip() for line in (*above, *screen.display)]
    while lines and not lines[-1]:
        lines.pop()
    return lines
