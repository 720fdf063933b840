"""Datasets: numbered samples in any order. The loader decides which sample belongs to which step."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from trainyard.data.samples import Sample


class Dataset(Protocol):
    def __len__(self) -> int: ...

    def samples(self, indices: NDArray[np.int64]) -> Sample:
        """The samples at these indices, stacked: each array is [len(indices), ...]."""


class Subset:
    """`count` samples of another dataset from `start` on: one side of a split."""

    def __init__(self, dataset: Dataset, start: int, count: int) -> None:
        self.dataset, self.start, self.count = dataset, start, count

    def __len__(self) -> int:
        return self.count

    def samples(self, indices: NDArray[np.int64]) -> Sample:
        return self.dataset.samples(indices + self.start)


class ConcatDataset:
    """Several datasets, one after the other."""

    def __init__(self, datasets: Sequence[Dataset]) -> None:
        self.datasets = datasets
        self.ends = np.cumsum([len(dataset) for dataset in datasets])

    def __len__(self) -> int:
        return int(self.ends[-1]) if len(self.ends) else 0

    def samples(self, indices: NDArray[np.int64]) -> Sample:
        dataset_indices = np.searchsorted(self.ends, indices, side="right")
        starts = np.concatenate((np.zeros(1, np.int64), self.ends))
        return gather_samples(self.datasets, dataset_indices, indices - starts[dataset_indices])


def gather_samples(
    datasets: Sequence[Dataset], dataset_indices: NDArray[np.int64], sample_indices: NDArray[np.int64]
) -> Sample:
    """Stack samples of several datasets: sample `sample_indices[i]` of `datasets[dataset_indices[i]]`."""
    stacked: Sample = {}
    for dataset in np.unique(dataset_indices).tolist():
        selected = dataset_indices == dataset
        for name, array in datasets[dataset].samples(sample_indices[selected]).items():
            shape = (len(dataset_indices), *array.shape[1:])
            stacked.setdefault(name, np.empty(shape, np.int32))[selected] = array
    return stacked
