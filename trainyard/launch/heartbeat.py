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
from typing import NamedTuple, Self
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
"""Steps before a median means anything; the first ones compile."""
EARLY_FACTOR = 6
"""Before MIN_STEPS steps, a hang takes this many times the time limit."""
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
        if self.step <= 0:
            return None
        if self.step < self.first_step + MIN_STEPS or not self.durations:
            return EARLY_FACTOR * timeout
        return max(HANG_FACTOR * median(self.durations), timeout)


class RankPlace(NamedTuple):
    """The place of a rank in its program when its launcher asked."""

    rank: int
    step: int
    in_collective: bool
    frame: str
    """The innermost frame of the main thread in this package, else the innermost one; empty if the rank was silent."""

    @classmethod
    def from_dump(cls, rank: int, step: int, dump: str) -> Self:
        """`dump` has the stacks of all threads, as faulthandler prints them."""
        _, _, main_thread = dump.partition("Current thread 0x")
        frames = [f"{match[1]}:{match[2]} {match[3]}" for match in FRAME.finditer(main_thread)]
        frame = next((frame for frame in frames if "trainyard" in frame), frames[0] if frames else "")
        return cls(rank, step, COLLECTIVE_FRAME.search(dump) is not None, frame)

    def describe(self) -> str:
        if not self.frame:
            return f"rank {self.rank} does not answer: it is stopped, or blocked in the kernel"
        where = "in" if self.in_collective else "outside of"
        return f"rank {self.rank} is {where} a collective, at {self.frame}"


def find_suspect(places: list[RankPlace]) -> RankPlace | None:
    """The rank that the others probably wait for; None if no rank differs."""
    latest = max((place.step for place in places), default=0)
    behind = [place for place in places if place.step < latest]
    outside = [place for place in places if not place.in_collective]
    if outside and len(outside) < len(places):
        return outside[0]
    return behind[0] if behind else None


def describe_hang(idle_s: float, places: list[RankPlace]) -> str:
    """Describe a hang as far as the launcher of these ranks can."""
    latest, suspect = max(place.step for place in places), find_suspect(places)
    if suspect and suspect.in_collective:
        blamed = f"rank {suspect.rank} is at step {suspect.step}, others at {latest}"
    elif suspect or len(places) == 1:
        blamed = (suspect or places[0]).describe()
    else:
        blamed = "every rank of this host waits for another host, or for its device"
    return f"no step for {idle_s:.0f} s after step {latest}; {blamed}"
