"""Global batches by step number: asking for step 5,000 costs the same as asking for step 0."""

from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trainyard.data.loading.dataset import Dataset
from trainyard.data.loading.shuffle import shuffled_indices

T = TypeVar("T")


class BatchLoader:
    def __init__(self, dataset: Dataset, global_batch: int, seed: int, shuffle: bool = True) -> None:
        self.dataset = dataset
        self.global_batch = global_batch
        self.seed = seed
        self.shuffle = shuffle

    def batch(self, step: int, sample_slice: slice = slice(None)) -> dict[str, Tensor]:
        """The samples of one optimizer step, or some `rows` of them, in host memory. `sample` numbers them within the
        global batch."""
        place = np.arange(self.global_batch, dtype=np.int64)[sample_slice]
        index = place + step * self.global_batch
        numbers = shuffled_indices(self.seed, index, len(self.dataset)) if self.shuffle else index
        return self._collate(numbers, place)

    def prefetch(
        self, first_step: int, end_step: int, sample_slice: slice, prepare: Callable[[dict[str, Tensor]], T]
    ) -> Generator[T, None, None]:
        """The batches of steps `first` to `end`, prepared; each in a thread while the one before is worked on."""

        def make(step: int) -> T:
            return prepare(self.batch(step, sample_slice))

        with ThreadPoolExecutor(1) as thread:
            coming: Future[T] | None = None
            for step in range(first_step, end_step):
                batch = coming.result() if coming else make(step)
                coming = thread.submit(make, step + 1) if step + 1 < end_step else None
                yield batch

    def one_epoch(self, sample_slice: slice = slice(None)) -> Iterator[dict[str, Tensor]]:
        """Every sample exactly once, in order (some `rows` of each batch); the last batch is filled up with labels that
        count nowhere."""
        place = np.arange(self.global_batch, dtype=np.int64)[sample_slice]
        for first in range(0, len(self.dataset), self.global_batch):
            numbers = first + place
            batch = self._collate(numbers % len(self.dataset), place)
            extra = torch.from_numpy(numbers >= len(self.dataset))
            for name in ("labels", "next_sentence_labels"):
                if name in batch:
                    batch[name][extra] = -100
            yield batch

    def _collate(self, numbers: NDArray[np.int64], place: NDArray[np.int64]) -> dict[str, Tensor]:
        arrays = self.dataset.samples(numbers)
        batch = {name: torch.from_numpy(np.ascontiguousarray(array, dtype=np.int32)) for name, array in arrays.items()}
        batch["sample_ids"] = torch.from_numpy(place.astype(np.int32))
        return batch
