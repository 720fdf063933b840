"""Batches ahead of their step are the batches of their step."""

import threading
import time

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from trainyard.data.loading.dataset import Sample
from trainyard.data.loading.loader import BatchLoader


class Numbers:
    """Sample n is [n, n]; `slow` makes them take long, `broken` from some number on."""

    def __init__(self, slow: float = 0.0, broken: int | None = None) -> None:
        self.slow, self.broken = slow, broken

    def __len__(self) -> int:
        return 1000

    def samples(self, numbers: NDArray[np.int64]) -> Sample:
        time.sleep(self.slow)
        if self.broken is not None and (numbers >= self.broken).any():
            raise ValueError("cannot be read")
        return {"tokens": np.stack([numbers, numbers], 1).astype(np.int32)}


@pytest.mark.parametrize("shuffle", [True, False])
def test_ahead_gives_the_batches_of_the_steps(shuffle: bool) -> None:
    loader = BatchLoader(Numbers(), 4, seed=3, shuffle=shuffle)
    rows = slice(1, 3)
    for step, batch in enumerate(loader.prefetch(5, 9, rows, dict), start=5):
        for name, tensor in loader.batch(step, rows).items():
            assert torch.equal(tensor, batch[name])
    assert step == 8


def test_the_next_batch_is_made_meanwhile() -> None:
    loader = BatchLoader(Numbers(slow=1.0), 4, seed=0)
    before = set(threading.enumerate())  # a compiler's threads stay when it has worked in this process
    batches = loader.prefetch(0, 4, slice(None), dict)
    next(batches)
    time.sleep(1.5)
    start = time.monotonic()
    next(batches)
    assert time.monotonic() - start < 0.8
    assert not set(threading.enumerate()) <= before
    batches.close()
    assert set(threading.enumerate()) <= before


def test_what_goes_wrong_is_told_at_its_step() -> None:
    batches = BatchLoader(Numbers(broken=8), 4, seed=0, shuffle=False).prefetch(0, 4, slice(None), dict)
    for _ in range(2):
        next(batches)
    with pytest.raises(ValueError, match="cannot be read"):
        next(batches)
