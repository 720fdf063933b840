"""Heartbeats: every rank records its last step in a small file, so that its launcher notices when no step ends.

A rank that waits for another one in a collective cannot report anything itself. The launcher therefore asks all its
ranks for their Python stacks with SIGUSR2, which faulthandler answers from C whatever the rank is doing, and compares
them: a rank outside a collective, or steps behind, is the one that the others wait for.
"""

import faulthandler
import mmap
import os
import re
import signal
import struct
import time
from collections import deque
from pathlib import Path
from statistics import median
from typing import NamedTuple
from zlib import crc32

HEARTBEAT_ENV = "TRAINYARD_HEARTBEAT"
"""Environment variable of each rank: the path of its heartbeat file."""
STACK_SIGNAL = signal.SIGUSR2
RECORD = struct.Struct("<qd")
"""The last step that ended (negative: the rank is not training), and the time of the last sign of life, on the
monotonic clock. Its CRC32 follows in the file: the launcher reads while the rank writes, and may see part of each."""
CHECKSUM = struct.Struct("<I")
HISTORY = 50
"""Steps whose times the median takes."""
HANG_FACTOR = 10
"""A hang takes at least this many times the median step."""
MIN_STEPS = 3
"""Steps before a median means anything; the first one compiles."""
COLLECTIVE_FRAME = re.compile(r"(process_group|collectives|distributed_c10d|_functional_collectives|rendezvous)\.py")
FRAME = re.compile(r'^  File "(.+)", line (\d+) in (.+)$', re.MULTILINE)


class Heartbeat:
    """The rank's side: records steps, and prints stacks when the launcher asks."""

    def __init__(self, path: Path) -> None:
        path.write_bytes(_encode(0))
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), RECORD.size + CHECKSUM.size)
        faulthandler.register(STACK_SIGNAL, all_threads=True)

    def beat(self, step: int) -> None:
        """Record a sign of life. A negative step means that no more steps follow."""
        self._map[:] = _encode(step)


def _encode(step: int) -> bytes:
    record = RECORD.pack(step, time.monotonic())
    return record + CHECKSUM.pack(crc32(record))


def heartbeat_from_environment() -> Heartbeat | None:
    """The heartbeat of this rank; None if no launcher watches it."""
    path = os.environ.pop(HEARTBEAT_ENV, None)
    return Heartbeat(Path(path)) if path else None


class StepTimes:
    """The launcher's view of one rank's heartbeat."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.step, self.time = 0, time.monotonic()
        self.first_step = 0
        """The first step that was seen to end."""
        self.durations: deque[float] = deque(maxlen=HISTORY)

    def poll(self) -> None:
        try:
            content = self.path.read_bytes()
        except OSError:  # not created yet
            return
        record = content[: RECORD.size]
        if len(record) < RECORD.size or content[RECORD.size :] != CHECKSUM.pack(crc32(record)):
            return  # the rank is writing; the next poll reads again
        step, when = RECORD.unpack(record)
        if step > self.step > 0:
            self.durations.append((when - self.time) / (step - self.step))
        self.first_step = self.first_step or step
        self.step, self.time = step, when

    def hang_limit(self, timeout: float) -> float | None:
        """Seconds without a step that mean a hang; None while the rank is not training."""
        if self.step < self.first_step + MIN_STEPS or not self.durations:
            return None
        return max(HANG_FACTOR * median(self.durations), timeout)


class RankStack(NamedTuple):
    """Where a rank was when its launcher asked."""

    rank: int
    step: int
    dump: str
    """The stacks of all its threads, as faulthandler prints them."""

    @property
    def in_collective(self) -> bool:
        return COLLECTIVE_FRAME.search(self.dump) is not None

    def describe_place(self) -> str:
        """The innermost frame of the main thread in this package; else the innermost one."""
        _, _, main_thread = self.dump.partition("Current thread 0x")
        frames = [f"{match[1]}:{match[2]} {match[3]}" for match in FRAME.finditer(main_thread)]
        return next((frame for frame in frames if "trainyard" in frame), frames[0] if frames else "an unknown place")


def find_suspect(stacks: list[RankStack]) -> str:
    """Name the rank that the others probably wait for, and where it is; empty if no rank differs."""
    latest = max((stack.step for stack in stacks), default=0)
    behind = [stack for stack in stacks if stack.step < latest]
    outside = [stack for stack in stacks if not stack.in_collective]
    if outside and len(outside) < len(stacks):
        return f"rank {outside[0].rank} is not in a collective as the others are, but at {outside[0].describe_place()}"
    return f"rank {behind[0].rank} is at step {behind[0].step}, others at {latest}" if behind else ""
