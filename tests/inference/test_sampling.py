"""The choice of the next token: which tokens are kept, how often each is drawn, and what a draw depends on."""

from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.support.examples import examples
from trainyard.inference import sampling
from trainyard.inference.requests import SamplingOptions
from trainyard.inference.sampling import (
    StepNeeds,
    TokenPenalties,
    choose_tokens,
    gumbel_noise,
    kept_tokens,
    token_logprobs,
)


class Options(NamedTuple):
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0


def choose(logits: Tensor, options: Options, seeds: Tensor, positions: Tensor) -> Tensor:
    rows = len(logits)
    return choose_tokens(
        logits,
        torch.full((rows,), options.temperature),
        torch.full((rows,), options.top_k),
        torch.full((rows,), options.top_p),
        seeds,
        positions,
    )


def random_logits(rows: int, vocab: int, seed: int = 0) -> Tensor:
    return 3 * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed))


def transformers_logits(logits: Tensor, options: Options) -> Tensor:
    """The logits after the processors of transformers' generate, -inf for tokens that are not kept."""
    from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    no_ids = torch.zeros(len(logits), 1, dtype=torch.long)
    logits = TemperatureLogitsWarper(options.temperature)(no_ids, logits)
    if options.top_k:
        logits = TopKLogitsWarper(options.top_k)(no_ids, logits)
    return TopPLogitsWarper(options.top_p)(no_ids, logits) if options.top_p < 1 else logits


TOP_P = st.one_of(st.just(1.0), st.floats(1 / 64, 1 - 1 / 1024, width=32))
"""Closer to 1, the sums of transformers, in fp32, decide by their rounding."""


@given(
    st.builds(Options, st.floats(0.1, 3.0), st.integers(0, 70), TOP_P),
    st.integers(2, 64),
    st.integers(0, 2**31),
)
@examples(300)
def test_keeps_the_tokens_that_transformers_keeps(options: Options, vocab: int, seed: int) -> None:
    logits = random_logits(5, vocab, seed)
    kept = kept_tokens(logits / options.temperature, torch.full((5,), options.top_k), torch.full((5,), options.top_p))
    assert torch.equal(kept, transformers_logits(logits, options).isfinite())


@pytest.mark.parametrize(("top_p", "count"), [(0.25, 1), (0.5, 1), (0.5001, 2), (0.75, 2), (0.875, 3)])
def test_tokens_that_sum_to_exactly_top_p_are_enough(top_p: float, count: int) -> None:
    probabilities = torch.tensor([[0.5, 0.25, 0.125, 0.0625, 0.0625]])
    logits = probabilities.log()
    assert torch.equal(logits.softmax(1), probabilities)  # without rounding
    kept = kept_tokens(logits, torch.zeros(1), torch.tensor([top_p]))
    assert kept.tolist() == [[index < count for index in range(5)]]
    assert torch.equal(kept, transformers_logits(logits, Options(top_p=top_p)).isfinite())


@pytest.mark.parametrize("options", [Options(), Options(0.7), Options(1.5, top_k=6), Options(1.2, 8, 0.8)])
def test_draws_have_the_distribution_of_multinomial(options: Options) -> None:
    draws, vocab = 40_000, 12
    logits = random_logits(1, vocab) / 2
    many = logits.expand(draws, vocab)
    counts = torch.bincount(choose(many, options, torch.arange(draws), torch.zeros(draws)).long(), minlength=vocab)
    expected = transformers_logits(logits, options).softmax(1)[0]
    reference = torch.multinomial(expected, draws, replacement=True, generator=torch.Generator().manual_seed(1))
    assert chi_squared(counts, expected * draws) < 40  # 11 degrees of freedom: p < 1e-4
    assert chi_squared(torch.bincount(reference, minlength=vocab), expected * draws) < 40
    assert chi_squared(counts.flip(0), expected * draws) > 1000


def chi_squared(counts: Tensor, expected: Tensor) -> float:
    return float(((counts - expected) ** 2 / expected.clamp(min=1e-9)).sum())


def test_positions_of_one_seed_draw_independently() -> None:
    noise = gumbel_noise(torch.full((3000,), 7), torch.arange(3000), 50)
    assert noise.mean() == pytest.approx(0.5772, abs=0.02)
    assert noise.var() == pytest.approx(1.6449, abs=0.03)
    standard = (noise - noise.mean()) / noise.std()
    for other in (standard[1:], gumbel_noise(torch.full((2999,), 8), torch.arange(2999), 50)):
        assert abs((standard[:-1] * other).mean()) < 0.01
    assert abs((standard[:, 1:] * standard[:, :-1]).mean()) < 0.01


