"""ORPO: the odds ratio of both answers as a penalty beside the likelihood of the chosen one, without a reference."""

from typing import TYPE_CHECKING, Any, ClassVar

from trainyard.train.objectives.simpo import mean_log_probs
from trainyard.train.pair_loss import PairLoss, PairScores

if TYPE_CHECKING:
    from torch import Tensor


class Orpo(PairLoss):
    term_names = ("pair", "likelihood")
    trains_likelihood = True
    defaults: ClassVar[dict[str, Any]] = {"beta": 0.1, "likelihood_weight": 1.0}

    def pair_losses(self, scores: PairScores) -> "Tensor":
        from torch.nn.functional import logsigmoid

        chosen, rejected = mean_log_probs(scores)
        return -self.options["beta"] * logsigmoid(log_odds(chosen) - log_odds(rejected))

    def rewards(self, scores: PairScores) -> "tuple[Tensor, Tensor]":
        chosen, rejected = mean_log_probs(scores)
        return self.options["beta"] * chosen.detach(), self.options["beta"] * rejected.detach()


def log_odds(log_prob: "Tensor") -> "Tensor":
    """log(p / (1 - p)). A probability of 1 in fp32 has finite odds."""
    import torch

    return log_prob - torch.log(-torch.expm1(log_prob.clamp(max=-1e-7)))


OBJECTIVE = Orpo
