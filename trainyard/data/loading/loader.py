"""Global batches by step number: asking for step 5,000 costs the same as asking for step 0."""

from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trainyard.data.loading.dataset import Source
from trainyard.data.loading.shuffle import shuffled

T = TypeVar("T")


class Loader:
    def __init__(self, source: Source, global_batch: int, seed: int, shuffle: bool = True) -> None:
        self.source = source
        self.global_batch = global_batch
        self.seed = seed
        self.shuffle = shuffle

    def batch(self, step: int, rows: slice = slice(None)) -> dict[str, Tensor]:
        """The samples of one optimizer step, or some `rows` of them, in host memory. `sample` numbers them within the
        global batch."""
        place = np.arange(self.global_batch, dtype=np.int64)[rows]
        index = place + step * self.global_batch
        numbers = shuffled(self.seed, index, len(self.source)) if self.shuffle else index
        return self._stack(numbers, place)

    def ahead(
        self, first: int, end: int, rows: slice, prepare: Callable[[dict[str, Tensor]], T]
    ) -> Generator[T, None, None]:
        """The batches of steps `first` to `end`, prepared; each in a thread while the one before is worked on."""

        def make(step: int) -> T:
            return prepare(self.batch(step, rows))

        with ThreadPoolExecutor(1) as thread:
            coming: Future[T] | None = None
            for step in range(first, end):
                batch = coming.result() if coming else make(step)
                coming = thread.submit(make, step + 1) if step + 1 < end else None
                yield batch

    def once(self, rows: slice = slice(None)) -> Iterator[dict[str, Tensor]]:
        """Every sample exactly once, in order (some `rows` of each batch); the last batch is filled up with labels that
        count nowhere."""
        place = np.arange(self.global_batch, dtype=np.int64)[rows]
        for first in range(0, len(self.source), self.global_batch):
            numbers = first + place
            batch = self._stack(numbers % len(self.source), place)
            extra = torch.from_numpy(numbers >= len(self.source))
            for name in ("labels", "next_sentence"):
                if name in batch:
                    batch[name][extra] = -100
            yield batch

    def _stack(self, numbers: NDArray[np.int64], place: NDArray[np.int64]) -> dict[str, Tensor]:
        arrays = self.source.samples(numbers)
        batch = {name: torch.from_numpy(np.ascontiguousarray(array, dtype=np.int32)) for name, array in arrays.items()}
        batch["sample"] = torch.from_numpy(place.astype(np.int32))
        return batch
