"""Sample order: a function of (seed, global position), in constant memory, for any number of epochs and ranks.

Each epoch is a permutation made by a small block cipher over the sample indices, so the sample at any position follows
without computing the ones before it.
"""

import numpy as np
from numpy.typing import NDArray

from trainyard.core.counter_rng import key64

FEISTEL_ROUNDS = 6


def shuffled_indices(seed: int, positions: NDArray[np.int64], num_samples: int) -> NDArray[np.int64]:
    """The sample at each global position. Every epoch of `num_samples` positions visits each sample once."""
    epochs, offsets = np.divmod(positions, num_samples)
    indices = np.empty_like(offsets)
    for epoch in np.unique(epochs):
        selected = epochs == epoch
        indices[selected] = permuted(key64(seed, "order", int(epoch)), offsets[selected], num_samples)
    return indices


def permuted(key: int, offsets: NDArray[np.int64], num_samples: int) -> NDArray[np.int64]:
    """What a random permutation of `num_samples` numbers maps each offset to: a Feistel network on the next even number
    of bits, repeated until the result is in range (cycle walking)."""
    half = max((num_samples - 1).bit_length() + 1, 2) // 2
    mask = np.uint64((1 << half) - 1)
    x = offsets.astype(np.uint64)
    out_of_range = np.ones(len(x), dtype=bool)
    while out_of_range.any():
        left, right = x[out_of_range] >> np.uint64(half), x[out_of_range] & mask
        for round_index in range(FEISTEL_ROUNDS):
            mixed = _mix(right + np.uint64((key + round_index * 0x9E3779B97F4A7C15) % 2**64))
            left, right = right, left ^ (mixed & mask)
        x[out_of_range] = (left << np.uint64(half)) | right
        out_of_range[out_of_range] = x[out_of_range] >= num_samples
    return x.astype(np.int64)


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The splitmix64 finalizer."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
