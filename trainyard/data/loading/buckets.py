"""Sample order for bucketed lengths: a global batch is padded to the smallest length that holds its documents.

An epoch is a permutation, made of two: of the samples within each bucket, and of the global batches. Batches are cut
from the samples in the order of their buckets, so what is left of a bucket shares a batch with samples of the next.
Only the last batch of an epoch is incomplete. As without buckets, the next epoch fills it up, here with its longest
samples. Where a sample is follows from seed and position alone.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from trainyard.core.counter_rng import key64
from trainyard.data.loading.dataset import Indices
from trainyard.data.loading.shuffle import permuted


class BucketOrder:
    """The sample at each global position, and the length of each step."""

    def __init__(self, lengths: NDArray[np.int32], seq_lens: Sequence[int], global_batch: int, seed: int) -> None:
        """`lengths` of all samples, without padding; none is longer than the last of `seq_lens`, which increase."""
        self.seq_lens, self.global_batch, self.seed = np.array(seq_lens, np.int64), global_batch, seed
        bucket_of = np.searchsorted(self.seq_lens, lengths)
        self.by_bucket: Indices = np.argsort(bucket_of, kind="stable")
        """All samples, those of the smallest bucket first. A position in it is a slot."""
        self.ends: Indices = np.cumsum(np.bincount(bucket_of, minlength=len(seq_lens)))
        """Of the buckets in `by_bucket`."""

    def indices(self, positions: Indices) -> Indices:
        epochs, slots, _ = self._slots(positions)
        buckets, found = self._buckets(slots), np.empty_like(slots)
        for epoch, bucket in np.unique(np.stack((epochs, buckets), 1), axis=0).tolist():
            selected = (epochs == epoch) & (buckets == bucket)
            end = int(self.ends[bucket])
            start = int(self.ends[bucket - 1]) if bucket else 0
            key = key64(self.seed, "order", epoch, bucket)
            found[selected] = start + permuted(key, slots[selected] - start, end - start)
        return self.by_bucket[found]

    def step_lengths(self, first: int, end: int) -> Indices:
        """Tokens per sample, padding included, of the steps `first` to `end`. The first step is 0."""
        last = np.arange(first + 1, end + 1, dtype=np.int64) * self.global_batch - 1
        _, slots, fills_up = self._slots(last)
        # A batch that spans epochs has the longest sample of the one that fills it up.
        return self.seq_lens[self._buckets(np.where(fills_up, len(self.by_bucket) - 1, slots))]

    def _buckets(self, slots: Indices) -> Indices:
        return np.searchsorted(self.ends, slots, side="right")

    def _slots(self, positions: Indices) -> tuple[Indices, Indices, NDArray[np.bool_]]:
        """The epoch and the slot of each position, and whether it fills up the last batch of the epoch before."""
        size, count = self.global_batch, len(self.by_bucket)
        epochs, offsets = np.divmod(positions, count)
        slots, fills_up = np.empty_like(offsets), np.empty(len(offsets), np.bool_)
        for epoch in np.unique(epochs).tolist():
            selected = epochs == epoch
            missing = min(-epoch * count % size, count)
            """Samples that the batch at the end of the epoch before lacks; they are the last ones, and the longest."""
            complete = (count - missing) // size
            offset = offsets[selected]
            batches, rows = np.divmod(offset - missing, size)
            shuffled = (batches >= 0) & (batches < complete)
            batches[shuffled] = permuted(key64(self.seed, "batches", epoch), batches[shuffled], complete)
            fills_up[selected] = offset < missing
            slots[selected] = np.where(offset < missing, count - missing + offset, batches * size + rows)
        return epochs, slots, fills_up
