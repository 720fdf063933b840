"""The order of samples: a function of (seed, global index), in constant memory, for any number of epochs and ranks.

Each epoch is a permutation made by a small block cipher over the sample numbers, so any position can be asked for
without the ones before it.
"""

import numpy as np
from numpy.typing import NDArray

from trainyard.core.counter_rng import key64

FEISTEL_ROUNDS = 6


def shuffled_indices(seed: int, positions: NDArray[np.int64], num_samples: int) -> NDArray[np.int64]:
    """Which sample stands at each global `index`; every epoch of `samples` indices visits each sample once."""
    epoch, place = np.divmod(positions, num_samples)
    out = np.empty_like(place)
    for each in np.unique(epoch):
        here = epoch == each
        out[here] = _permute(key64(seed, "order", int(each)), place[here], num_samples)
    return out


def _permute(key: int, place: NDArray[np.int64], samples: int) -> NDArray[np.int64]:
    """A Feistel network on the next even number of bits, walked until the result is in range."""
    half = max((samples - 1).bit_length() + 1, 2) // 2
    mask = np.uint64((1 << half) - 1)
    x = place.astype(np.uint64)
    todo = np.ones(len(x), dtype=bool)
    while todo.any():
        left, right = x[todo] >> np.uint64(half), x[todo] & mask
        for number in range(FEISTEL_ROUNDS):
            mixed = _mix(right + np.uint64((key + number * 0x9E3779B97F4A7C15) % 2**64))
            left, right = right, left ^ (mixed & mask)
        x[todo] = (left << np.uint64(half)) | right
        todo[todo] = x[todo] >= samples
    return x.astype(np.int64)


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
