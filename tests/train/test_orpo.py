"""ORPO, whose likelihood TRL computes over prompts too, against its definition with probabilities in fp64."""

import torch

from trainyard.config.preference_schema import PreferenceSection
from trainyard.train.objectives.orpo import Orpo
from trainyard.train.pair_loss import PairScores


def test_loss_is_the_odds_ratio_of_mean_probabilities() -> None:
    means = -torch.rand(2, 5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    tokens = torch.tensor([4.0, 7.0, 2.0]).expand(5, 3)
    zeros = torch.zeros(5, 3)
    scores = PairScores(*(means * tokens).float(), tokens, tokens, zeros, zeros)
    chosen, rejected = (p / (1 - p) for p in means.exp())
    ratio = chosen / rejected
    expected = -0.5 * (ratio / (1 + ratio)).log()
    found = Orpo(None, PreferenceSection(beta=0.5)).pair_losses(scores)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-6)


def test_certain_answers_have_finite_gradients() -> None:
    certain, unlikely = torch.zeros(1, 1, requires_grad=True), torch.full((1, 1), -500.0, requires_grad=True)
    ones = torch.ones(1, 1)
    for chosen, rejected in ((certain, unlikely), (unlikely, certain)):
        scores = PairScores(chosen, rejected, ones, ones, ones, ones)
        gradients = torch.autograd.grad(Orpo(None, PreferenceSection()).pair_losses(scores).sum(), (chosen, rejected))
        assert all(gradient.isfinite().all() for gradient in gradients)
