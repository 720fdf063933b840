"""The flight recorders of a hung run: torch keeps the last collectives of each rank in memory, and writes them to a
file when something is written to the rank's named pipe.

The stacks of a hung run say where each rank waits; these files say which collective each rank entered last. The device
layer knows which variables make a rank record (Device.flight_recorder_environment).
"""

import os
import shutil
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

DIRECTORY = "flight-recorder"
"""Directory of the pipes and dumps, below that of the logs."""
DUMP_LIMIT_S = 10.0
"""Seconds for which the launcher waits for dumps; a rank looks at its pipe every second."""
DUMP_POLL_S = 0.25
"""A dump that has not grown for this many seconds is complete."""
READER = "torchfrtrace"
"""The command of torch that compares the dumps of a directory."""

RecorderEnvironment = Callable[[Path], Mapping[str, str]]
"""Returns the variables with which ranks create pipes `*.pipe` and dump to files in a directory; empty if the device
has no flight recorder."""


class FlightRecorders:
    """The pipes and dumps of the ranks of one launcher."""

    def __init__(self, logs: Path, environment: RecorderEnvironment) -> None:
        self.directory = logs.absolute() / DIRECTORY
        self.environment = dict(environment(self.directory))
        if self.environment:
            shutil.rmtree(self.directory, ignore_errors=True)  # of an earlier run with the same logs
            self.directory.mkdir(parents=True)

    def request_dumps(self) -> int:
        """Ask all ranks for a dump. Return how many were asked. Never blocks."""
        return sum(_request_dump(pipe) for pipe in self.directory.glob("*.pipe"))

    def wait_for_dumps(self, count: int) -> list[Path]:
        """Wait for `count` complete dumps, up to DUMP_LIMIT_S; return those that are there."""
        deadline, sizes = time.monotonic() + DUMP_LIMIT_S, self._dump_sizes()
        while count and time.monotonic() < deadline:
            time.sleep(DUMP_POLL_S)
            before, sizes = sizes, self._dump_sizes()
            if len(sizes) >= count and sizes == before:
                break
        return sorted(sizes, key=lambda path: (len(path.name), path.name))

    def close(self) -> None:
        """Remove the pipes, which torch leaves behind, and the directory if it has no dump."""
        for pipe in self.directory.glob("*.pipe"):
            pipe.unlink(missing_ok=True)
        with suppress(OSError):
            self.directory.rmdir()

    def _dump_sizes(self) -> dict[Path, int]:
        sizes = {path: path.stat().st_size for path in self.directory.glob("*") if path.is_file()}
        return {path: size for path, size in sizes.items() if size}


def describe_dumps(dumps: list[Path]) -> str:
    """Name the dumps and the command that reads them; empty if there are none."""
    if not dumps:
        return ""
    names = ",".join(path.name for path in dumps)
    directory = dumps[0].parent
    files = directory / (names if len(dumps) == 1 else f"{{{names}}}")
    return f"last collectives: {files}, compared by: {READER} {directory}"


def _request_dump(pipe: Path) -> bool:
    """Write to a pipe. Return False if the rank does not read it, or has not read an earlier request."""
    if not pipe.is_fifo():
        return False
    try:
        handle = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)  # otherwise it waits until a reader opens the pipe
    except OSError:
        return False
    try:
        return os.write(handle, b"dump\n") > 0
    except OSError:
        return False
    finally:
        os.close(handle)
