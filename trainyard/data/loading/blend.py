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
from trainyard.data.loading.dataset import Dataset, gather_samples
from trainyard.data.loading.shuffle import shuffled_indices
from trainyard.data.samples import Sample

CYCLE_SAMPLES = 1 << 14


class BlendedDataset:
    """An endless, already shuffled dataset: every index from 0 on is a sample."""

    def __init__(self, datasets: Sequence[Dataset], weights: Sequence[float], seed: int) -> None:
        self.datasets = datasets
        self.seeds = [key64(seed, "blend", number) for number in range(len(datasets))]
        self.cycle_seed = key64(seed, "cycle")
        self.samples_per_cycle = apportion(weights, CYCLE_SAMPLES)
        if (self.samples_per_cycle == 0).any():
            raise UserError(
                f"data.weights={list(weights)}: a weight is below 1/{CYCLE_SAMPLES} of the sum; remove that dataset"
            )
        self.cycle_ends = np.cumsum(self.samples_per_cycle)

    def __len__(self) -> int:
        return 1 << 62

    def samples(self, indices: NDArray[np.int64]) -> Sample:
        dataset_indices, positions = self.locate(indices)
        for number, dataset in enumerate(self.datasets):
            selected = dataset_indices == number
            positions[selected] = shuffled_indices(self.seeds[number], positions[selected], len(dataset))
        return gather_samples(self.datasets, dataset_indices, positions)

    def locate(self, indices: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The dataset of each index, and the position in the sample order of that dataset."""
        slot = shuffled_indices(self.cycle_seed, indices, CYCLE_SAMPLES)
        dataset_indices = np.searchsorted(self.cycle_ends, slot, side="right")
        cycle_starts = self.cycle_ends - self.samples_per_cycle
        per_cycle = self.samples_per_cycle[dataset_indices]
        return dataset_indices, indices // CYCLE_SAMPLES * per_cycle + slot - cycle_starts[dataset_indices]


class IndexedBlend:
    """A blend by lists: sample i is sample `sample_indices[i]` of dataset `dataset_indices[i]`."""

    def __init__(
        self, datasets: Sequence[Dataset], dataset_indices: NDArray[np.uint8], sample_indices: NDArray[np.int64]
    ) -> None:
        self.datasets, self.dataset_indices, self.sample_indices = datasets, dataset_indices, sample_indices

    def __len__(self) -> int:
        return len(self.dataset_indices)

    def samples(self, indices: NDArray[np.int64]) -> Sample:
        dataset_indices = self.dataset_indices[indices].astype(np.int64)
        return gather_samples(self.datasets, dataset_indices, self.sample_indices[indices])


def apportion(weights: Sequence[float], total: int) -> NDArray[np.int64]:
    """Integers proportional to the weights that add up to `total`, by the largest remainder method."""
    exact = np.asarray(weights, np.float64) / sum(weights) * total
    counts = np.floor(exact).astype(np.int64)
    largest_remainders = np.argsort(counts - exact, kind="stable")[: total - int(counts.sum())]
    counts[largest_remainders] += 1
    return counts
