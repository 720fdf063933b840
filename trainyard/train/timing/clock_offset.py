"""Measures how the clocks of the ranks differ, so that traces of several hosts line up."""

import time
from collections.abc import Sequence
from typing import NamedTuple

from trainyard.parallel.mesh import Mesh

ROUNDS = 10
Meeting = tuple[int, int]
"""When a rank entered and left a collective, in ns of its own clock."""


class ClockOffset(NamedTuple):
    """What to add to a rank's clock to get that of rank 0."""

    offset_ns: int = 0
    error_ns: int = 0
    """Bound of the error, if neither clock was set in the meantime."""


def measure_clock_offset(mesh: Mesh) -> ClockOffset:
    """The offset of this rank's clock. All ranks call this together."""
    if mesh.world.size == 1:
        return ClockOffset()
    meetings: list[Meeting] = []
    for _ in range(ROUNDS):
        entered = time.time_ns()
        mesh.all_gather_object(None)
        meetings.append((entered, time.time_ns()))
    of_first_rank = dict(zip(mesh.rank_order, mesh.all_gather_object(meetings), strict=True))[0]
    return clock_offset(of_first_rank, meetings)


def clock_offset(reference: Sequence[Meeting], own: Sequence[Meeting]) -> ClockOffset:
    """The offset that follows from the same collectives on two clocks.

    Nobody leaves a collective before everybody has entered it. The moment at which the last rank enters therefore lies
    between entering and leaving on every clock, which bounds the offset in each round.
    """
    lower = max(first[0] - second[1] for first, second in zip(reference, own, strict=True))
    upper = min(first[1] - second[0] for first, second in zip(reference, own, strict=True))
    return ClockOffset((lower + upper) // 2, max(upper - lower, 0) // 2)
