"""Options and report of `trainyard data inspect`, with exact statistics of any number of lengths."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from trainyard.core.errors import UserError


class InspectOptions(NamedTuple):
    check: bool = False
    """Read and validate every value."""
    num_samples: int = 0
    """Samples to show."""
    vocab_size: int | None = None
    """Token ids must be below this; None: below 2^31."""
    end_token: int | None = None
    """Token id that ends a document; None: the most frequent last token."""
    text_key: str = "text"
    """Key or column of the text in a document."""


@dataclass
class InspectReport:
    path: str
    kind: str
    facts: dict[str, Any] = field(default_factory=dict)
    """Counts and types by name."""
    lengths: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Length statistics by what was measured, such as `tokens per document`."""
    samples: list[tuple[str, list[int] | str]] = field(default_factory=list)
    """Location of each sample, and its tokens or text."""


class LengthStats:
    """Counts of each length: enough for exact statistics, and far fewer than documents."""

    def __init__(self) -> None:
        self.counts: Counter[int] = Counter()

    def add(self, lengths: NDArray[Any]) -> None:
        self.counts.update(count_values(lengths))

    def summary(self) -> dict[str, Any]:
        """Shortest, median, mean, longest, and a histogram with bins 0, 1, 2 to 3, 4 to 7, ..."""
        if not self.counts:
            return {}
        lengths = np.array(sorted(self.counts))
        counts = np.array([self.counts[length] for length in lengths.tolist()])
        ends, total = np.cumsum(counts), int(counts.sum())
        middle = [int(lengths[np.searchsorted(ends, rank, side="right")]) for rank in ((total - 1) // 2, total // 2)]
        bins: Counter[int] = Counter()
        for length, count in self.counts.items():
            bins[length.bit_length()] += count
        return {
            "shortest": int(lengths[0]),
            "median": sum(middle) / 2,
            "mean": float((lengths * counts).sum() / total),
            "longest": int(lengths[-1]),
            "histogram": [
                {"from": 1 << bits >> 1, "to": (1 << bits) - 1, "count": bins[bits]}
                for bits in range(min(bins), max(bins) + 1)
            ],
        }


def count_values(values: NDArray[Any]) -> dict[int, int]:
    """How often each value occurs, in increasing order."""
    return dict(zip(*(array.tolist() for array in np.unique(values, return_counts=True)), strict=True))


def check_range(path: str, values: NDArray[Any], position: int, limit: int, name: str = "token") -> None:
    """Raise unless all values are 0 to `limit` - 1. `position` is that of the first value in its file."""
    if values.size and (values.min() < 0 or values.max() >= limit):
        index = int(((values < 0) | (values >= limit)).argmax())
        raise UserError(f"{path}: {name} {values[index]} at {position + index}; expected 0 to {limit - 1}")


def evenly_spaced(count: int, num_samples: int) -> list[int]:
    """`num_samples` indices below `count`, evenly spaced; all indices if there are fewer."""
    return [index * count // num_samples for index in range(num_samples)] if count > num_samples else [*range(count)]
