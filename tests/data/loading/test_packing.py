"""Documents become samples: as full as best fit decreasing makes them, documents whole, labels of trained tokens."""

import time
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.models.test_parity import model_from_hf
from tests.support import configs
from tests.support.conversations import LENGTHS, PAD_TOKEN, Conversations
from tests.support.hf_reference import hf_reference
from trainyard.core.constants import IGNORE_INDEX
from trainyard.core.errors import UserError
from trainyard.data.loading.packing import PackedSamples, PaddedSamples, document_samples, pack
from trainyard.train.losses.causal_lm import CausalLoss


def fills_of_best_fit(lengths: list[int], seq_len: int) -> list[int]:
    """Best fit decreasing one document at a time: the tokens in each pack."""
    rooms: list[int] = []
    for length in sorted(lengths, reverse=True):
        fitting = [number for number, room in enumerate(rooms) if room >= length]
        if not fitting:
            fitting = [len(rooms)]
            rooms.append(seq_len)
        rooms[min(fitting, key=lambda number: rooms[number])] -= length
    return sorted(seq_len - room for room in rooms)


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 40).flatmap(lambda size: st.tuples(st.just(size), st.lists(st.integers(1, size), max_size=60))))
def test_packs_are_those_of_best_fit_decreasing(case: tuple[int, list[int]]) -> None:
    seq_len, lengths = case
    order, bounds = pack(np.array(lengths, np.int32), seq_len)
    packs = [order[start:end].tolist() for start, end in pairwise(bounds)]
    assert sorted(order.tolist()) == list(range(len(lengths)))
    assert sorted(sum(lengths[index] for index in each) for each in packs) == fills_of_best_fit(lengths, seq_len)
    firsts = [each[0] for each in packs]
    assert firsts == sorted(firsts)
    assert all(lengths[each[0]] == max(lengths[index] for index in each) for each in packs)


def test_a_million_documents_are_packed_in_seconds() -> None:
    lengths = np.random.default_rng(0).lognormal(5.6, 0.9, 1_000_000).clip(8, 2048).astype(np.int32)
    start = time.perf_counter()
    _, bounds = pack(lengths, 2048)
    assert time.perf_counter() - start < 10
    assert lengths.sum() / (2048 * (len(bounds) - 1)) > 0.999


@pytest.mark.parametrize("packing", [False, True])
def test_samples_hold_every_document_once_with_its_labels(packing: bool) -> None:
    documents = Conversations(LENGTHS, 97)
    config = configs.tiny_config(data={"source": "a.b:c", "seq_len": 32, "packing": packing})
    dataset = document_samples(documents, config.data, PAD_TOKEN)
    samples = dataset.samples(np.arange(len(dataset)))
    found = {}
    for row in range(len(dataset)):
        indices = dataset.documents_of(row) if isinstance(dataset, PackedSamples) else [row]
        column = 0
        for number, index in enumerate(indices):
            tokens, trained = documents.document(index)
            part = slice(column, column + len(tokens))
            assert samples["tokens"][row, part].tolist() == tokens.tolist()
            # What the model should predict after each token of this document: nothing after the last one.
            expected = [token if is_trained else -100 for token, is_trained in zip(tokens, trained, strict=True)][1:]
            assert samples["labels"][row, part].tolist() == [*expected, -100]
            if packing:
                assert samples["position_ids"][row, part].tolist() == list(range(len(tokens)))
                assert (samples["document_ids"][row, part] == number).all()
            found[index], column = True, part.stop
        assert (samples["tokens"][row, column:] == PAD_TOKEN).all()
        assert (samples["labels"][row, column:] == IGNORE_INDEX).all()
        if packing:
            assert (samples["document_ids"][row, column:] == len(indices)).all()
            assert samples["position_ids"][row, column:].tolist() == list(range(32 - column))
    assert sorted(found) == list(range(len(LENGTHS)))
    assert set(samples) == {"tokens", "labels", *(("document_ids", "position_ids") if packing else ())}


@pytest.mark.parametrize("variant", ["llama-3.1", "gpt2", "mistral"])
def test_packed_samples_train_as_transformers_does_document_by_document(variant: str) -> None:
    _, hf, hf_config = hf_reference(variant)
    _, model = model_from_hf(hf, hf_config)
    documents = Conversations(LENGTHS, 97)
    packs = PackedSamples(documents, 32, PAD_TOKEN)
    batch = {name: torch.from_numpy(array) for name, array in packs.samples(np.arange(len(packs))).items()}
    rng = {"sample_ids": torch.arange(len(packs)).int(), "rng_key": torch.zeros(2, dtype=torch.int32)}
    total, count = CausalLoss().terms(model({**batch, **rng}), batch)["lm"]
    total.div(count).backward()
    hf_total, hf_count = torch.zeros(()), 0
    for index in range(len(LENGTHS)):
        tokens, trained = documents.document(index)
        labels = np.where(trained, tokens, IGNORE_INDEX)[1:]
        logits = hf(input_ids=torch.from_numpy(tokens)[None].long()).logits[0, :-1]
        hf_total = hf_total + torch.nn.functional.cross_entropy(
            logits, torch.from_numpy(labels).long(), ignore_index=IGNORE_INDEX, reduction="sum"
        )
        hf_count += int((labels != IGNORE_INDEX).sum())
    assert int(count) == hf_count
    torch.testing.assert_close(total / count, hf_total / hf_count, atol=1e-6, rtol=1e-6)
    (hf_total / hf_count).backward()
    ours, theirs = model.embedding.weight.grad, hf.get_input_embeddings().weight.grad  # type: ignore[operator, union-attr]
    torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-4)


def test_a_document_longer_than_a_sample_is_refused() -> None:
    for samples in (PaddedSamples, PackedSamples):
        with pytest.raises(UserError, match=r"data\.seq_len=16: document 1 has 17 tokens; nearest: 20"):
            samples(Conversations([3, 17, 20], 97), 16, PAD_TOKEN)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"source": "text", "packing": True}, "data.packing=true: .*nearest: data.document_mask=true"),
        ({"source": "a.b:c", "packing": True}, None),
    ],
)
def test_packing_needs_documents(data: dict[str, object], message: str | None) -> None:
    if message is None:
        assert configs.tiny_config(data=data).data.separates_documents
        return
    with pytest.raises(UserError, match=message):
        configs.tiny_config(data=data)
