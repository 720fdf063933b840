"""Global batches by step: the batch of step 5,000 costs the same as the batch of step 0."""

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol, TypeVar, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trainyard.core.batch import Batch, map_batch
from trainyard.core.constants import IGNORE_INDEX
from trainyard.core.errors import UserError
from trainyard.data.loading.buckets import BucketOrder
from trainyard.data.loading.dataset import Dataset, fetch_samples, sample_lengths
from trainyard.data.loading.shuffle import shuffled_indices

T = TypeVar("T")
FETCH_STEPS = 8
"""Steps between the request for remote samples and the batch that needs them."""


class BatchSource(Protocol):
    """What the steps of a run take their batches from."""

    def prefetch(
        self, first_step: int, end_step: int, sample_slice: slice, prepare: Callable[[Batch], T]
    ) -> Generator[T, None, None]:
        """`prepare(batch)` for steps `first_step` to `end_step`, with the `sample_slice` of the global batch."""

    def sample_indices(self, step: int) -> NDArray[np.int64]:
        """The index in the dataset of each sample of a step. The first step is 0."""

    def rank_tensors(self, completed_steps: int) -> Mapping[str, Tensor]:
        """What this rank needs of earlier steps to make the next batches, for a checkpoint."""


class BatchLoader:
    """Batches of a dataset in host memory. Nothing is stored between steps, so a run can resume at any step."""

    def __init__(
        self, dataset: Dataset, global_batch: int, seed: int, shuffle: bool = True, buckets: Sequence[int] = ()
    ) -> None:
        """`buckets` are the lengths that the samples of a step may have, the last one that of the dataset."""
        self.dataset, self.global_batch, self.seed, self.shuffle = dataset, global_batch, seed, shuffle
        self.bucket_order: BucketOrder | None = None
        if buckets:
            lengths = sample_lengths(dataset)
            if lengths is None:
                raise UserError(
                    f"data.buckets={list(buckets)}: the samples of data.source have no `lengths`, as those of "
                    "document_samples have; nearest: []"
                )
            self.bucket_order = BucketOrder(lengths, buckets, global_batch, seed)

    def batch(self, step: int, sample_slice: slice = slice(None)) -> Batch:
        """The samples of one optimizer step, or the `sample_slice` of them that one rank needs."""
        sample_ids = np.arange(self.global_batch, dtype=np.int64)[sample_slice]
        batch = self._collate(self.sample_indices(step, sample_slice), sample_ids)
        if not self.bucket_order:
            return batch
        return shortened(batch, int(self.bucket_order.step_lengths(step, step + 1)[0]))

    def sample_indices(self, step: int, sample_slice: slice = slice(None)) -> NDArray[np.int64]:
        """The index in the dataset of each sample of a step. The first step is 0, here and in `batch`."""
        positions = np.arange(self.global_batch, dtype=np.int64)[sample_slice] + step * self.global_batch
        if self.bucket_order:
            return self.bucket_order.indices(positions)
        return shuffled_indices(self.seed, positions, len(self.dataset)) if self.shuffle else positions

    def rank_tensors(self, completed_steps: int) -> Mapping[str, Tensor]:
        """None: a batch is a function of its step."""
        return {}

    def count_steps(self, first: int, end: int) -> dict[int, int]:
        """The steps after `first` up to `end` by the length of their samples, where there are buckets."""
        assert self.bucket_order
        lengths, counts = np.unique(self.bucket_order.step_lengths(first, end), return_counts=True)
        return dict(zip(lengths.tolist(), counts.tolist(), strict=True))

    def prefetch(
        self, first_step: int, end_step: int, sample_slice: slice, prepare: Callable[[Batch], T]
    ) -> Generator[T, None, None]:
        """`prepare(batch)` for steps `first_step` to `end_step`; a thread works on the next step meanwhile. Samples
        in a store are asked for several steps before."""

        def fetch(step: int) -> None:
            if step < end_step:
                fetch_samples(self.dataset, self.sample_indices(step, sample_slice))

        def make(step: int) -> T:
            fetch(step + FETCH_STEPS)
            return prepare(self.batch(step, sample_slice))

        for step in range(first_step, first_step + FETCH_STEPS):
            fetch(step)

        with ThreadPoolExecutor(1) as thread:
            pending: Future[T] | None = None
            for step in range(first_step, end_step):
                prepared = pending.result() if pending else make(step)
                pending = thread.submit(make, step + 1) if step + 1 < end_step else None
                yield prepared

    def one_epoch(self, sample_slice: slice = slice(None)) -> Iterator[Batch]:
        """Every sample exactly once and in order. Samples that fill up the last batch have labels IGNORE_INDEX."""
        sample_ids = np.arange(self.global_batch, dtype=np.int64)[sample_slice]
        for start in range(0, len(self.dataset), self.global_batch):
            indices = start + sample_ids
            fetch_samples(self.dataset, (indices + self.global_batch) % len(self.dataset))
            batch = self._collate(indices % len(self.dataset), sample_ids)
            is_padding = torch.from_numpy(indices >= len(self.dataset))
            # Not in place: the labels of a single sample share their memory with its tokens.
            batch["labels"] = batch["labels"].masked_fill(is_padding[:, None], IGNORE_INDEX)
            if "next_sentence_labels" in batch:
                batch["next_sentence_labels"] = batch["next_sentence_labels"].masked_fill(is_padding, IGNORE_INDEX)
            if "pair_keys" in batch:
                batch["pair_keys"] = batch["pair_keys"].masked_fill(is_padding[:, None], 0)
            yield batch

    def _collate(self, indices: NDArray[np.int64], sample_ids: NDArray[np.int64]) -> Batch:
        arrays = {**self.dataset.samples(indices), "sample_ids": sample_ids}
        dtypes = {name: np.float32 if array.dtype == np.float32 else np.int32 for name, array in arrays.items()}
        tensors = {name: torch.from_numpy(np.ascontiguousarray(array, dtypes[name])) for name, array in arrays.items()}
        return cast(Batch, tensors)


def shortened(batch: Batch, seq_len: int) -> Batch:
    """The first `seq_len` tokens of each sample. What they leave out is padding."""
    return map_batch(lambda x: x[:, :seq_len].contiguous() if x.ndim == 2 else x, batch)
