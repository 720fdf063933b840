"""The sample order is a function of (seed, position) alone, and each epoch visits every sample once."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support import configs
from tests.support.examples import examples
from trainyard.data.loading.loader import BatchLoader
from trainyard.data.loading.shuffle import shuffled_indices
from trainyard.data.loading.synthetic import SyntheticTokens
from trainyard.data.loading.token_samples import ContiguousTokens, TokenSamples


def counting_samples(num_tokens: int) -> TokenSamples:
    """Samples of 10 tokens from a stream that counts from 0."""
    stream = ContiguousTokens("counting", np.arange(num_tokens, dtype=np.int32), np.zeros(1, np.int64))
    return TokenSamples(stream, 10, vocab_size=num_tokens)


@given(st.integers(1, 3000), st.integers(0, 5), st.integers(0, 2**62))
@examples(60)
def test_every_epoch_is_a_permutation(num_samples: int, epoch: int, seed: int) -> None:
    positions = np.arange(num_samples, dtype=np.int64) + epoch * num_samples
    assert sorted(shuffled_indices(seed, positions, num_samples)) == list(range(num_samples))


@given(st.integers(1, 500), st.integers(0, 10**9), st.lists(st.integers(1, 20), min_size=1, max_size=5))
@examples(40)
def test_order_does_not_depend_on_grouping(num_samples: int, first: int, sizes: list[int]) -> None:
    """Ranks and micro batches group positions differently but see the same samples, also across epochs."""
    positions = np.arange(first, first + sum(sizes), dtype=np.int64)
    together = shuffled_indices(1, positions, num_samples)
    groups = np.split(positions, np.cumsum(sizes)[:-1])
    assert np.array_equal(np.concatenate([shuffled_indices(1, group, num_samples) for group in groups]), together)


def test_epochs_and_seeds_differ_and_are_well_mixed() -> None:
    n = 4096
    positions = np.arange(n, dtype=np.int64)
    first_epoch = shuffled_indices(0, positions, n)
    second_epoch = shuffled_indices(0, positions + n, n)
    other_seed = shuffled_indices(1, positions, n)
    for a, b in ((first_epoch, second_epoch), (first_epoch, other_seed), (first_epoch, positions)):
        assert (a == b).mean() < 0.01
        assert abs(np.corrcoef(a, b)[0, 1]) < 0.05
    assert np.abs(np.diff(first_epoch)).mean() == pytest.approx(n / 3, rel=0.1)


def test_cost_does_not_grow_with_the_number_of_samples() -> None:
    positions = np.asarray([0, 10**15, 3 * 10**15 + 7], dtype=np.int64)
    assert (shuffled_indices(0, positions, 10**15) < 10**15).all()


def test_batches_are_a_function_of_the_step() -> None:
    dataset = counting_samples(1000)
    eight, four = BatchLoader(dataset, 8, seed=5), BatchLoader(dataset, 4, seed=5)
    for step in (0, 3, 50):
        batch = eight.batch(step)
        halves = [four.batch(2 * step), four.batch(2 * step + 1)]
        for name in ("tokens", "labels"):
            assert np.array_equal(batch[name], np.concatenate([half[name] for half in halves]))
    batch = eight.batch(0)
    counted = batch["labels"] != -100
    assert (batch["labels"] == batch["tokens"] + 1)[counted].all()
    assert batch["tokens"].dtype.itemsize == 4


def test_one_epoch_has_each_sample_once_and_ignores_padding() -> None:
    batches = list(BatchLoader(counting_samples(101), 4, seed=0, shuffle=False).one_epoch())
    assert len(batches) == 3
    labels = np.concatenate([batch["labels"] for batch in batches])
    assert sorted(labels[labels != -100]) == list(range(1, 101))


def test_synthetic_samples_are_a_function_of_their_index() -> None:
    config = configs.tiny_config()
    tokens = SyntheticTokens(config.data, config.model.vocab, config.train.seed)
    rows = tokens.samples(np.asarray([5, 9, 5], dtype=np.int64))["tokens"]
    assert np.array_equal(rows[0], rows[2])
    assert not np.array_equal(rows[0], rows[1])
