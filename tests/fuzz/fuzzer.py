"""Runs `trainyard` on bad input and checks how it ends: no traceback, no signal, no hang, bounded memory, one line.

`bench/fuzz.py` runs all inputs and counts them; `test_fuzz.py` runs a part. Every input is a command of its own, forked
from a process that has imported the package, so what is tested is what a user starts.
"""

import os
import re
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.support.forkserver import ForkServer

LIMIT_S = 30.0
MEMORY_GIB = 4
"""Limit on the data of one process. A command that has imported torch starts with about 1 GiB."""


class Fuzzer:
    """Runs commands with limits, counts them, and raises AssertionError for one that ends badly."""

    def __init__(self, server: ForkServer, corpus: Path, scratch: Path) -> None:
        """`corpus` has the undamaged files (corpus.py)."""
        self.server, self.corpus, self.scratch = server, corpus, scratch
        self.inputs, self.refused, self.slowest_s = 0, 0, 0.0

    def directory(self) -> Path:
        """An empty directory for the files of one input."""
        shutil.rmtree(self.scratch, ignore_errors=True)
        self.scratch.mkdir(parents=True)
        return self.scratch

    def copy(self, name: str) -> Path:
        """A copy of a file or directory of the corpus. Files are links: replace them, never write into them."""
        target = self.directory() / name
        if (self.corpus / name).is_dir():
            shutil.copytree(self.corpus / name, target, copy_function=lambda a, b: Path(b).hardlink_to(a))
        else:
            for file in self.corpus.glob(f"{Path(name).stem}.*"):  # .bin belongs to .idx
                (self.scratch / file.name).hardlink_to(file)
        return target

    def run(self, arguments: Sequence[str], environment: Mapping[str, str] | None = None) -> int:
        """Run a command in the scratch directory and check how it ends. Returns its exit code."""
        self.inputs += 1
        base = {**os.environ, "XDG_CACHE_HOME": str(self.scratch / "cache"), "TERM": "dumb"}
        start = time.monotonic()
        try:
            done = self.server.run(
                arguments, self.scratch, {**base, **(environment or {})}, LIMIT_S, memory_bytes=MEMORY_GIB << 30
            )
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{arguments}: no answer in {LIMIT_S:.0f} s") from None
        self.slowest_s = max(self.slowest_s, time.monotonic() - start)
        check_end(arguments, done)
        self.refused += done.returncode != 0
        return done.returncode


def check_end(arguments: Sequence[str], done: "subprocess.CompletedProcess[str]") -> None:
    shown = f"{list(arguments)} -> {done.returncode}\n{done.stderr[-3000:]}"
    assert "Traceback" not in done.stdout + done.stderr, shown
    assert "panicked" not in done.stderr, shown
    assert done.returncode in (0, 1, 2), shown
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.startswith("trainyard: ")]
        assert len(lines) == 1, shown
        assert len(re.sub(r"\s", "", lines[0])) > len("trainyard:"), shown
