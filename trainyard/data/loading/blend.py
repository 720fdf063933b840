"""Several sources by weight. Which one a global index is of, and which of its samples, follows from the index alone.

Every CYCLE indices have each source as often as its weight says, at random places; a source's samples come in its own
shuffled order, each once per epoch of that source, however the others are sized.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from trainyard.core.counter_rng import key64
from trainyard.core.errors import UserError
from trainyard.data.loading.dataset import Sample, Source, gathered
from trainyard.data.loading.shuffle import shuffled

CYCLE = 1 << 14


class Blend:
    """A Source without end: any number from 0 on is a sample, and they are in order already."""

    def __init__(self, sources: Sequence[Source], weights: Sequence[float], seed: int) -> None:
        self.sources = sources
        self.seeds = [key64(seed, "blend", number) for number in range(len(sources))]
        self.cycle_seed = key64(seed, "cycle")
        self.shares = shares(weights, CYCLE)
        if (self.shares == 0).any():
            raise UserError(f"data.weights={list(weights)}: one is under 1/{CYCLE} of all; leave that set out")
        self.ends = np.cumsum(self.shares)

    def __len__(self) -> int:
        return 1 << 62

    def samples(self, numbers: NDArray[np.int64]) -> Sample:
        which, inside = self.find(numbers)
        for number, source in enumerate(self.sources):
            here = which == number
            inside[here] = shuffled(self.seeds[number], inside[here], len(source))
        return gathered(self.sources, which, inside)

    def find(self, numbers: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The source of each number, and its index among that source's."""
        place = shuffled(self.cycle_seed, numbers, CYCLE)
        which = np.searchsorted(self.ends, place, side="right")
        starts = self.ends - self.shares
        return which, numbers // CYCLE * self.shares[which] + place - starts[which]


class Listed:
    """Sources by a list that says, for each sample, which source's which it is."""

    def __init__(self, sources: Sequence[Source], which: NDArray[np.uint8], inside: NDArray[np.int64]) -> None:
        self.sources, self.which, self.inside = sources, which, inside

    def __len__(self) -> int:
        return len(self.which)

    def samples(self, numbers: NDArray[np.int64]) -> Sample:
        return gathered(self.sources, self.which[numbers].astype(np.int64), self.inside[numbers])


def shares(weights: Sequence[float], total: int) -> NDArray[np.int64]:
    """Whole numbers by weight that add up to `total`: the largest remainders are rounded up."""
    exact = np.asarray(weights, np.float64) / sum(weights) * total
    whole = np.floor(exact).astype(np.int64)
    most = np.argsort(whole - exact, kind="stable")[: total - int(whole.sum())]
    whole[most] += 1
    return whole
