"""Samples from rows of tokens: every token once, documents apart, in our order and in the reference's."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import gpt_samples

from tests.support import configs
from trainyard import Trainer
from trainyard.config.load import parse
from trainyard.config.schema import Config
from trainyard.core.errors import UserError
from trainyard.data.formats.megatron_bin import MegatronTokens, MegatronTokensWriter
from trainyard.data.loading import megatron_order
from trainyard.data.loading.blend import CYCLE_SAMPLES, BlendedDataset, apportion
from trainyard.data.loading.build import build_datasets
from trainyard.data.loading.loader import BatchLoader
from trainyard.data.loading.token_samples import ContiguousTokens, ReorderedTokens, TokenSamples

LENGTHS = st.lists(st.integers(0, 40), min_size=1, max_size=30).filter(lambda sizes: sum(sizes) > 1)


def write(prefix: Path, sizes: list[int], first: int = 0, dtype: str = "int32") -> MegatronTokens:
    """Documents of these lengths whose tokens count on."""
    with MegatronTokensWriter(prefix, dtype) as writer:
        tokens = np.arange(first, first + sum(sizes)).astype(dtype)
        writer.add(tokens, np.array(sizes, np.int32), np.ones(len(sizes), np.int64))
    return MegatronTokens(prefix)


def config(*prefixes: Path, **data: object) -> Config:
    train = data.pop("train", {})
    assert isinstance(train, dict)
    return configs.tiny_config(
        {**configs.LLAMA, "vocab": 100_000},
        data={"source": "tokens", "paths": [str(prefix) for prefix in prefixes], "seq_len": 8, **data},
        train={"steps": 5, "global_batch": 8, "micro_batch": 1, **train},
    )


@given(LENGTHS, st.integers(1, 50), st.sampled_from([1, 2, 4, 8]), st.integers(0, 3))
@settings(max_examples=80, deadline=None)
def test_an_epoch_has_every_token_once_however_it_is_divided(
    sizes: list[int], sequence: int, ranks: int, epoch: int
) -> None:
    """As a label but for the first, as an input but for the last; for any number of ranks and sequence length."""
    total = sum(sizes)
    source = TokenSamples(
        ContiguousTokens("x", np.arange(total), np.cumsum([0, *sizes[:-1]])), min(sequence, total - 1), total
    )
    count = len(source)
    batch = 8
    loader = BatchLoader(source, batch, seed=1)
    labels, tokens = [], []
    for step in range(epoch * count // batch, -(-(epoch + 1) * count // batch)):
        parts = [loader.batch(step, slice(r * batch // ranks, (r + 1) * batch // ranks)) for r in range(ranks)]
        index = step * batch + np.concatenate([part["sample_ids"] for part in parts])
        here = (index >= epoch * count) & (index < (epoch + 1) * count)
        labels.append(np.concatenate([part["labels"] for part in parts])[here])
        tokens.append(np.concatenate([part["tokens"] for part in parts])[here])
    seen = np.concatenate(labels)
    assert sorted(seen[seen != -100]) == list(range(1, total))
    assert sorted(np.concatenate(tokens)[seen != -100]) == list(range(total - 1))


@given(LENGTHS, st.integers(1, 20), st.booleans(), st.booleans())
@settings(max_examples=60, deadline=None)
def test_documents_are_told_apart(sizes: list[int], sequence: int, separate: bool, mask_ends: bool) -> None:
    total = sum(sizes)
    sequence = min(sequence, total - 1)
    begins = np.cumsum([0, *sizes[:-1]])
    own = np.repeat(np.arange(len(sizes)), sizes)
    source = TokenSamples(
        ContiguousTokens("x", np.arange(total), begins[np.array(sizes) > 0]), sequence, total, separate, mask_ends
    )
    for number in range(len(source)):
        sample = {name: array[0] for name, array in source.samples(np.array([number])).items()}
        for place, (token, label) in enumerate(zip(sample["tokens"], sample["labels"], strict=True)):
            next_token = number * sequence + place + 1
            if next_token >= total or (mask_ends and own[next_token] != own[next_token - 1]):
                assert label == -100
            else:
                assert label == next_token
                assert token == next_token - 1
            if separate and next_token <= total:
                first = max(begins[own[token]], number * sequence)
                assert sample["position_ids"][place] == token - first
                assert (sample["document_ids"][place] == sample["document_ids"][max(place - 1, 0)]) == (
                    first != token or place == 0
                )
    assert ("document_ids" in sample) == separate


@given(LENGTHS, st.integers(1, 25), st.integers(1, 60), st.integers(0, 2**31))
@settings(max_examples=80, deadline=None)
def test_the_reference_order(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], sequence: int, samples: int, seed: int
) -> None:
    data = write(tmp_path_factory.mktemp("set") / "x", sizes)
    ours = megatron_order.MegatronOrderDataset(data, range(len(sizes)), samples, sequence, seed, sum(sizes))
    theirs = gpt_samples(data.sequence_lengths, np.arange(len(sizes)), samples, sequence, seed)
    assert len(ours) == len(theirs) == samples
    for number, pieces in enumerate(theirs):
        wanted = np.concatenate([data.sequence(each)[first : first + count] for each, first, count in pieces])
        found = ours.samples(np.array([number]))
        assert found["tokens"][0].tolist() == wanted[:-1].tolist()
        assert found["labels"][0].tolist() == wanted[1:].tolist()


def test_a_last_epoch_that_is_little_used_comes_last(tmp_path: Path) -> None:
    """Enough samples that the rule of four fifths of an epoch matters, both ways."""
    data = write(tmp_path / "x", [37] * 50)
    per_epoch = (37 * 50 - 1) // 10
    for samples in (per_epoch + 20, per_epoch + per_epoch * 9 // 10):
        ours = megatron_order.MegatronOrderDataset(data, range(50), samples, 10, 7, 2000)
        theirs = gpt_samples(data.sequence_lengths, np.arange(50), samples, 10, 7)
        for number in (0, 1, per_epoch - 1, per_epoch, samples - 1):
            wanted = np.concatenate([data.sequence(each)[first : first + n] for each, first, n in theirs[number]])
            assert ours.samples(np.array([number]))["tokens"][0].tolist() == wanted[:-1].tolist()


@pytest.mark.parametrize(
    ("words", "ends"),
    [
        ("980,10,10", (98, 99, 100)),
        ("1,0,0", (100, 100, 100)),
        ("50/25/25", (50, 75, 100)),
        ("969, 30", (97, 100, 100)),
    ],
)
def test_splits_are_the_references(words: str, ends: tuple[int, int, int]) -> None:
    train, valid, test = megatron_order.split_documents(words, 100)
    assert (train.stop, valid.stop, test.stop) == ends
    assert (train.start, valid.start, test.start) == (0, *ends[:2])


def test_splits_hold_documents_out(tmp_path: Path) -> None:
    write(tmp_path / "x", [30] * 20)
    for order in ("shuffled", "megatron"):
        train, held, _ = build_datasets(config(tmp_path / "x", split="8,2,0", order=order))
        assert held is not None
        seen = train.samples(np.arange(min(len(train), 40)))["tokens"]
        assert seen.max() < 16 * 30
        inside = held.samples(np.arange(len(held) - 1))["tokens"]
        assert inside.min() == 16 * 30
        assert inside.max() < 600


def test_a_split_that_holds_nothing_out_is_told_at_once(tmp_path: Path) -> None:
    write(tmp_path / "x", [30] * 20)
    made = config(tmp_path / "x", split="1,0,0").model_dump(mode="json")
    with pytest.raises(UserError, match=r"evaluate\.every=2: data\.split=1,0,0 holds no sample out"):
        Trainer(parse(made, ["evaluate.every=2", "model.vocab=700"]))


def test_sequences_with_gaps_between_them_are_read_by_their_places(tmp_path: Path) -> None:
    data = write(tmp_path / "x", [5, 7, 9])
    chain = ReorderedTokens(data, np.array([2, 0], np.int32))
    assert chain.tokens(0, 14).tolist() == [*range(12, 21), *range(5)]
    assert chain.document_starts(0, 14).tolist() == [0, 9]
    assert chain.document_starts(1, 9).tolist() == []


@given(st.lists(st.floats(0.01, 10), min_size=1, max_size=6), st.integers(1, 5000))
@settings(max_examples=60, deadline=None)
def test_shares_add_up(weights: list[float], total: int) -> None:
    found = apportion(weights, total)
    assert found.sum() == total
    exact = np.array(weights) / sum(weights) * total
    assert (abs(found - exact) < 1).all()


def test_a_blend_keeps_its_weights_and_every_source_its_epochs(tmp_path: Path) -> None:
    sets = [write(tmp_path / name, [20] * 30, first) for name, first in (("a", 0), ("b", 1000), ("c", 2000))]
    made = config(*(data.prefix for data in sets), weights=[0.5, 0.3, 0.2])
    train, _, shuffle = build_datasets(made)
    assert isinstance(train, BlendedDataset)
    assert not shuffle
    numbers = np.arange(CYCLE_SAMPLES)
    which, inside = train.locate(numbers)
    assert np.bincount(which).tolist() == [8192, 4915, 3277]
    for number in range(3):
        assert sorted(inside[which == number]) == list(range((which == number).sum()))
    early = np.bincount(which[:2000], minlength=3) / 2000
    assert abs(early - [0.5, 0.3, 0.2]).max() < 0.04
    each = len(train.datasets[0])
    tokens = train.samples(numbers)["tokens"]
    first_epoch = tokens[which == 0][np.argsort(inside[which == 0])][:each]
    assert sorted(first_epoch[:, 0]) == sorted(np.arange(each) * 8)
    assert set((tokens[which == 1][:, 0] // 1000).tolist()) == {1}


def test_a_blend_in_the_reference_order(tmp_path: Path) -> None:
    """The set furthest behind its share is next, and each set has an order of its own."""
    sets = [write(tmp_path / name, [50] * 40, first) for name, first in (("a", 0), ("b", 10_000))]
    made = config(*(data.prefix for data in sets), weights=[3, 1], order="megatron", train={"steps": 10})
    train, _, shuffle = build_datasets(made)
    assert not shuffle
    assert len(train) == 80
    tokens = train.samples(np.arange(80))["tokens"]
    which = tokens[:, 0] >= 10_000
    taken, expected = [0, 0], []
    for place in range(80):
        behind = [share * max(place, 1) - count for share, count in zip((0.75, 0.25), taken, strict=True)]
        expected.append(behind[1] > behind[0])
        taken[expected[-1]] += 1
    assert which.tolist() == expected
    own = gpt_samples(sets[1].sequence_lengths, np.arange(40), 21, 8, made.train.seed)
    wanted = [np.concatenate([sets[1].sequence(e)[f : f + n] for e, f, n in pieces])[:-1] for pieces in own]
    assert np.array_equal(tokens[which], np.stack(wanted)[: which.sum()])


@given(st.integers(0, 10**12), st.sampled_from([1, 2, 4, 8]))
@settings(max_examples=30, deadline=None)
def test_any_step_of_a_blend_can_be_asked_for_alone(step: int, ranks: int) -> None:
    sources = [
        TokenSamples(ContiguousTokens("x", np.arange(k * 1000, k * 1000 + size), np.zeros(1, np.int64)), 5, 10_000)
        for k, size in ((1, 101), (2, 57))
    ]
    loader = BatchLoader(BlendedDataset(sources, [2, 1], seed=3), 8, seed=3, shuffle=False)
    whole = loader.batch(step)["tokens"]
    parts = [loader.batch(step, slice(r * 8 // ranks, (r + 1) * 8 // ranks))["tokens"] for r in range(ranks)]
    assert np.array_equal(np.concatenate(parts), whole)


def test_tokens_of_another_tokenizer_are_named(tmp_path: Path) -> None:
    write(tmp_path / "x", [50], first=99_990)
    train, _, _ = build_datasets(config(tmp_path / "x"))
    with pytest.raises(UserError, match=r"x: token 100000 at 10, but model\.vocab=100000"):
        train.samples(np.array([0, 1]))


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({"split": "a,b"}, "data.split=a,b"),
        ({"paths": ["nowhere"]}, "data.paths=nowhere"),
        ({"seq_len": 5000}, "data.seq_len=5000"),
        ({"order": "megatron", "split": "0,1,0"}, "too few for a sample"),
    ],
)
def test_what_cannot_be_is_one_line(tmp_path: Path, data: dict, words: str) -> None:
    write(tmp_path / "x", [50] * 4)
    with pytest.raises(UserError, match=words) as caught:
        build_datasets(config(tmp_path / "x", **data))
    assert "\n" not in str(caught.value)
