"""Datasets: numbered samples in any order. The loader decides which sample belongs to which step."""

from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from trainyard.data.samples import Sample

Indices = NDArray[np.int64]


class Dataset(Protocol):
    """Numbered samples. The sample at an index depends on nothing but the index."""

    def __len__(self) -> int: ...

    def samples(self, indices: Indices) -> Sample:
        """The samples at these indices, stacked: each array is [len(indices), ...]."""

    def source(self, index: int) -> str:
        """Where the sample at an index comes from, for people: file and position."""


@runtime_checkable
class RemoteDataset(Dataset, Protocol):
    """A dataset whose samples may have to come from a store."""

    is_remote: bool

    def fetch(self, indices: Indices) -> None:
        """Begin to fetch samples, for `samples` to find them on this host."""


def fetch_samples(dataset: Dataset, indices: Indices) -> None:
    """Begin to fetch samples that are not on this host."""
    if isinstance(dataset, RemoteDataset) and dataset.is_remote:
        dataset.fetch(indices)


def sample_lengths(dataset: Dataset) -> NDArray[np.int32] | None:
    """Tokens of each sample without padding; None where samples are not whole documents."""
    return getattr(dataset, "lengths", None)


class CombinedDataset:
    """Samples of other datasets. `find` gives the dataset of each index, and the index there."""

    def __init__(
        self, datasets: Sequence[Dataset], length: int, find: Callable[[Indices], tuple[Indices, Indices]]
    ) -> None:
        self.datasets, self.length, self.find = datasets, length, find
        self.is_remote = any(getattr(dataset, "is_remote", False) for dataset in datasets)
        self.lengths: NDArray[np.int32] | None = None

    def __len__(self) -> int:
        return self.length

    def samples(self, indices: Indices) -> Sample:
        dataset_indices, sample_indices = self.find(indices)
        if len(self.datasets) == 1:
            return self.datasets[0].samples(sample_indices)
        stacked: Sample = {}
        for dataset in np.unique(dataset_indices).tolist():
            selected = dataset_indices == dataset
            for name, array in self.datasets[dataset].samples(sample_indices[selected]).items():
                shape = (len(indices), *array.shape[1:])
                stacked.setdefault(name, np.empty(shape, np.int32))[selected] = array
        return stacked

    def fetch(self, indices: Indices) -> None:
        dataset_indices, sample_indices = self.find(indices)
        for dataset in np.unique(dataset_indices).tolist():
            fetch_samples(self.datasets[dataset], sample_indices[dataset_indices == dataset])

    def source(self, index: int) -> str:
        dataset_indices, sample_indices = self.find(np.array([index], np.int64))
        return self.datasets[int(dataset_indices[0])].source(int(sample_indices[0]))


def subset(dataset: Dataset, start: int, count: int) -> Dataset:
    """`count` samples of a dataset from `start` on: one side of a split."""
    part = CombinedDataset([dataset], count, lambda indices: (np.zeros_like(indices), indices + start))
    lengths = sample_lengths(dataset)
    part.lengths = None if lengths is None else lengths[start : start + count]
    return part


def concatenate(datasets: Sequence[Dataset]) -> Dataset:
    lengths = np.array([len(dataset) for dataset in datasets], np.int64)
    ends = np.cumsum(lengths)

    def find(indices: Indices) -> tuple[Indices, Indices]:
        dataset_indices = np.searchsorted(ends, indices, side="right")
        return dataset_indices, indices - (ends - lengths)[dataset_indices]

    return CombinedDataset(datasets, int(lengths.sum()), find)
