"""What a look at a file asks for and yields: a Report, with figures and a histogram of however many lengths."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from trainyard.core.errors import UserError


class InspectOptions(NamedTuple):
    check: bool = False
    num_samples: int = 0
    vocab_size: int | None = None
    """Tokens are below it; None: below 2^31."""
    end_token: int | None = None
    """The end token; None: whichever most documents end with."""
    text_key: str = "text"
    """Of the text in a document."""


@dataclass
class InspectReport:
    path: str
    kind: str
    facts: dict[str, Any] = field(default_factory=dict)
    """Counts and types by name."""
    lengths: dict[str, dict[str, Any]] = field(default_factory=dict)
    """By what was measured, such as `tokens of a document`."""
    samples: list[tuple[str, list[int] | str]] = field(default_factory=list)
    """Where each is from, and its tokens or its text."""


class LengthStats:
    """How often each length occurs: all that is kept, and enough for every figure. There are far fewer lengths than
    documents."""

    def __init__(self) -> None:
        self.counts: dict[int, int] = {}

    def add(self, lengths: NDArray[Any]) -> None:
        for length, count in zip(*(each.tolist() for each in np.unique(lengths, return_counts=True)), strict=True):
            self.counts[length] = self.counts.get(length, 0) + count

    def summary(self) -> dict[str, Any]:
        """Shortest, median, mean, longest; and how many there are of 0, 1, 2 to 3, 4 to 7, ..."""
        if not self.counts:
            return {}
        lengths = np.array(sorted(self.counts))
        counts = np.array([self.counts[length] for length in lengths.tolist()])
        ends, total = np.cumsum(counts), int(counts.sum())
        middle = [int(lengths[np.searchsorted(ends, place, side="right")]) for place in ((total - 1) // 2, total // 2)]
        bins: dict[int, int] = {}
        for length, count in self.counts.items():
            bins[length.bit_length()] = bins.get(length.bit_length(), 0) + count
        return {
            "shortest": int(lengths[0]),
            "median": sum(middle) / 2,
            "mean": float((lengths * counts).sum() / total),
            "longest": int(lengths[-1]),
            "histogram": [
                {"from": 1 << bits >> 1, "to": (1 << bits) - 1, "count": bins.get(bits, 0)}
                for bits in range(min(bins), max(bins) + 1)
            ],
        }


def check_range(where: str, numbers: NDArray[Any], first: int, limit: int, what: str = "token", least: int = 0) -> None:
    """Refuses any that is not from `least` to below `limit`; `first` is the place of the first in its file."""
    if numbers.size and (numbers.min() < least or numbers.max() >= limit):
        place = int(((numbers < least) | (numbers >= limit)).argmax())
        raise UserError(f"{where}: {what} {numbers[place]} at {first + place}; wanted: {least} to {limit - 1}")


def evenly_spaced(count: int, samples: int) -> list[int]:
    """So many numbers below `count`, evenly apart."""
    return [number * count // samples for number in range(samples)] if count > samples else list(range(count))
