"""Samples from token streams: every token once, document masks, blends, and Megatron's sample order."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from reference import reference_gpt_samples

from tests.support import configs
from tests.support.examples import examples
from tests.support.token_files import write_counting_documents
from trainyard import Trainer
from trainyard.config.load import parse
from trainyard.config.schema import Config
from trainyard.core.errors import UserError
from trainyard.data.formats.megatron_bin import MegatronTokens
from trainyard.data.loading.blend import CYCLE_SAMPLES, BlendedDataset, apportion
from trainyard.data.loading.build import build_datasets
from trainyard.data.loading.loader import BatchLoader
from trainyard.data.loading.megatron_order import MegatronOrderDataset, split_documents
from trainyard.data.loading.token_samples import ContiguousTokens, ReorderedTokens, TokenSamples

LENGTHS = st.lists(st.integers(0, 40), min_size=1, max_size=30).filter(lambda lengths: sum(lengths) > 1)


def token_config(*prefixes: Path, **data: object) -> Config:
    train = data.pop("train", {})
    assert isinstance(train, dict)
    return configs.tiny_config(
        {**configs.LLAMA, "vocab": 100_000},
        data={"source": "tokens", "paths": [str(prefix) for prefix in prefixes], "seq_len": 8, **data},
        train={"steps": 5, "global_batch": 8, "micro_batch": 1, **train},
    )


def reference_tokens(data: MegatronTokens, spans: list[tuple[int, int, int]]) -> list[int]:
    """The tokens of a reference sample, given as (document, start, count)."""
    return [token for document, start, count in spans for token in data.sequence(document)[start : start + count]]


@given(LENGTHS, st.integers(1, 50), st.sampled_from([1, 2, 4, 8]), st.integers(0, 3))
@examples(80)
def test_an_epoch_has_every_token_once(lengths: list[int], seq_len: int, ranks: int, epoch: int) -> None:
    """As a label except the first, as an input except the last; for any number of ranks and sequence length."""
    total, global_batch = sum(lengths), 8
    stream = ContiguousTokens("x", np.arange(total), np.cumsum([0, *lengths[:-1]]))
    dataset = TokenSamples(stream, min(seq_len, total - 1), total)
    loader = BatchLoader(dataset, global_batch, seed=1)
    per_rank, count = global_batch // ranks, len(dataset)
    labels, tokens = [], []
    for step in range(epoch * count // global_batch, -(-(epoch + 1) * count // global_batch)):
        batches = [loader.batch(step, slice(rank * per_rank, (rank + 1) * per_rank)) for rank in range(ranks)]
        positions = step * global_batch + np.concatenate([batch["sample_ids"] for batch in batches])
        in_epoch = (positions >= epoch * count) & (positions < (epoch + 1) * count)
        labels.append(np.concatenate([batch["labels"] for batch in batches])[in_epoch])
        tokens.append(np.concatenate([batch["tokens"] for batch in batches])[in_epoch])
    all_labels = np.concatenate(labels)
    assert sorted(all_labels[all_labels != -100]) == list(range(1, total))
    assert sorted(np.concatenate(tokens)[all_labels != -100]) == list(range(total - 1))


@given(LENGTHS, st.integers(1, 20), st.booleans(), st.booleans())
@examples(60)
def test_document_mask_and_eod_loss_mask(
    lengths: list[int], seq_len: int, document_mask: bool, mask_eod_loss: bool
) -> None:
    total = sum(lengths)
    seq_len = min(seq_len, total - 1)
    starts = np.cumsum([0, *lengths[:-1]])
    document = np.repeat(np.arange(len(lengths)), lengths)
    stream = ContiguousTokens("x", np.arange(total), starts[np.array(lengths) > 0])
    dataset = TokenSamples(stream, seq_len, total, document_mask, mask_eod_loss)
    for index in range(len(dataset)):
        sample = {name: array[0] for name, array in dataset.samples(np.array([index])).items()}
        for column, (token, label) in enumerate(zip(sample["tokens"], sample["labels"], strict=True)):
            next_token = index * seq_len + column + 1
            if next_token >= total or (mask_eod_loss and document[next_token] != document[next_token - 1]):
                assert label == -100
            else:
                assert label == next_token
                assert token == next_token - 1
            if document_mask and next_token <= total:
                first = max(starts[document[token]], index * seq_len)
                assert sample["position_ids"][column] == token - first
                same_document = sample["document_ids"][column] == sample["document_ids"][max(column - 1, 0)]
                assert same_document == (first != token or column == 0)
    assert ("document_ids" in sample) == document_mask


@given(LENGTHS, st.integers(1, 25), st.integers(1, 60), st.integers(0, 2**31))
@examples(80)
def test_megatron_order_equals_the_reference(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], seq_len: int, num_samples: int, seed: int
) -> None:
    data = write_counting_documents(tmp_path_factory.mktemp("set") / "x", lengths)
    dataset = MegatronOrderDataset(data, range(len(lengths)), num_samples, seq_len, seed, sum(lengths))
    reference = reference_gpt_samples(data.sequence_lengths, np.arange(len(lengths)), num_samples, seq_len, seed)
    assert len(dataset) == len(reference) == num_samples
    for index, spans in enumerate(reference):
        expected = reference_tokens(data, spans)
        sample = dataset.samples(np.array([index]))
        assert sample["tokens"][0].tolist() == expected[:-1]
        assert sample["labels"][0].tolist() == expected[1:]


def test_megatron_order_separates_a_short_last_epoch(tmp_path: Path) -> None:
    """Enough samples that the rule of 80% of an epoch matters, both ways."""
    data = write_counting_documents(tmp_path / "x", [37] * 50)
    per_epoch = (37 * 50 - 1) // 10
    for num_samples in (per_epoch + 20, per_epoch + per_epoch * 9 // 10):
        dataset = MegatronOrderDataset(data, range(50), num_samples, 10, 7, 2000)
        reference = reference_gpt_samples(data.sequence_lengths, np.arange(50), num_samples, 10, 7)
        for index in (0, 1, per_epoch - 1, per_epoch, num_samples - 1):
            expected = reference_tokens(data, reference[index])
            assert dataset.samples(np.array([index]))["tokens"][0].tolist() == expected[:-1]


@pytest.mark.parametrize(
    ("split", "ends"),
    [
        ("980,10,10", (98, 99, 100)),
        ("1,0,0", (100, 100, 100)),
        ("50/25/25", (50, 75, 100)),
        ("969, 30", (97, 100, 100)),
    ],
)
def test_document_split_is_that_of_megatron(split: str, ends: tuple[int, int, int]) -> None:
    train, valid, test = split_documents(split, 100, "megatron")
    assert (train.stop, valid.stop, test.stop) == ends
    assert (train.start, valid.start, test.start) == (0, *ends[:2])


def test_split_holds_out_documents_for_validation(tmp_path: Path) -> None:
    write_counting_documents(tmp_path / "x", [30] * 20)
    for order in ("shuffled", "megatron", "megatron-2023"):
        train, validation, _ = build_datasets(token_config(tmp_path / "x", split="8,2,0", order=order))
        assert validation is not None
        assert train.samples(np.arange(min(len(train), 40)))["tokens"].max() < 16 * 30
        tokens = validation.samples(np.arange(len(validation) - 1))["tokens"]
        assert tokens.min() == 16 * 30
        assert tokens.max() < 600


def test_evaluation_without_validation_samples_is_refused(tmp_path: Path) -> None:
    write_counting_documents(tmp_path / "x", [30] * 20)
    config = token_config(tmp_path / "x", split="1,0,0").model_dump(mode="json")
    with pytest.raises(UserError, match=r"evaluate\.every=2: data\.split=1,0,0 "):
        Trainer(parse(config, ["evaluate.every=2", "model.vocab=700"]))


def test_reordered_tokens_reads_sequences_in_the_given_order(tmp_path: Path) -> None:
    data = write_counting_documents(tmp_path / "x", [5, 7, 9])
    stream = ReorderedTokens(data, np.array([2, 0], np.int32))
    assert stream.tokens(0, 14).tolist() == [*range(12, 21), *range(5)]
    assert stream.document_starts(0, 14).tolist() == [0, 9]
    assert stream.document_starts(1, 9).tolist() == []


@given(st.lists(st.floats(0.01, 10), min_size=1, max_size=6), st.integers(1, 5000))
@examples(60)
def test_apportion_adds_up(weights: list[float], total: int) -> None:
    counts = apportion(weights, total)
    assert counts.sum() == total
    assert (abs(counts - np.array(weights) / sum(weights) * total) < 1).all()


def test_blend_has_its_weights_and_each_dataset_its_epochs(tmp_path: Path) -> None:
    first_tokens = {"a": 0, "b": 1000, "c": 2000}
    files = [write_counting_documents(tmp_path / name, [20] * 30, first) for name, first in first_tokens.items()]
    config = token_config(*(data.prefix for data in files), weights=[0.5, 0.3, 0.2])
    train, _, needs_shuffle = build_datasets(config)
    assert isinstance(train, BlendedDataset)
    assert not needs_shuffle
    indices = np.arange(CYCLE_SAMPLES)
    dataset, position = train.locate(indices)
    assert np.bincount(dataset).tolist() == [8192, 4915, 3277]
    for number in range(3):
        assert sorted(position[dataset == number]) == list(range((dataset == number).sum()))
    early = np.bincount(dataset[:2000], minlength=3) / 2000
    assert abs(early - [0.5, 0.3, 0.2]).max() < 0.04
    count = len(train.datasets[0])
    tokens = train.samples(indices)["tokens"]
    first_epoch = tokens[dataset == 0][np.argsort(position[dataset == 0])][:count]
    assert sorted(first_epoch[:, 0]) == sorted(np.arange(count) * 8)
    assert set((tokens[dataset == 1][:, 0] // 1000).tolist()) == {1}


def test_blend_in_megatron_order(tmp_path: Path) -> None:
    """The dataset furthest below its weight comes next, and each dataset has its own order."""
    files = [write_counting_documents(tmp_path / name, [50] * 40, first) for name, first in (("a", 0), ("b", 10_000))]
    config = token_config(*(data.prefix for data in files), weights=[3, 1], order="megatron", train={"steps": 10})
    train, _, needs_shuffle = build_datasets(config)
    assert not needs_shuffle
    assert len(train) == 80
    tokens = train.samples(np.arange(80))["tokens"]
    from_second = tokens[:, 0] >= 10_000
    taken, expected = [0, 0], []
    for position in range(80):
        deficits = [weight * max(position, 1) - count for weight, count in zip((0.75, 0.25), taken, strict=True)]
        expected.append(deficits[1] > deficits[0])
        taken[expected[-1]] += 1
    assert from_second.tolist() == expected
    reference = reference_gpt_samples(files[1].sequence_lengths, np.arange(40), 21, 8, config.train.seed)
    expected_tokens = [reference_tokens(files[1], spans)[:-1] for spans in reference]
    assert tokens[from_second].tolist() == expected_tokens[: from_second.sum()]


@given(st.integers(0, 10**12), st.sampled_from([1, 2, 4, 8]))
@examples(30)
def test_random_access_to_steps_of_a_blend(step: int, ranks: int) -> None:
    streams = [ContiguousTokens("x", np.arange(a, b), np.zeros(1, np.int64)) for a, b in ((1000, 1101), (2000, 2057))]
    datasets = [TokenSamples(stream, 5, 10_000) for stream in streams]
    loader = BatchLoader(BlendedDataset(datasets, [2, 1], seed=3), 8, seed=3, shuffle=False)
    per_rank = 8 // ranks
    parts = [loader.batch(step, slice(rank * per_rank, (rank + 1) * per_rank))["tokens"] for rank in range(ranks)]
    assert np.array_equal(np.concatenate(parts), loader.batch(step)["tokens"])


def test_tokens_outside_the_vocabulary_are_refused(tmp_path: Path) -> None:
    write_counting_documents(tmp_path / "x", [50], first_token=99_990)
    train, _, _ = build_datasets(token_config(tmp_path / "x"))
    with pytest.raises(UserError, match=r"x: token 100000 at 10, but model\.vocab=100000"):
        train.samples(np.array([0, 1]))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"split": "a,b"}, "data.split=a,b"),
        ({"paths": ["nowhere"]}, "data.paths=nowhere"),
        ({"seq_len": 5000}, "data.seq_len=5000"),
        ({"order": "megatron", "split": "0,1,0"}, "too few for a sample"),
    ],
)
def test_invalid_settings_are_one_line_errors(tmp_path: Path, data: dict, message: str) -> None:
    write_counting_documents(tmp_path / "x", [50] * 4)
    with pytest.raises(UserError, match=message) as caught:
        build_datasets(token_config(tmp_path / "x", **data))
    assert "\n" not in str(caught.value)
