"""Several sources by weight. Which one a global index is of, and which of its samples, follows from the index alone.

Every CYCLE indices have each source as often as its weight says, at random places; a source's samples come in its own
shuffled order, each once per epoch of that source, however the others are sized.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from trainyard.core.counter_rng import key64
from trainyard.core.errors import UserError
from trainyard.data.loading.dataset import Dataset, Sample, gather_samples
from trainyard.data.loading.shuffle import shuffled_indices

CYCLE_SAMPLES = 1 << 14


class BlendedDataset:
    """A Source without end: any number from 0 on is a sample, and they are in order already."""

    def __init__(self, datasets: Sequence[Dataset], weights: Sequence[float], seed: int) -> None:
        self.datasets = datasets
        self.seeds = [key64(seed, "blend", number) for number in range(len(datasets))]
        self.cycle_seed = key64(seed, "cycle")
        self.samples_per_cycle = apportion(weights, CYCLE_SAMPLES)
        if (self.samples_per_cycle == 0).any():
            raise UserError(f"data.weights={list(weights)}: one is under 1/{CYCLE_SAMPLES} of all; leave that set out")
        self.cycle_ends = np.cumsum(self.samples_per_cycle)

    def __len__(self) -> int:
        return 1 << 62

    def samples(self, indices: NDArray[np.int64]) -> Sample:
        which, inside = self.locate(indices)
        for number, source in enumerate(self.datasets):
            here = which == number
            inside[here] = shuffled_indices(self.seeds[number], inside[here], len(source))
        return gather_samples(self.datasets, which, inside)

    def locate(self, numbers: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The source of each number, and its index among that source's."""
        place = shuffled_indices(self.cycle_seed, numbers, CYCLE_SAMPLES)
        which = np.searchsorted(self.cycle_ends, place, side="right")
        starts = self.cycle_ends - self.samples_per_cycle
        return which, numbers // CYCLE_SAMPLES * self.samples_per_cycle[which] + place - starts[which]


class IndexedBlend:
    """Sources by a list that says, for each sample, which source's which it is."""

    def __init__(
        self, datasets: Sequence[Dataset], dataset_indices: NDArray[np.uint8], sample_indices: NDArray[np.int64]
    ) -> None:
        self.datasets, self.dataset_indices, self.sample_indices = datasets, dataset_indices, sample_indices

    def __len__(self) -> int:
        return len(self.dataset_indices)

    def samples(self, indices: NDArray[np.int64]) -> Sample:
        return gather_samples(
            self.datasets, self.dataset_indices[indices].astype(np.int64), self.sample_indices[indices]
        )


def apportion(weights: Sequence[float], total: int) -> NDArray[np.int64]:
    """Whole numbers by weight that add up to `total`: the largest remainders are rounded up."""
    exact = np.asarray(weights, np.float64) / sum(weights) * total
    whole = np.floor(exact).astype(np.int64)
    most = np.argsort(whole - exact, kind="stable")[: total - int(whole.sum())]
    whole[most] += 1
    return whole
