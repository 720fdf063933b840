"""Blends of several datasets by weight.

The dataset and the sample at a global position follow from the position alone. Every CYCLE_SAMPLES positions hold
each dataset as often as its weight says, in random order. The samples of a dataset come in its own shuffled order,
each once per epoch of that dataset, whatever the sizes of the others.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from trainyard.core.counter_rng import key64
from trainyard.core.errors import UserError
from trainyard.data.loading.dataset import CombinedDataset, Dataset, Indices
from trainyard.data.loading.shuffle import shuffled_indices

CYCLE_SAMPLES = 1 << 14


class BlendedDataset(CombinedDataset):
    """An endless, already shuffled dataset: every index from 0 on is a sample."""

    def __init__(self, datasets: Sequence[Dataset], weights: Sequence[float], seed: int) -> None:
        super().__init__(datasets, 1 << 62, self._find_shuffled)
        self.seeds = [key64(seed, "blend", number) for number in range(len(datasets))]
        self.cycle_seed = key64(seed, "cycle")
        self.samples_per_cycle = apportion(weights, CYCLE_SAMPLES)
        if (self.samples_per_cycle == 0).any():
            raise UserError(
                f"data.weights={list(weights)}: a weight is below 1/{CYCLE_SAMPLES} of the sum; remove that dataset"
            )
        self.cycle_ends = np.cumsum(self.samples_per_cycle)

    def _find_shuffled(self, indices: Indices) -> tuple[Indices, Indices]:
        dataset_indices, positions = self.locate(indices)
        for number, dataset in enumerate(self.datasets):
            selected = dataset_indices == number
            positions[selected] = shuffled_indices(self.seeds[number], positions[selected], len(dataset))
        return dataset_indices, positions

    def locate(self, indices: Indices) -> tuple[Indices, Indices]:
        """The dataset of each index, and the position in the sample order of that dataset."""
        slot = shuffled_indices(self.cycle_seed, indices, CYCLE_SAMPLES)
        dataset_indices = np.searchsorted(self.cycle_ends, slot, side="right")
        cycle_starts = self.cycle_ends - self.samples_per_cycle
        per_cycle = self.samples_per_cycle[dataset_indices]
        return dataset_indices, indices // CYCLE_SAMPLES * per_cycle + slot - cycle_starts[dataset_indices]


def apportion(weights: Sequence[float], total: int) -> NDArray[np.int64]:
    """Integers proportional to the weights that add up to `total`, by the largest remainder method."""
    exact = np.asarray(weights, np.float64) / sum(weights) * total
    counts = np.floor(exact).astype(np.int64)
    largest_remainders = np.argsort(counts - exact, kind="stable")[: total - int(counts.sum())]
    counts[largest_remainders] += 1
    return counts
