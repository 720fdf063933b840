"""Where samples come from. A source numbers its samples and gives any of them; their order is not its business."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Sample = dict[str, NDArray[np.int32]]


class Source(Protocol):
    def __len__(self) -> int: ...

    def samples(self, numbers: NDArray[np.int64]) -> Sample:
        """The samples of these numbers, stacked: each array is [len(numbers), ...]."""


class Part:
    """The samples of another source from `first` on: one side of a split."""

    def __init__(self, source: Source, first: int, count: int) -> None:
        self.source, self.first, self.count = source, first, count

    def __len__(self) -> int:
        return self.count

    def samples(self, numbers: NDArray[np.int64]) -> Sample:
        return self.source.samples(numbers + self.first)


class Joined:
    """Several sources one after the other."""

    def __init__(self, sources: Sequence[Source]) -> None:
        self.sources = sources
        self.ends = np.cumsum([len(source) for source in sources])

    def __len__(self) -> int:
        return int(self.ends[-1]) if len(self.ends) else 0

    def samples(self, numbers: NDArray[np.int64]) -> Sample:
        which = np.searchsorted(self.ends, numbers, side="right")
        starts = np.concatenate((np.zeros(1, np.int64), self.ends))
        return gathered(self.sources, which, numbers - starts[which])


def gathered(sources: Sequence[Source], which: NDArray[np.int64], inside: NDArray[np.int64]) -> Sample:
    """Samples of several sources: of each, which source's it is and which of that source's."""
    out: Sample = {}
    for number in np.unique(which).tolist():
        here = which == number
        for name, array in sources[number].samples(inside[here]).items():
            out.setdefault(name, np.empty((len(which), *array.shape[1:]), np.int32))[here] = array
    return out
