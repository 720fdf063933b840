"""The order of bucketed samples: each document once per epoch, as short as its batch allows, by the step alone."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support import configs
from tests.support.conversations import PAD_TOKEN, Conversations
from tests.support.examples import examples
from trainyard.core.errors import UserError
from trainyard.data.loading.buckets import BucketOrder
from trainyard.data.loading.dataset import subset
from trainyard.data.loading.loader import BatchLoader
from trainyard.data.loading.packing import PaddedSamples
from trainyard.data.loading.synthetic import SyntheticTokens

BUCKETS = (8, 16, 32)
LENGTHS = st.lists(st.integers(1, 32), min_size=1, max_size=90)


@given(LENGTHS, st.integers(1, 12), st.integers(0, 4), st.integers(0, 2**62))
@examples(150)
def test_every_epoch_has_every_sample_once(lengths: list[int], batch: int, epoch: int, seed: int) -> None:
    order = BucketOrder(np.array(lengths, np.int32), BUCKETS, batch, seed)
    positions = np.arange(len(lengths)) + epoch * len(lengths)
    assert sorted(order.indices(positions)) == list(range(len(lengths)))


@given(LENGTHS, st.integers(1, 12))
@examples(150)
def test_a_step_has_the_smallest_length_that_holds_its_samples(lengths: list[int], batch: int) -> None:
    order, sizes = BucketOrder(np.array(lengths, np.int32), BUCKETS, batch, 3), np.array(lengths)
    steps = -(-4 * len(lengths) // batch)
    longest = sizes[order.indices(np.arange(steps * batch)).reshape(steps, batch)].max(1)
    expected = [next(length for length in BUCKETS if length >= size) for size in longest.tolist()]
    assert order.step_lengths(0, steps).tolist() == expected
    assert [order.step_lengths(step, step + 1)[0] for step in range(steps)] == expected


def test_only_batches_between_buckets_mix_them() -> None:
    """At most one per boundary, and one at the end of the epoch."""
    lengths = np.random.default_rng(0).integers(1, 33, 1003).astype(np.int32)
    order = BucketOrder(lengths, BUCKETS, 8, 1)
    buckets = np.searchsorted(BUCKETS, lengths[order.indices(np.arange(5 * 1000)).reshape(-1, 8)])
    mixed = (buckets.min(1) != buckets.max(1)).sum()
    assert 0 < mixed <= 3 * 5
    lengths_of_steps = order.step_lengths(0, 625)
    assert np.abs(np.corrcoef(lengths_of_steps[1:], lengths_of_steps[:-1])[0, 1]) < 0.15, "batches are shuffled"
    first, second = order.indices(np.arange(1003)), order.indices(np.arange(1003, 2006))
    assert (first == second).mean() < 0.02


@given(st.lists(st.integers(1, 32), min_size=3, max_size=60), st.sampled_from([1, 2, 4]), st.integers(0, 10**9))
@examples(60)
def test_ranks_see_their_part_of_the_batch_and_nothing_but_padding_is_cut(
    lengths: list[int], ranks: int, step: int
) -> None:
    samples = PaddedSamples(Conversations(lengths, 97), 32, PAD_TOKEN)
    loader = BatchLoader(samples, 4, seed=5, buckets=BUCKETS)
    share, batch = 4 // ranks, loader.batch(step)
    parts = [loader.batch(step, slice(rank * share, (rank + 1) * share)) for rank in range(ranks)]
    full = samples.samples(loader.sample_indices(step))
    for name in ("tokens", "labels"):
        assert np.array_equal(np.concatenate([part[name] for part in parts]), batch[name])
        width = batch[name].shape[1]
        assert np.array_equal(full[name][:, :width], batch[name])
        assert (full[name][:, width:] == (PAD_TOKEN if name == "tokens" else -100)).all()
    assert loader.count_steps(step, step + 1) == {width: 1}


def test_held_out_samples_are_not_in_the_order() -> None:
    dataset = subset(PaddedSamples(Conversations([3, 30, 9, 20, 5], 97), 32, PAD_TOKEN), 1, 3)
    loader = BatchLoader(dataset, 1, 0, buckets=BUCKETS)
    assert sorted(loader.sample_indices(step)[0] for step in range(3)) == [0, 1, 2]
    assert loader.count_steps(0, 3) == {16: 1, 32: 2}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"buckets": [16, 64]}, r"data\.buckets=\[16, 64\]: must increase .*seq_len=32; nearest: \[16, 32\]"),
        ({"buckets": [8, 16]}, r"nearest: \[8, 16, 32\]"),
        ({"buckets": [16, 8, 32]}, r"nearest: \[8, 16, 32\]"),
        ({"buckets": [16, 32], "packing": True}, r"data\.packing=true .*nearest: \[\]"),
        ({"buckets": [16, 32], "source": "text"}, "data.source=text has no samples of whole documents"),
        ({"buckets": [16, 32], "paths": ["a", "b"], "weights": [1, 2]}, r"data\.weights has an order of its own"),
    ],
)
def test_invalid_buckets_are_one_line_errors(data: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        configs.tiny_config(data={"source": "chat", "seq_len": 32, **data})
    assert "\n" not in str(caught.value)


def test_samples_without_lengths_are_refused() -> None:
    config = configs.tiny_config()
    with pytest.raises(UserError, match=r"data\.buckets=\[8, 16\]: .*no `lengths`"):
        BatchLoader(SyntheticTokens(config.data, 97, 0), 2, 0, buckets=(8, 16))
