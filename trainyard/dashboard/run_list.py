"""The list of runs, of which a client asks only for what has changed."""

import os
import threading
import uuid
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainyard.core.errors import UserError
from trainyard.dashboard.run_files import RunDirectoryReader, is_plain_name
from trainyard.dashboard.run_summary import RunRow, WatchedState, is_run, read_summary, run_state

READERS = 8
"""Runs that are read at the same time: a disk that is asked for one file after the other is slow."""
MAX_RUNS = 2000
"""Of more runs, those whose directories changed last are listed."""


@dataclass
class _Entry:
    state: tuple[WatchedState, bool, bool]
    summary: RunRow
    version: int
    """The version of the list in which the summary last changed."""


class RunList:
    """Summaries of all runs in a directory. A summary is read again when a file of its run has changed."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._epoch = uuid.uuid4().hex[:8]
        self._version = 0
        self._entries: dict[str, _Entry] = {}
        self._left_out = 0
        self._lock = threading.Lock()
        self._readers = ThreadPoolExecutor(READERS, "runs")

    def open(self, name: str) -> RunDirectoryReader:
        """A run by name. Raises UserError if there is none."""
        run = RunDirectoryReader(self.root, name)
        if not is_run(run):
            raise UserError(f"{name}: no such run")
        return run

    def changes(self, since: str = "") -> dict[str, Any]:
        """The summaries that changed after version `since`, and the names of all runs."""
        with self._lock:
            self._refresh()
            epoch, _, number = since.partition("-")
            known = int(number) if epoch == self._epoch and number.isdecimal() and len(number) < 16 else -1
            changed = [entry.summary.to_json() for entry in self._entries.values() if entry.version > known]
            return {
                "version": f"{self._epoch}-{self._version}",
                "names": list(self._entries),
                "runs": changed,
                "left_out": self._left_out,
            }

    def _refresh(self) -> None:
        names = self._names()
        version = self._version + 1
        entries: dict[str, _Entry] = {}
        changed = False
        for name, found in zip(names, self._readers.map(self._read, names), strict=True):
            if found is None:
                continue
            (state, summary), old = found, self._entries.get(name)
            entries[name] = old if old and old.summary == summary else _Entry(state, summary, version)
            entries[name].state = state
            changed |= entries[name].version == version
        self._entries = entries
        self._version += changed

    def _read(self, name: str) -> tuple[tuple[WatchedState, bool, bool], RunRow] | None:
        """State and summary of a run, which is read only if the state has changed; None if it is not a run."""
        try:
            run = RunDirectoryReader(self.root, name)
        except UserError:  # it has just been removed
            return None
        state, old = run_state(run), self._entries.get(name)
        if old and old.state == state:
            return state, old.summary
        return (state, read_summary(run, state)) if is_run(run) else None

    def _names(self) -> list[str]:
        """Directories that may be runs, those that changed last first if there are too many."""
        found = []
        try:
            with os.scandir(self.root) as items:
                for item in items:
                    if is_plain_name(item.name) and item.is_dir(follow_symlinks=False):
                        found.append(item.name)
        except OSError:  # the directory does not exist yet
            return []
        self._left_out = max(len(found) - MAX_RUNS, 0)
        if self._left_out:
            found.sort(key=self._modified, reverse=True)
        return sorted(found[:MAX_RUNS])

    def _modified(self, name: str) -> float:
        try:
            return (self.root / name).stat(follow_symlinks=False).st_mtime
        except OSError:
            return 0.0
