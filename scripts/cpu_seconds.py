"""A pytest plugin that prints a Markdown table of the CPU seconds of each test file, child processes included.

PYTHONPATH=scripts .venv/bin/python -m pytest -n 0 -p cpu_seconds [files]

Wall time says little on a shared machine, and much of the work is done by processes that tests start. What an orphan
uses after its parent has ended is not counted. Linux only.
"""

import os
from collections import Counter
from pathlib import Path

import pytest

TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
MAX_ROWS = 25


def process_tree_seconds(root: int) -> float:
    """CPU seconds of a process, its descendants, and the descendants that they have waited for."""
    ticks: dict[int, int] = {}
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        pid = int(path.parent.name)
        ticks[pid] = sum(map(int, fields[11:15]))  # utime, stime, cutime, cstime
        children.setdefault(int(fields[1]), []).append(pid)
    waiting, total = [root], 0
    while waiting:
        pid = waiting.pop()
        total += ticks.get(pid, 0)
        waiting += children.get(pid, [])
    return total / TICKS_PER_SECOND


class CpuSeconds:
    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()
        self.before = 0.0

    def _add(self, name: str) -> None:
        now = process_tree_seconds(os.getpid())
        self.seconds[name] += now - self.before
        self.before = now

    def pytest_collection_finish(self) -> None:
        self._add("start and collection")

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._add(report.nodeid.partition("::")[0].removesuffix(".py"))

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        rows = self.seconds.most_common(MAX_ROWS)
        rest = self.seconds.total() - sum(seconds for _, seconds in rows)
        rows += [(f"{len(self.seconds) - len(rows)} others", rest), ("all", self.seconds.total())]
        for name, seconds in [("file", "CPU seconds"), ("---", "---:")]:
            terminalreporter.write_line(f"| {name} | {seconds} |")
        for name, value in rows:
            terminalreporter.write_line(f"| {name} | {value:.1f} |")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(CpuSeconds())
