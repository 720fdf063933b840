"""The order of samples is a function of (seed, index) alone, and each epoch visits every sample once."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support import configs
from trainyard.data.loading.loader import BatchLoader
from trainyard.data.loading.shuffle import shuffled_indices
from trainyard.data.loading.synthetic import SyntheticTokens
from trainyard.data.loading.token_samples import ContiguousTokens, TokenSamples


def counting(tokens: int) -> TokenSamples:
    return TokenSamples(
        ContiguousTokens("numbers", np.arange(tokens, dtype=np.int32), np.zeros(1, np.int64)), 10, vocab_size=tokens
    )


@given(st.integers(1, 3000), st.integers(0, 5), st.integers(0, 2**62))
@settings(max_examples=60, deadline=None)
def test_every_epoch_is_a_permutation(samples: int, epoch: int, seed: int) -> None:
    index = np.arange(samples, dtype=np.int64) + epoch * samples
    assert sorted(shuffled_indices(seed, index, samples)) == list(range(samples))


@given(st.integers(1, 500), st.integers(0, 10**9), st.lists(st.integers(1, 20), min_size=1, max_size=5))
@settings(max_examples=40, deadline=None)
def test_any_place_can_be_asked_for_alone(samples: int, first: int, sizes: list[int]) -> None:
    """However the indices are grouped (ranks, micro batches), the same samples come, epochs crossed or not."""
    index = np.arange(first, first + sum(sizes), dtype=np.int64)
    whole = shuffled_indices(1, index, samples)
    pieces, at = [], 0
    for size in sizes:
        pieces.append(shuffled_indices(1, index[at : at + size], samples))
        at += size
    assert np.array_equal(np.concatenate(pieces), whole)


def test_epochs_and_seeds_differ_and_are_well_mixed() -> None:
    n = 4096
    index = np.arange(n, dtype=np.int64)
    first, second, other = (
        shuffled_indices(0, index, n),
        shuffled_indices(0, index + n, n),
        shuffled_indices(1, index, n),
    )
    for a, b in ((first, second), (first, other), (first, index)):
        assert (a == b).mean() < 0.01
        assert abs(np.corrcoef(a, b)[0, 1]) < 0.05
    steps = np.abs(np.diff(first))
    assert steps.mean() == pytest.approx(n / 3, rel=0.1)


def test_a_large_set_costs_nothing() -> None:
    index = np.asarray([0, 10**15, 3 * 10**15 + 7], dtype=np.int64)
    assert (shuffled_indices(0, index, 10**15) < 10**15).all()


def test_batches_are_a_function_of_the_step() -> None:
    source = counting(1000)
    eight, four = BatchLoader(source, 8, seed=5), BatchLoader(source, 4, seed=5)
    for step in (0, 3, 50):
        whole = eight.batch(step)
        halves = [four.batch(2 * step), four.batch(2 * step + 1)]
        for name in ("tokens", "labels"):
            assert np.array_equal(whole[name], np.concatenate([half[name] for half in halves]))
    whole = eight.batch(0)
    counted = whole["labels"] != -100
    assert (whole["labels"] == whole["tokens"] + 1)[counted].all()
    assert eight.batch(0)["tokens"].dtype.itemsize == 4


def test_held_out_samples_come_once_and_the_rest_counts_nowhere() -> None:
    source = counting(101)
    batches = list(BatchLoader(source, 4, seed=0, shuffle=False).one_epoch())
    assert len(batches) == 3
    labels = np.concatenate([batch["labels"] for batch in batches])
    assert sorted(labels[labels != -100]) == list(range(1, 101))


def test_synthetic_samples_follow_from_their_number() -> None:
    source = SyntheticTokens(configs.tiny_config())
    numbers = np.asarray([5, 9, 5], dtype=np.int64)
    rows = source.samples(numbers)["tokens"]
    assert np.array_equal(rows[0], rows[2])
    assert not np.array_equal(rows[0], rows[1])
