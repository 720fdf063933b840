"""Prefetched batches equal the batches of their step; an epoch has every sample once."""

import threading

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from trainyard.core.constants import IGNORE_INDEX
from trainyard.data.loading.dataset import Sample
from trainyard.data.loading.loader import BatchLoader
from trainyard.data.loading.token_samples import ContiguousTokens, TokenSamples


class IndexDataset:
    """Sample n is [n, n]. Reading fails from index `failing_from` on. Counts the batches that were read."""

    def __init__(self, failing_from: int | None = None) -> None:
        self.failing_from = failing_from
        self.batches_read = threading.Semaphore(0)

    def __len__(self) -> int:
        return 1000

    def samples(self, indices: NDArray[np.int64]) -> Sample:
        self.batches_read.release()
        if self.failing_from is not None and (indices >= self.failing_from).any():
            raise ValueError("cannot be read")
        return {"tokens": np.stack([indices, indices], 1).astype(np.int32)}


@pytest.mark.parametrize("shuffle", [True, False])
def test_prefetch_yields_the_batches_of_the_steps(shuffle: bool) -> None:
    loader = BatchLoader(IndexDataset(), 4, seed=3, shuffle=shuffle)
    sample_slice = slice(1, 3)
    for step, batch in enumerate(loader.prefetch(5, 9, sample_slice, dict), start=5):
        for name, tensor in loader.batch(step, sample_slice).items():
            assert torch.equal(tensor, batch[name])
    assert step == 8


def test_next_batch_is_prepared_in_the_background() -> None:
    dataset = IndexDataset()
    loader = BatchLoader(dataset, 4, seed=0)
    before = set(threading.enumerate())  # threads of a compiler may outlive an earlier test
    batches = loader.prefetch(0, 4, slice(None), dict)
    next(batches)
    for _ in range(2):  # the second batch is read although nobody has asked for it yet
        assert dataset.batches_read.acquire(timeout=240)
    assert not set(threading.enumerate()) <= before
    batches.close()
    assert set(threading.enumerate()) <= before


def test_an_error_is_raised_at_its_step() -> None:
    batches = BatchLoader(IndexDataset(failing_from=8), 4, seed=0, shuffle=False).prefetch(0, 4, slice(None), dict)
    for _ in range(2):
        next(batches)
    with pytest.raises(ValueError, match="cannot be read"):
        next(batches)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_padding_of_an_epoch_changes_labels_only(ranks: int) -> None:
    """Also for one sample per rank, whose tokens and labels are views of one array."""
    stream = ContiguousTokens("x", np.arange(25), np.zeros(1, np.int64))
    loader = BatchLoader(TokenSamples(stream, 4, 25), 4, seed=0, shuffle=False)
    share = 4 // ranks
    tokens, labels = (
        torch.cat(
            [
                batch[name]
                for rank in range(ranks)
                for batch in loader.one_epoch(slice(rank * share, (rank + 1) * share))
            ]
        )
        for name in ("tokens", "labels")
    )
    assert sorted(labels[labels != IGNORE_INDEX].tolist()) == list(range(1, 25))
    assert (tokens >= 0).all()
    assert (tokens[labels != IGNORE_INDEX] == labels[labels != IGNORE_INDEX] - 1).all()
