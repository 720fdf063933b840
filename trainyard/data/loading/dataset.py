"""Where samples come from. A source numbers its samples and gives any of them; their order is not its business."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Sample = dict[str, NDArray[np.int32]]


class Dataset(Protocol):
    def __len__(self) -> int: ...

    def samples(self, indices: NDArray[np.int64]) -> Sample:
        """The samples of these numbers, stacked: each array is [len(numbers), ...]."""


class Subset:
    """The samples of another source from `first` on: one side of a split."""

    def __init__(self, dataset: Dataset, start: int, count: int) -> None:
        self.dataset, self.start, self.count = dataset, start, count

    def __len__(self) -> int:
        return self.count

    def samples(self, indices: NDArray[np.int64]) -> Sample:
        return self.dataset.samples(indices + self.start)


class ConcatDataset:
    """Several sources one after the other."""

    def __init__(self, datasets: Sequence[Dataset]) -> None:
        self.datasets = datasets
        self.ends = np.cumsum([len(source) for source in datasets])

    def __len__(self) -> int:
        return int(self.ends[-1]) if len(self.ends) else 0

    def samples(self, indices: NDArray[np.int64]) -> Sample:
        which = np.searchsorted(self.ends, indices, side="right")
        starts = np.concatenate((np.zeros(1, np.int64), self.ends))
        return gather_samples(self.datasets, which, indices - starts[which])


def gather_samples(
    datasets: Sequence[Dataset], dataset_indices: NDArray[np.int64], sample_indices: NDArray[np.int64]
) -> Sample:
    """Samples of several sources: of each, which source's it is and which of that source's."""
    out: Sample = {}
    for number in np.unique(dataset_indices).tolist():
        here = dataset_indices == number
        for name, array in datasets[number].samples(sample_indices[here]).items():
            out.setdefault(name, np.empty((len(dataset_indices), *array.shape[1:]), np.int32))[here] = array
    return out