@examples(50)
@given(st.floats(0.2, 5.0), st.integers(0, 2**31))
def test_repetition_penalty_is_that_of_transformers(penalty: float, seed: int) -> None:
    from transformers import RepetitionPenaltyLogitsProcessor

    logits, prompts = random_logits(3, 40, seed), [[1, 5, 5], [7], [0, 39]]
    penalties = TokenPenalties(4, 40, torch.device("cpu"))
    for slot, prompt in enumerate(prompts):
        penalties.start(slot + 1, SamplingOptions(repetition_penalty=penalty), prompt)
    penalties.counts[2, 9] = 2
    found = penalties.apply(logits, slice(1, 4))
    for row, tokens in enumerate([[1, 5, 5], [7, 9, 9], [0, 39]]):
        reference = RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([tokens]), logits[row : row + 1].clone())
        assert torch.equal(found[row], reference[0])
    penalties.start(2, SamplingOptions(), [1, 2])
    assert torch.equal(penalties.apply(logits, torch.tensor([1, 2, 3]))[1], logits[1])


def test_greedy_takes_the_lowest_of_equal_tokens() -> None:
    logits = torch.tensor([[0.0, 2.0, 2.0, 1.0], [5.0, -1.0, 5.0, 5.0]])
    assert choose(logits, Options(0.0, top_k=3, top_p=0.5), torch.arange(2), torch.arange(2)).tolist() == [1, 0]
    assert choose(logits, Options(1e-30), torch.arange(2), torch.arange(2)).tolist()[0] in (1, 2)
    assert choose(logits, Options(5.0, top_k=1), torch.arange(2), torch.arange(2)).tolist()[0] in (1, 2)


def test_a_draw_depends_only_on_its_own_row() -> None:
    """Greedy and sampled rows share a batch; a row alone gets the same token."""
    logits = random_logits(6, 100)
    temperature, top_k = torch.tensor([0.0, 1.0, 0.5, 0.0, 2.0, 1.0]), torch.tensor([0, 5, 0, 3, 50, 200])
    top_p, seeds = torch.tensor([1.0, 0.9, 1.0, 0.5, 0.99, 0.3]), torch.tensor([0, 1, -5, 2**62, 4, 1])
    arguments = (logits, temperature, top_k, top_p, seeds, torch.arange(6))
    together = choose_tokens(*arguments)
    assert together.dtype == torch.int32
    for row in range(6):
        alone = choose_tokens(*(argument[row : row + 1] for argument in arguments))
        assert alone[0] == together[row]
    assert together[0] == logits[0].argmax()


def test_a_batch_without_filters_draws_the_same_tokens_without_sorting(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, kept = SamplingOptions(temperature=1.0), SamplingOptions(temperature=1.0, top_k=3)
    assert not StepNeeds.of([plain, SamplingOptions(temperature=0.0, top_k=3)]).filtered
    assert all(StepNeeds.of([plain, each]).filtered for each in (kept, SamplingOptions(temperature=1.0, top_p=0.5)))
    arguments = (random_logits(50, 20), torch.ones(50), torch.zeros(50), torch.ones(50), torch.arange(50))
    expected = choose_tokens(*arguments, torch.arange(50))
    monkeypatch.setattr(sampling, "kept_tokens", None)
    assert torch.equal(choose_tokens(*arguments, torch.arange(50), filtered=False), expected)


def test_compiles_to_one_graph() -> None:
    arguments = (random_logits(4, 50), torch.tensor([0.0, 1.0, 0.5, 2.0]), torch.tensor([0, 5, 0, 9]))
    arguments += (torch.tensor([1.0, 0.9, 0.5, 1.0]), torch.arange(4), torch.arange(4))
    compiled = torch.compile(choose_tokens, backend="aot_eager", fullgraph=True, dynamic=False)
    assert torch.equal(compiled(*arguments), choose_tokens(*arguments))


def test_logprobs_of_tokens_and_of_the_most_likely_ones() -> None:
    logits, tokens = random_logits(3, 20), torch.tensor([4, 0, 19], dtype=torch.int32)
    logprob, ids, top = token_logprobs(logits.log_softmax(1), tokens, 5)
    expected = torch.log(logits.softmax(1))
    torch.testing.assert_close(logprob, expected[range(3), tokens])
    assert torch.equal(ids.long(), expected.argsort(1, descending=True)[:, :5])
    torch.testing.assert_close(top, expected.gather(1, ids.long()))
    assert token_logprobs(logits, tokens, 0)[1].shape == (3, 0)
