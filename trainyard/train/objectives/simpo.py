"""SimPO: the mean log-probability of an answer's tokens as a reward, with a margin, and without a reference."""

from typing import TYPE_CHECKING, Any, ClassVar

from trainyard.train.pair_loss import PairLoss, PairScores

if TYPE_CHECKING:
    from torch import Tensor


class SimPo(PairLoss):
    defaults: ClassVar[dict[str, Any]] = {"beta": 2.0, "margin": 1.0, "label_smoothing": 0.0}

    def pair_losses(self, scores: PairScores) -> "Tensor":
        from torch.nn.functional import logsigmoid

        beta, margin, smoothing = (self.options[name] for name in ("beta", "margin", "label_smoothing"))
        chosen, rejected = mean_log_probs(scores)
        reward = beta * (chosen - rejected) - margin
        return -(1 - smoothing) * logsigmoid(reward) - smoothing * logsigmoid(-reward)

    def rewards(self, scores: PairScores) -> "tuple[Tensor, Tensor]":
        chosen, rejected = mean_log_probs(scores)
        return self.options["beta"] * chosen.detach(), self.options["beta"] * rejected.detach()


def mean_log_probs(scores: PairScores) -> "tuple[Tensor, Tensor]":
    """Per token, of both answers of each pair."""
    chosen, rejected = scores.chosen_tokens.clamp(min=1), scores.rejected_tokens.clamp(min=1)
    return scores.chosen / chosen, scores.rejected / rejected


OBJECTIVE = SimPo
